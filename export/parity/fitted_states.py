"""Suspects in a recurrent layer, with corrections fitted to the capture.

Vectors with a number per head, the bias of the convolution, and the order of heads are fitted. A norm after the state
scales each row by a number that the capture does not show. The fits leave these scales free: they only compare the
directions of rows. As in `fitted`, `causes` computes the stage with each correction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llamac.export import recurrent
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.delta_net import convolution, softplus
from llamac.export.equations import sigmoid, silu
from llamac.export.parity.capture import Capture
from llamac.export.parity.changes import Suspect
from llamac.export.parity.fitting import NO_FIT, Work, least_squares, with_fitted
from llamac.export.parity.observed import OF_STATES
from llamac.export.parity.suspects_recurrent import VECTORS
from llamac.export.parity.tensor_differences import listed
from llamac.export.products import linear
from llamac.export.reference import Observer

Array = NDArray[np.float64]
Numbers = TypeVar("Numbers", Array, NDArray[np.float32])

ROWS = 16  # of a layer that is fitted: states only depend on earlier rows
PASSES = 40
STEP = 1e-6  # of a number whose effect is measured
ENOUGH = 0.99  # of the squared error may be left after a pass, or the fit is at its end
NEGLIGIBLE = 1e-12  # singular values of scaled normal equations
CHANGED = 1e-3  # a smaller relative change of a vector is none
PASSES_OF_BIAS = 120
DAMPING = 1e-2  # of the first step, relative to the diagonal of the normal equations
MOST_DAMPING = 1e6  # the fit ends beyond
RAISED, LOWERED = 4, 5  # damping is multiplied after a step that was no better, and divided after one that was
SETTLED = 0.999  # of the squared error may be left after a step of little damping, or the fit is at its end
FARTHEST = 1.0  # that a number of a bias moves in a step: beyond, the slope of its activation is another
ROWS_OF_ORDERS = 8  # that are compared to find the order of heads
LARGEST = 1 << 26  # numbers of the largest matrix of a fit

# The parts of a recurrent layer that can be in another order of heads: their tensors.
PARTS = {
    "mamba2": {
        "x": ("mamba_xbc.weight",),
        "taps": ("mamba_conv.weight", "mamba_conv.bias"),
        "z": ("mamba_z.weight",),
        "dt": ("mamba_dt.weight",),
        "vectors": ("mamba_step.bias", "mamba_decay.weight", "mamba_skip.weight"),
    },
    "delta_net": {
        "v": ("delta_qkv.weight",),
        "taps": ("delta_conv.weight",),
        "z": ("delta_z.weight",),
        "a": ("delta_a.weight",),
        "beta": ("delta_beta.weight",),
        "vectors": ("delta_dt.bias", "delta_decay.weight"),
    },
}
# The parts that are moved together, the likeliest first.
TOGETHER = {
    "mamba2": ("x taps z dt vectors", "x taps", "x", "taps", "z", "dt", "vectors", "dt vectors", "x taps z", "x z"),
    "delta_net": (
        *("v taps z a beta vectors", "v taps", "v", "taps", "z", "a beta", "a", "beta", "vectors", "v taps z"),
        *("a beta vectors", "v z", "v taps z a beta"),
    ),
}


@dataclass(frozen=True)
class _Layer:
    """A recurrent layer for which products are computed once, and vectors can be replaced (`recurrent.Pass`)."""

    checkpoint: Checkpoint
    layer: int
    h: Array
    expected: Array  # (n, heads, value_dim)
    products: dict[str, Array] = field(default_factory=dict)
    vectors: dict[str, Array] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def record(self) -> LayerConfig:
        return self.config.layers[self.layer]

    @property
    def is_delta_net(self) -> bool:
        return self.record.mixer == "delta_net"

    @property
    def spans(self) -> list[slice]:
        return [slice(0, len(self.h))]

    @property
    def observe(self) -> Observer:
        return lambda stage, layer, values: None

    def linear(self, x: Array, name: str) -> Array:
        if name not in self.products:
            tensors = self.checkpoint.tensors
            self.products[name] = linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
        return self.products[name]

    def vector(self, name: str) -> Array:
        found = self.vectors.get(name)
        return self.checkpoint.tensors[name].array().astype(np.float64) if found is None else found

    def has(self, part: str) -> bool:
        return f"layers.{self.layer}.{part}" in self.checkpoint.tensors

    def read(self) -> tuple[Array, Array]:
        """What each token reads from the states, (n, heads, value_dim), and the gate, (n, heads * value_dim)."""
        of_mixer = recurrent.delta_net_read if self.is_delta_net else recurrent.mamba2_read
        return of_mixer(self, self.h, self.layer, self.record)

    def normed(self, states: Array, z: Array) -> Array:
        """The stage: the shape of `expected`."""
        of_mixer = recurrent.delta_net_norm if self.is_delta_net else recurrent.mamba2_gated
        return of_mixer(self, states, z, self.layer, self.record).reshape(self.expected.shape)

    def factors(self, z: Array) -> Array:
        """What multiplies the states but for the scales of rows: the gate and the norm's weight."""
        gate = silu(z).reshape(self.expected.shape)
        if self.is_delta_net:
            return gate * self.vector(f"layers.{self.layer}.delta_norm.weight")
        if self.config.state_norm == "none":
            return gate
        return gate * self.vector(f"layers.{self.layer}.mamba_norm.weight").reshape(self.expected.shape[1:])

    @property
    def groups(self) -> int:
        """In how many groups of heads a norm scales rows; 0 without a norm."""
        if self.is_delta_net:
            return self.record.state_heads
        return 0 if self.config.state_norm == "none" else self.record.state_key_heads

    def moving(self, vectors: dict[str, Array]) -> _Layer:
        """The layer with other vectors; the products are shared."""
        return replace(self, vectors=self.vectors | vectors)


