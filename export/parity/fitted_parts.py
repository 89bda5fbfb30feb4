"""What can be wrong with a part of a layer that something follows, with a correction that is fitted to the capture.

A bias inside a feed-forward network, a bias of queries or keys that a norm follows, weights of norms in the middle of a
layer, and the order of the heads that a matrix reads. As in `fitted`, `causes` computes the stage with each correction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.equations import ACTIVATIONS, rms_norm
from llamac.export.parity.capture import Capture
from llamac.export.parity.changes import Suspect
from llamac.export.parity.fitted_states import is_other
from llamac.export.parity.fitting import Work, least_squares, with_fitted
from llamac.export.parity.observed import OUTPUTS, unrotated
from llamac.export.parity.replay import replay
from llamac.export.parity.stages import Key
from llamac.export.parity.tensor_differences import listed
from llamac.export.products import linear

Array = NDArray[np.float64]

PASSES, STEPS_OF_NORMS = 40, 200
DAMPING, SETTLED = 1e-2, 0.999
STARTS, FAR, SOLVED_ERROR = 8, 1.5, 1e-4
LEAST_SHARE = 1e-3  # of the mean effect: a number that has less hardly moves
STEP = 1e-6
EQUATIONS = 8  # for each number of a bias: more of the output's columns are not needed
MOST_STEPS = 1500  # of conjugate gradients
FIRST_STEPS, PROMISING = 100, 0.5  # after so many, so much of the squared error may be left, or the fit ends
SOLVED = 1e-12  # of the squared error may be left
MOST_HEADS = 40  # whose order is fitted: the unknowns are their square
TINY = 1e-30


def of_parts(checkpoint: Checkpoint, reference: Capture, key: Key, not_searched: list[str]) -> Iterator[Suspect]:
    """Yield the suspects of a stage of a layer. Arguments as for `fitted.fitted`."""
    stage = key[0]
    if stage in ("q", "k"):
        yield from _bias_before_norm(checkpoint, reference, key)
    if stage == "attn_out":
        yield from _heads_of_output(checkpoint, reference, key[1])
    if stage == "ffn":
        yield from _biases_of_network(checkpoint, reference, key[1], not_searched)
    if stage == "ffn_norm":
        yield from _norms_in_the_middle(checkpoint, reference, key[1])
    if stage == "block":
        yield from _norm_at_the_end(checkpoint, reference, key[1])


def _vector(checkpoint: Checkpoint, name: str) -> Array:
    return checkpoint.tensors[name].array().astype(np.float64)


# ---- biases


def _bias_before_norm(checkpoint: Checkpoint, reference: Capture, key: Key) -> Iterator[Suspect]:
    """The bias of queries or keys with which their norm gives the directions of the reference's heads."""
    (stage, layer), config = key, checkpoint.config
    record, name = config.layers[layer], f"layers.{layer}.attn_{stage}"
    if config.qk_norm not in ("head", "whole") or config.qk_norm_after_rope or record.kv_lora_rank:
        return
    heads = reference.stages["attn_norm", layer].astype(np.float64)
    before = linear(heads, checkpoint.tensors[f"{name}.weight"], None)
    weight = _vector(checkpoint, f"{name}_norm.weight")
    expected = unrotated(checkpoint, reference, key, reference.stages[key].astype(np.float64))
    width = len(weight)
    if expected.shape != before.shape or not weight.all():
        return
    directions = expected.reshape(len(before), -1, width) / weight
    directions /= np.maximum(np.linalg.norm(directions, axis=2, keepdims=True), TINY)
    ours = before.reshape(directions.shape)
    bias = np.empty(directions.shape[1:])
    for head in range(len(bias)):
        d, u = directions[:, head], ours[:, head]
        matrix = len(d) * np.eye(width) - d.T @ d
        target = (d * (d * u).sum(axis=1, keepdims=True) - u).sum(axis=0)
        bias[head] = least_squares(matrix, target)
    yield with_fitted(checkpoint, {f"{name}.bias": bias.reshape(-1)})