def fitted_states(checkpoint: Checkpoint, reference: Capture, layer: int, not_searched: list[str]) -> Iterator[Suspect]:
    """Yield suspects of a recurrent layer whose output differs.

    Args:
        checkpoint: The file.
        reference: The capture, in the engine's form; the layer's input agrees with it.
        layer: The layer.
        not_searched: Gets what is not fitted, or not to its end, since that costs too much.
    """
    if checkpoint.config.layers[layer].mixer == "short_conv" and not checkpoint.config.rounds_inputs:
        yield from _bias_of_short_conv(checkpoint, reference, layer)
    run = _layer_with_state(checkpoint, reference, layer)
    if run is None:
        return
    yield from _vectors(run, (1,))
    if not run.is_delta_net:
        yield from _attempt(functools.partial(_bias_of_convolution, not_searched=not_searched), run)
    yield from _attempt(_orders, run)


def vectors_together(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """Yield the suspects that correct two or three vectors of such a layer. Arguments as for `fitted_states`."""
    run = _layer_with_state(checkpoint, reference, layer)
    if run is not None:
        yield from _vectors(run, (2, 3))


def _layer_with_state(checkpoint: Checkpoint, reference: Capture, layer: int) -> _Layer | None:
    """A layer with a state, for its first rows; None for other layers."""
    record = checkpoint.config.layers[layer]
    if record.mixer not in OF_STATES or checkpoint.config.rounds_inputs:
        return None
    own = record.state_heads * record.state_value_dim  # attention, if there is any, comes first
    rows = reference.stages["attn_mix", layer][:ROWS].astype(np.float64)
    width = own
    if record.mixer == "attention_mamba2":
        width += (record.n_heads or checkpoint.config.n_heads) * (record.head_dim or checkpoint.config.head_dim)
    expected = rows[:, width - own : width].reshape(len(rows), record.state_heads, -1)
    return _Layer(checkpoint, layer, reference.stages["attn_norm", layer][:ROWS].astype(np.float64), expected)


def _attempt(fit: Callable[[_Layer], Iterator[Suspect]], run: _Layer) -> Iterator[Suspect]:
    """The suspects of a fit, as far as there are any."""
    try:
        yield from fit(run)
    except NO_FIT:
        return


# ---- vectors


def _vectors(run: _Layer, sizes: Sequence[int]) -> Iterator[Suspect]:
    """The vectors with a number per head, a few at a time, with the numbers that fit."""
    names = [name for part in VECTORS if run.has(part) and (name := f"layers.{run.layer}.{part}")]
    for size in sizes:
        for some in combinations(names, size):
            try:
                numbers = _fit(run, some)
            except NO_FIT:
                continue
            if not all(is_other(run.vector(name), x) for name, x in numbers.items()):
                continue  # fewer vectors explain as much
            yield with_fitted(run.checkpoint, numbers)


def is_other(own: Array, fitted: Array) -> bool:
    """Whether fitted numbers are not the file's."""
    return bool(np.abs(fitted - own).max() > CHANGED * np.abs(own).max())


def _fit(run: _Layer, names: Sequence[str]) -> dict[str, Array]:
    """The numbers of vectors, one per head, with which a layer gives the expected rows (Levenberg and Marquardt)."""
    numbers = {name: run.vector(name) for name in names}
    damping = 0.0
    with np.errstate(all="ignore"):
        for _ in range(PASSES):
            now = run.moving(numbers)
            states, z = now.read()
            error = float(((run.expected - now.normed(states, z)) ** 2).sum())
            moves = [run.moving(numbers | {name: numbers[name] + STEP}).read()[0] for name in names]
            effects = np.stack([(moved - states) / STEP for moved in moves], axis=3)
            left = np.inf
            while damping <= MOST_DAMPING:
                step = _step(run, run.factors(z), states, effects, damping)
                tried = {name: numbers[name] + step[:, i] for i, name in enumerate(names)}
                new = run.moving(tried)
                left = float(((run.expected - new.normed(*new.read())) ** 2).sum())
                if left < error:
                    break
                damping = max(4 * damping, DAMPING)
            if not left < error:
                break
            numbers, damping = tried, damping / 5 if damping > DAMPING else 0.0
            if left > ENOUGH * error:
                break
    return numbers


def _step(run: _Layer, factors: Array, states: Array, effects: Array, damping: float) -> Array:
    """The damped least-squares step of the numbers of each head, (heads, vectors).

    effects: What each number moves, (n, heads, value_dim, vectors).

    The rows of a group of heads need to agree in their directions alone, so the component along the rows is taken off
    the error and, in the normal equations, off the effects.
    """
    heads = states.shape[1]
    moved, columns = factors * states, factors[..., None] * effects
    count = columns.shape[3]
    gram = np.zeros((heads, count, heads, count))
    own = np.einsum("thda,thdb->hab", columns, columns)
    gram[np.arange(heads), :, np.arange(heads), :] = own
    if not run.groups:
        error = run.expected - moved
        target = np.einsum("thda,thd->ha", columns, error)
    else:
        of_group = np.repeat(np.arange(run.groups), heads // run.groups)
        same = (of_group[:, None] == of_group).astype(np.float64)
        along = np.einsum("thda,thd->tha", columns, moved)
        squares = _in_groups(np.einsum("thd,thd->th", moved, moved), run.groups)  # (n, heads)
        wanted = _in_groups(np.einsum("thd,thd->th", run.expected, run.expected), run.groups)
        error = np.sqrt(squares / wanted)[..., None] * run.expected - moved
        products = _in_groups(np.einsum("thd,thd->th", error, moved), run.groups)
        target = np.einsum("thda,thd->ha", columns, error - (products / squares)[..., None] * moved)
        gram -= np.einsum("tha,tgb,hg->hagb", along / squares[..., None], along, same, optimize=True)
    flat = gram.reshape(heads * count, -1)
    scales = np.sqrt(np.maximum(np.diag(flat), np.finfo(np.float64).tiny))
    scaled = flat / np.outer(scales, scales) + damping * np.eye(len(flat))
    solved = least_squares(scaled, target.reshape(-1) / scales, NEGLIGIBLE)
    step: Array = (solved / scales).reshape(heads, count)
    return step


def _scaled_like(rows: Array, others: Array, axes: tuple[int, ...]) -> Array:
    """The others with the length of the rows over some axes."""
    lengths = [np.maximum((x * x).sum(axis=axes, keepdims=True), np.finfo(np.float64).tiny) for x in (rows, others)]
    scaled: Array = np.sqrt(lengths[0] / lengths[1]) * others
    return scaled


def _in_groups(of_heads: Array, groups: int) -> Array:
    """The sum over the heads of each head's group: (n, heads)."""
    parts = of_heads.reshape(len(of_heads), groups, -1)
    return np.repeat(parts.sum(axis=2), parts.shape[2], axis=1)


# ---- the bias of a convolution


def _bias_of_short_conv(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """The bias with which c * (convolution(b * x) + bias) agrees."""
    name, record = f"layers.{layer}", checkpoint.config.layers[layer]
    h, expected = (reference.stages[stage, layer].astype(np.float64) for stage in ("attn_norm", "attn_mix"))
    tensors = checkpoint.tensors
    b, c, x = np.split(linear(h, tensors[f"{name}.conv_in.weight"], tensors.get(f"{name}.conv_in.bias")), 3, axis=1)
    taps = tensors[f"{name}.conv_taps.weight"].array().astype(np.float64).reshape(record.conv_width, -1).T
    error = expected[:, : c.shape[1]] - c * convolution(b * x, taps)
    bias = (c * error).sum(axis=0) / np.maximum((c * c).sum(axis=0), np.finfo(np.float64).tiny)
    yield with_fitted(checkpoint, {f"{name}.conv_taps.bias": bias})


def _bias_of_convolution(run: _Layer, not_searched: list[str]) -> Iterator[Suspect]:
    """The bias of Mamba 2's convolution with which the layer gives the expected rows (Levenberg and Marquardt)."""
    name, record = f"layers.{run.layer}.mamba_conv.bias", run.record
    keys, values = record.state_key_heads * record.state_key_dim, record.state_heads * record.state_value_dim
    if 2 * record.state_key_dim * len(run.h) * values > LARGEST * record.state_key_heads:
        not_searched.append(f"a bias of layers.{run.layer}.mamba_conv")
        return
    own = run.checkpoint.tensors.get(name)
    starts = [np.zeros(values + 2 * keys)]
    if own is not None and own.array().any():
        starts.insert(0, own.array().astype(np.float64))
    for bias in starts:  # a wrong bias can be farther from the right one than none
        work = Work()
        yield with_fitted(run.checkpoint, {name: _fitted_bias(run, name, bias, work)})
        if work.is_spent and (text := f"a bias of layers.{run.layer}.mamba_conv") not in not_searched:
            not_searched.append(text)


def _fitted_bias(run: _Layer, name: str, bias: Array, work: Work) -> Array:
    """The numbers for `_bias_of_convolution`, from a start, as far as the work allows."""
    tensors = dict(run.checkpoint.tensors)
    base = replace(run, checkpoint=replace(run.checkpoint, tensors=tensors))

    def left(numbers: Array) -> float:
        tensors[name] = LazyTensor.of(numbers.astype(np.float32))  # rounded, as it is stored
        return float(((run.expected - base.normed(*base.read())) ** 2).sum())

    error, damping = left(bias), DAMPING
    with np.errstate(all="ignore"):
        for _ in range(PASSES_OF_BIAS):
            if not work.allows(_cost_of_step(run)):
                break
            step = np.clip(_step_of_bias(run, bias, damping), -FARTHEST, FARTHEST)
            now = left(bias + step)
            if not now < error:
                damping *= RAISED
                if damping > MOST_DAMPING:
                    break
                continue
            is_settled = now > SETTLED * error and damping < DAMPING
            bias, damping, error = bias + step, damping / LOWERED, now
            if is_settled:
                break
    return bias


def _cost_of_step(run: _Layer) -> float:
    """The multiplications of `_step_of_bias`: mostly those of the normal equations of each group."""
    rows, unknowns = run.expected.size, 2 * run.record.state_key_dim + len(run.h)
    return float(rows * unknowns**2 + 2 * len(run.h) * rows * run.record.state_key_dim)


def _step_of_bias(run: _Layer, bias: Array, damping: float) -> Array:
    """The damped least-squares step of a convolution's bias (Levenberg and Marquardt), of each group of heads alone."""
    name, record = f"layers.{run.layer}.mamba", run.record
    n, heads, width = run.expected.shape
    groups, dim = record.state_key_heads, record.state_key_dim
    values, keys, per = heads * width, groups * dim, heads // groups
    z, inputs, dt = (run.linear(run.h, f"{name}_{part}") for part in ("z", "xbc", "dt"))
    taps = run.vector(f"{name}_conv.weight").reshape(record.conv_width, -1).T
    shift, decay, skip = (run.vector(f"{name}_{part}") for part in ("step.bias", "decay.weight", "skip.weight"))
    steps = np.clip(softplus(dt + shift), run.config.state_step_min, run.config.state_step_max or None)
    sums = convolution(inputs, taps) + bias
    mixed, slopes = silu(sums), sigmoid(sums) * (1 + sums * (1 - sigmoid(sums)))
    logarithms = np.cumsum(steps * decay, axis=0)
    earlier = np.tril(np.ones((n, n), bool))[:, :, None]
    kernel = np.where(earlier, np.exp(np.minimum(logarithms[:, None] - logarithms, 0)) * steps, 0.0)  # (t, s, heads)
    factors, solved = run.factors(z), np.zeros(len(bias))
    for group in range(groups):
        own = slice(group * per, (group + 1) * per)
        of_x = slice(group * per * width, (group + 1) * per * width)
        of_b, of_c = (slice(start + group * dim, start + (group + 1) * dim) for start in (values, values + keys))
        x, b, c = (
            _Sloped(mixed[:, part].reshape(n, *shape), slopes[:, part].reshape(n, *shape))
            for part, shape in ((of_x, (per, width)), (of_b, (dim,)), (of_c, (dim,)))
        )
        columns, matrix, target = _jacobian_of_group(
            x, b, c, kernel[:, :, own], skip[own], factors[:, own], run.expected[:, own], has_scales=bool(run.groups)
        )
        solved[of_x], numbers = _eliminated_step(columns, matrix, target, damping, 2 * dim)
        solved[of_b], solved[of_c] = numbers[:dim], numbers[dim : 2 * dim]
    return solved


class _Sloped(NamedTuple):
    """What the activation gives, and its slope there."""

    value: Array
    slope: Array


def _jacobian_of_group(
    x: _Sloped,
    b: _Sloped,
    c: _Sloped,
    lags: Array,
    skip: Array,
    scale: Array,
    expected: Array,
    *,
    has_scales: bool,
) -> tuple[Array, Array, Array]:
    """How the rows of a group of heads depend on the biases of x, B and C, and how far they are from the expected ones.

    A row is scale_thp (sum over s of (C_t B_s) L_tsh x_shp + skip_h x_thp), for token t, head h and its channel p.

    Args:
        x: (tokens, heads, width)
        b: (tokens, dim)
        c: (tokens, dim)
        lags: (tokens t, tokens s, heads) L: the steps and decays between two tokens, 0 for later ones.
        skip: (heads)
        scale: (tokens, heads, width) The gate and the weight of the norm.
        expected: (tokens, heads, width)
        has_scales: Whether a norm follows: the scale of each row is then unknown, too.

    Returns:
        (tokens, channels) The derivatives by the bias of x, each number of which moves its own channel only.
        (tokens, channels, unknowns) Those by the biases of B and C, dim numbers each, and by the scales of rows.
        (tokens, channels) What is missing to the expected rows.
    """
    n = len(x.value)
    weights = np.einsum("tm,sm->ts", c.value, b.value)[:, :, None] * lags
    now = np.einsum("tsh,shp->thp", weights, x.value) + skip[:, None] * x.value
    columns = scale * (np.einsum("tsh,shp->thp", weights, x.slope) + skip[:, None] * x.slope)
    unknown = [
        scale[..., None] * of_c[:, None, None] * np.einsum("tsh,sm,shp->thpm", lags, of_b, x.value, optimize=True)
        for of_c, of_b in ((c.value, b.slope), (c.slope, b.value))
    ]
    moved = scale * now
    missing = expected - moved
    if has_scales:
        missing = _scaled_like(moved, expected, (1, 2)) - moved
        unknown.append(moved[..., None] * np.eye(n)[:, None, None])
    matrix = np.concatenate(unknown, axis=3)
    return columns.reshape(n, -1), matrix.reshape(n, -1, matrix.shape[3]), missing.reshape(n, -1)


def _eliminated_step(
    columns: Array, matrix: Array, target: Array, damping: float, n_damped: int
) -> tuple[Array, Array]:
    """The damped least-squares solution (own, shared) of columns * own + matrix @ shared = target.

    Each number of `own` occurs in one column, so its block D of the normal equations is diagonal. The Schur complement
    of D has only the shared unknowns: (G - S^T D^-1 S) shared = r - S^T D^-1 q, with the block G of the shared
    unknowns, the block S of both, and the right sides r and q.

    Args:
        columns: (tokens, channels)
        matrix: (tokens, channels, unknowns)
        target: (tokens, channels)
        damping: Adds this part of the diagonal to it, in D and for the first `n_damped` unknowns.
        n_damped: How many of the shared unknowns are damped.

    Returns:
        (channels) The own numbers.
        (unknowns) The shared ones.
    """
    lengths = np.maximum((columns * columns).sum(axis=0), np.finfo(np.float64).tiny)
    shares = np.einsum("tc,tcu->cu", columns, matrix) / lengths[:, None]
    share = (columns * target).sum(axis=0) / lengths
    flat, kept = matrix.reshape(-1, matrix.shape[2]), lengths / (1 + damping)
    gram = flat.T @ flat
    squares = np.maximum(np.diag(gram), np.finfo(np.float64).tiny)
    gram += np.diag(np.where(np.arange(len(gram)) < n_damped, damping * squares, 0.0))
    gram -= (shares.T * kept) @ shares
    rest, scales = flat.T @ target.reshape(-1) - shares.T @ (kept * share), np.sqrt(squares)
    shared = least_squares(gram / np.outer(scales, scales), rest / scales, NEGLIGIBLE) / scales
    own: Array = (share - shares @ shared) / (1 + damping)
    return own, shared


# ---- the order of heads


def _orders(run: _Layer) -> Iterator[Suspect]:
    """The order of heads, of all that a layer has for each head or of a part, with which the directions of rows agree.

    Each head's output is computed with the part of every other head.
    """
    mixer = "delta_net" if run.is_delta_net else "mamba2"
    rows = slice(0, ROWS_OF_ORDERS)
    run = replace(run, h=run.h[rows], expected=run.expected[rows], products={})
    run.read()  # computes the products once
    heads = run.record.state_heads
    for parts in TOGETHER[mixer]:
        names = [f"layers.{run.layer}.{name}" for part in parts.split() for name in PARTS[mixer][part] if run.has(name)]
        distances = np.empty((heads, heads))
        for shift in range(heads):
            order = (np.arange(heads) + shift) % heads
            distances[np.arange(heads), order] = _distances(_in_order(run, names, order), run)
        order = distances.argmin(axis=1)
        if len(set(order.tolist())) < heads or (order == np.arange(heads)).all():
            continue
        tensors = dict(run.checkpoint.tensors)
        for name in names:
            tensors[name] = LazyTensor.of(_reordered(run, name, tensors[name].array(), order))
        short = [name.removeprefix(f"layers.{run.layer}.") for name in names]
        text = f"the heads of {' and '.join([', '.join(short[:-1]), short[-1]] if len(short) > 1 else short)} of layer "
        text += f"{run.layer} are in another order: the original's are the file's {listed(order.tolist())}"
        yield Suspect(text, replace(run.checkpoint, tensors=tensors))


def _distances(changed: _Layer, run: _Layer) -> Array:
    """How far the rows of each head are from the expected ones; only their directions if a norm follows."""
    states, z = changed.read()
    ours, theirs = changed.factors(z) * states, run.expected
    if run.groups:
        ours, theirs = (x / np.maximum(np.linalg.norm(x, axis=2, keepdims=True), 1e-30) for x in (ours, theirs))
    distances: Array = ((ours - theirs) ** 2).sum(axis=(0, 2))
    return distances


def _in_order(run: _Layer, names: Sequence[str], order: NDArray[np.intp]) -> _Layer:
    """The layer with the parts of heads in another order. Products are reordered in place of their matrices."""
    products, vectors, tensors = dict(run.products), dict(run.vectors), dict(run.checkpoint.tensors)
    for name in names:
        module, _, kind = name.rpartition(".")
        if kind == "weight" and len(tensors[name].shape) == 2:
            products[module] = _reordered(run, name, run.linear(run.h, module).T, order).T
        elif name.endswith("conv.bias"):
            tensors[name] = LazyTensor.of(_reordered(run, name, tensors[name].array(), order))
        else:
            vectors[name] = _reordered(run, name, run.vector(name), order)
    return replace(run, checkpoint=replace(run.checkpoint, tensors=tensors), products=products, vectors=vectors)


def _reordered(run: _Layer, name: str, rows: Numbers, order: NDArray[np.intp]) -> Numbers:
    """A tensor, or the transposed product of one, with its heads in another order."""
    record, heads = run.record, len(order)
    if name.endswith("conv.weight"):
        taps = rows.reshape(record.conv_width, -1)
        moved: Numbers = np.stack([_of_channels(run, row, order) for row in taps]).reshape(rows.shape)
        return moved
    if name.endswith(("_qkv.weight", "_xbc.weight", "conv.bias")):
        return _of_channels(run, rows, order)
    result: Numbers = np.ascontiguousarray(rows.reshape(heads, -1, *rows.shape[1:])[order].reshape(rows.shape))
    return result


def _of_channels(run: _Layer, rows: Numbers, order: NDArray[np.intp]) -> Numbers:
    """The channels of a convolution with the heads of v, or of x, in another order."""
    record = run.record
    values = record.state_heads * record.state_value_dim
    first = 2 * record.state_key_heads * record.state_key_dim if run.is_delta_net else 0
    changed: Numbers = rows.copy()
    own = rows[first : first + values]
    changed[first : first + values] = own.reshape(len(order), -1, *own.shape[1:])[order].reshape(own.shape)
    return changed