def _biases_of_network(
    checkpoint: Checkpoint, reference: Capture, layer: int, not_searched: list[str]
) -> Iterator[Suspect]:
    """The bias of up, or of gate, with which the network's output agrees."""
    config, record, name = checkpoint.config, checkpoint.config.layers[layer], f"layers.{layer}.ffn"
    is_plain = not (record.sub_norms or record.activation_limit or record.up_offset)
    if record.ffn not in ("plain", "gated") or config.activation not in ACTIVATIONS or not is_plain:
        return
    if config.rounds_inputs:
        return
    tensors, activate = checkpoint.tensors, ACTIVATIONS[config.activation]
    h, expected = (reference.stages[stage, layer].astype(np.float64) for stage in ("ffn_norm", "ffn"))
    up = linear(h, tensors[f"{name}_up.weight"], tensors.get(f"{name}_up.bias"))
    is_gated = record.ffn == "gated"
    gate = linear(h, tensors[f"{name}_gate.weight"], tensors.get(f"{name}_gate.bias")) if is_gated else up
    down = tensors[f"{name}_down.weight"].array().astype(np.float64)
    last = tensors.get(f"{name}_down.bias")
    target = expected if last is None else expected - last.array()
    columns = np.linspace(0, len(down) - 1, min(len(down), -(-EQUATIONS * down.shape[1] // len(h)))).astype(int)
    down, target = down[columns], target[:, columns]

    def of_up(bias: Array) -> Array:
        return activate(gate) * (up + bias) if is_gated else activate(up + bias)

    def of_gate(bias: Array) -> Array:
        return activate(gate + bias) * up

    for part, hidden in (("up", of_up), *([("gate", of_gate)] if is_gated else [])):
        found = tensors.get(f"{name}_{part}.bias")
        own = np.zeros(down.shape[1]) if found is None else found.array().astype(np.float64)
        for start in (np.zeros_like(own), *([-own] if own.any() else [])):  # from the file's bias, and from none
            work = Work()
            change = _fit_bias(hidden, down, target, start, work)
            if work.is_spent and (text := f"a bias of {name}_{part}") not in not_searched:
                not_searched.append(text)
            if change is not None:
                yield with_fitted(checkpoint, {f"{name}_{part}.bias": own + change})


def _fit_bias(hidden: Callable[[Array], Array], down: Array, target: Array, start: Array, work: Work) -> Array | None:
    """What to add to a bias, so that the hidden numbers times `down` give the target; None if no bias explains it.

    Activations are not monotonic, so a few numbers can end in a wrong minimum, far from the start. They begin again.
    """
    bias = start
    error = target - hidden(bias) @ down.T
    slopes = (hidden(bias + STEP) - hidden(bias - STEP)) / (2 * STEP)
    step = _least_squares(slopes, down, error, DAMPING, work, FIRST_STEPS)
    if work.is_spent or ((error - (slopes * step) @ down.T) ** 2).sum() > PROMISING * (error * error).sum():
        return None
    for _ in range(STARTS):
        bias, is_solved = _descend(hidden, down, target, bias, work)
        sizes = np.abs(bias - start)
        far = sizes > FAR * np.quantile(sizes, 0.9)
        if is_solved or work.is_spent or not far.any():
            break
        bias = np.where(far, start, bias)
    return bias


def _descend(
    hidden: Callable[[Array], Array], down: Array, target: Array, bias: Array, work: Work
) -> tuple[Array, bool]:
    """A minimum of the squared error (Levenberg and Marquardt), and whether the error vanishes there.

    It ends before the minimum if the work is spent.
    """
    damping = DAMPING
    error = target - hidden(bias) @ down.T
    for _ in range(PASSES):
        slopes = (hidden(bias + STEP) - hidden(bias - STEP)) / (2 * STEP)
        step = _least_squares(slopes, down, error, damping, work)
        left = target - hidden(bias + step) @ down.T
        before, now = float((error * error).sum()), float((left * left).sum())
        if now >= before:
            damping *= 4
            if work.is_spent:
                break
            continue
        bias, error, damping = bias + step, left, damping / 5
        if now > SETTLED * before or work.is_spent:
            break
    return bias, float(np.abs(error).max()) <= SOLVED_ERROR * float(np.abs(target).max())


def _least_squares(
    slopes: Array, down: Array, error: Array, damping: float, work: Work, most: int = MOST_STEPS
) -> Array:
    """The x for which (slopes * x) @ down.T is nearest to the error, by conjugate gradients with scaled columns.

    damping: Times the squared length of each column, it keeps x small.
    most: Steps.
    """
    squares = (slopes**2).sum(axis=0) * (down**2).sum(axis=0)
    scales = np.sqrt(np.maximum(squares, max(LEAST_SHARE * squares.mean(), TINY)))
    x, residual = np.zeros(slopes.shape[1]), error.copy()
    gradient = (slopes * (residual @ down)).sum(axis=0) / scales
    direction, square = gradient.copy(), float(gradient @ gradient)
    first = square
    for _ in range(min(4 * len(x), most)):
        if square <= SOLVED * first or not work.allows(2 * len(slopes) * down.size):
            break
        moved = (slopes * (direction / scales)) @ down.T
        length = square / max(float((moved * moved).sum() + damping * (direction @ direction)), TINY)
        x, residual = x + length * direction, residual - length * moved
        gradient = (slopes * (residual @ down)).sum(axis=0) / scales - damping * x
        square, before = float(gradient @ gradient), square
        direction = gradient + square / before * direction
    solved: Array = x / scales
    return solved


# ---- norms


def _norms_in_the_middle(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """The weights of the norm after attention, of the one before the network, and of both, which fit.

    The stage is norm(x + norm(attention) w1) w2, or, without a norm before the network, x + norm(attention) w1. The
    size of a row before the second norm is unknown, and converges.
    """
    config, record, name = checkpoint.config, checkpoint.config.layers[layer], f"layers.{layer}"
    if record.placement not in ("sandwich", "post") or config.norm != "rms":
        return
    before = ("block", layer - 1) if layer else ("embedding", 0)
    x, mixed, expected = (
        reference.stages[key].astype(np.float64) for key in (before, ("attn_out", layer), ("ffn_norm", layer))
    )
    normed = config.residual_scale * rms_norm(mixed, np.ones(config.dim), config.norm_eps)
    squares = np.maximum((normed * normed).sum(axis=0), TINY)
    if record.placement == "post":
        weight = ((expected - x) * normed).sum(axis=0) / squares
        yield with_fitted(checkpoint, {f"{name}.attn_post_norm.weight": weight})
        return
    names = f"{name}.attn_post_norm.weight", f"{name}.ffn_norm.weight"
    own = [_vector(checkpoint, part) for part in names]
    rows = x + normed * own[0]
    rows = rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + config.norm_eps)
    of_second = (rows * expected).sum(axis=0) / np.maximum((rows * rows).sum(axis=0), TINY)
    yield with_fitted(checkpoint, {names[1]: of_second})
    for both in (False, True):
        weight, second = own
        for _ in range(STEPS_OF_NORMS):
            sizes = np.sqrt(np.mean((x + normed * weight) ** 2, axis=1, keepdims=True) + config.norm_eps)
            rows = expected * sizes
            if both:  # rows / w2 - normed w1 = x in each column: two unknowns
                a, b, c = (rows * rows).sum(axis=0), -(rows * normed).sum(axis=0), squares
                p, q = (rows * x).sum(axis=0), -(normed * x).sum(axis=0)
                determinant = np.where(a * c - b * b == 0, TINY, a * c - b * b)
                inverse, new = (c * p - b * q) / determinant, (a * q - b * p) / determinant
                second = 1 / np.where(inverse == 0, TINY, inverse)
            else:
                new = ((rows / np.where(second == 0, TINY, second) - x) * normed).sum(axis=0) / squares
            change, weight = np.abs(new - weight).max(), new
            if change <= 1e-9 * np.abs(weight).max():
                break
        fitted = (weight, second) if both else (weight,)
        # a pair of which one is right is the other's fault alone
        if all(
            np.isfinite(w).all() and (not both or is_other(before, w)) for before, w in zip(own, fitted, strict=False)
        ):
            yield with_fitted(checkpoint, dict(zip(names, fitted, strict=False)))


def _norm_at_the_end(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """The weight of the norm after the network with which the layer's output agrees."""
    config, record, name = checkpoint.config, checkpoint.config.layers[layer], f"layers.{layer}.ffn_post_norm.weight"
    if record.placement not in ("sandwich", "post") or config.norm != "rms" or record.layer_embedding_dim:
        return
    network, expected = (reference.stages[stage, layer].astype(np.float64) for stage in ("ffn", "block"))
    error = expected - replay(checkpoint, reference, ("block", layer))
    factor = config.residual_scale * record.layer_scale
    normed = factor * rms_norm(network, np.ones(config.dim), config.norm_eps)
    change = (error * normed).sum(axis=0) / np.maximum((normed * normed).sum(axis=0), TINY)
    yield with_fitted(checkpoint, {name: _vector(checkpoint, name) + change})


# ---- heads


def _heads_of_output(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """The order of heads in the columns of the matrix after attention or a state.

    Least squares find how much of the product of each head with each head's columns the output has.
    """
    record = checkpoint.config.layers[layer]
    if len(OUTPUTS[record.mixer]) > 1 or record.mixer == "short_conv":
        return
    name = f"layers.{layer}.{OUTPUTS[record.mixer][0]}"
    heads = record.state_heads if record.mixer != "attention" else record.n_heads or checkpoint.config.n_heads
    if not 1 < heads <= MOST_HEADS or record.sub_norms:
        return
    weight = checkpoint.tensors[f"{name}.weight"].array().astype(np.float64)
    mixed = reference.stages["attn_mix", layer].astype(np.float64)[:, : weight.shape[1]]
    expected = reference.stages["attn_out", layer].astype(np.float64)
    if (bias := checkpoint.tensors.get(f"{name}.bias")) is not None:
        expected = expected - bias.array()
    outputs = np.linspace(0, len(weight) - 1, min(len(weight), -(-4 * heads * heads // len(mixed)))).astype(int)
    ours, columns = mixed.reshape(len(mixed), heads, -1), weight[outputs].reshape(len(outputs), heads, -1)
    products = np.einsum("thd,okd->tohk", ours, columns, optimize=True).reshape(-1, heads * heads)
    if len(products) < 2 * products.shape[1]:
        return
    shares = least_squares(products, expected[:, outputs].reshape(-1)).reshape(heads, heads)
    order = shares.argmax(axis=1)
    if len(set(order.tolist())) < heads or (order == np.arange(heads)).all():
        return
    moved = weight.reshape(len(weight), heads, -1)[:, order].reshape(weight.shape)
    text = f"the heads in the columns of {name}.weight are in another order: the original's are the file's "
    tensors = checkpoint.tensors | {f"{name}.weight": LazyTensor.of(moved.astype(np.float32))}
    yield Suspect(text + listed(order.tolist()), replace(checkpoint, tensors=tensors))
