"""What can be wrong with a model file, with a correction that is computed from the capture.

`suspects` lists corrections that need no numbers of the reference. Here the order of a layer's experts, the weights of
norms that the file lacks, and the vectors of a recurrent layer are fitted to the reference's stages. A fit alone proves
nothing: `causes` computes the stage with it, as with every other suspect. Stages have many times more numbers than the
fits have unknowns, so a fit of the wrong tensor leaves a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.export import recurrent
from llamac.export.checkpoint import Checkpoint, LazyTensor, ModelConfig
from llamac.export.equations import rms_norm
from llamac.export.parity.capture import Capture
from llamac.export.parity.replay import replay
from llamac.export.parity.stages import Key
from llamac.export.parity.suspects import OF_HEADS, Suspect, with_record
from llamac.export.parity.tensor_differences import listed
from llamac.export.products import linear
from llamac.export.reference import Observer

Array = NDArray[np.float64]

# A row does not use an expert whose weight is below this.
UNUSED = 1e-4
MIN_ROWS = 8  # for two unknowns in each column
ROWS = 16  # of a recurrent layer that a vector is fitted to: states only depend on earlier rows
PASSES, HALVINGS = 12, 6
STEP = 1e-6  # of a number whose effect is measured
ENOUGH = 0.9  # of the error may be left after a pass, or the fit is at its end
# Normal equations square the condition: above this one, they are solved by the singular values of the matrix itself.
WELL_CONDITIONED = 1e10
# Numbers that are not finite, or a tensor that the fit needs and the file lacks or has in another shape, fit nothing.
NO_FIT = (np.linalg.LinAlgError, KeyError, ValueError)


def fitted(checkpoint: Checkpoint, reference: Capture, key: Key) -> Iterator[Suspect]:
    """Yield the suspects of a stage whose corrections are fitted to the reference's stages.

    Args:
        checkpoint: The file.
        reference: The capture, in the engine's form; the stages before `key` agree with it.
        key: The first stage that differs.
    """
    stage, layer = key
    of_stage = {"ffn": _order_of_experts, "ffn_norm": _missing_norms, "block": _missing_norms, "attn_mix": _vectors}
    if stage in of_stage:
        try:
            yield from of_stage[stage](checkpoint, reference, layer)
        except NO_FIT:
            return


# ---- experts


def _order_of_experts(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """The experts in the order in which the reference's output is their sum with the router's weights.

    A row of the output is the sum of the experts' outputs of that row, each times its weight. Least squares find these
    weights, in the reference's output and in the file's.
    """
    record = checkpoint.config.layers[layer]
    is_linear = not (record.expert_norms or record.expert_weights_first or record.expert_factors or record.sub_norms)
    if record.ffn != "experts" or not is_linear or record.n_experts >= checkpoint.config.dim:
        return
    h = reference.stages["ffn_norm", layer]
    before = ("block", layer - 1) if layer else ("embedding", 0)
    inputs = replace(reference, stages=reference.stages | {before: h})

    def output(changed: Checkpoint, **values: Any) -> Array:
        """The network's output of h: a layer that only has a network, without a norm before it."""
        return replay(with_record(changed, layer, mixer="none", placement="post", **values), inputs, ("ffn", layer))

    def of_expert(expert: int) -> Array:
        start = f"layers.{layer}.experts.{expert}."
        parts = {
            f"layers.{layer}.{name.removeprefix(start)}": tensor
            for name, tensor in checkpoint.tensors.items()
            if name.startswith(start)
        }
        ffn = "plain" if record.plain_experts else "gated"
        return output(replace(checkpoint, tensors=checkpoint.tensors | parts), ffn=ffn)

    shared = output(checkpoint, expert_scale=0.0)
    outputs = np.stack([of_expert(expert) for expert in range(record.n_experts)], axis=2)  # (n, dim, experts)
    sums = np.stack([output(checkpoint), reference.stages["ffn", layer]], axis=2) - shared[:, :, None]
    weights = np.stack([np.linalg.lstsq(*row, rcond=None)[0] for row in zip(outputs, sums, strict=True)])
    found, expected = weights[:, :, 0], weights[:, :, 1]
    used = np.flatnonzero(np.abs(found).max(axis=0) > UNUSED)
    order = {int(i): int(np.abs(expected - found[:, [i]]).max(axis=0).argmin()) for i in used}
    if len(set(order.values())) < len(order):
        return
    free = [expert for expert in range(record.n_experts) if expert not in order.values()]
    rest = [expert for expert in range(record.n_experts) if expert not in order]
    kept = [expert for expert in rest if expert in free]  # where nothing is known, an expert keeps its place
    moved = zip((i for i in rest if i not in kept), (i for i in free if i not in kept), strict=True)
    order |= {expert: expert for expert in kept} | dict(moved)
    tensors = dict(checkpoint.tensors)
    for name in checkpoint.tensors:
        start, _, end = name.partition(".experts.")
        if start == f"layers.{layer}" and end:
            expert, _, part = end.partition(".")
            tensors[name] = checkpoint.tensors[f"{start}.experts.{order[int(expert)]}.{part}"]
    places = [order[expert] for expert in range(record.n_experts)]
    text = f"the experts of layer {layer} are not in the order of the router's rows: "
    text += f"rows 0, 1, ... belong to the file's experts {listed(places)}"
    if rest:
        text += f" (the prompt does not use {listed(rest)})"
    yield Suspect(text, replace(checkpoint, tensors=tensors))


# ---- norms


def _missing_norms(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """Norms after both branches, with the weights that fit.

    The layer's output minus its input is then the sum of two normed branches, each column times a weight.
    """
    config, record = checkpoint.config, checkpoint.config.layers[layer]
    is_plain = record.layer_scale == 1 and not record.layer_embedding_dim
    if record.placement != "pre" or config.norm != "rms" or "none" in (record.mixer, record.ffn) or not is_plain:
        return
    before = ("block", layer - 1) if layer else ("embedding", 0)
    x, attn_out, ffn, block = (
        reference.stages[key].astype(np.float64)
        for key in (before, ("attn_out", layer), ("ffn", layer), ("block", layer))
    )
    if len(x) < MIN_ROWS:
        return
    ones = np.ones(config.dim)
    branches = np.stack([rms_norm(branch, ones, config.norm_eps) for branch in (attn_out, ffn)], axis=2)
    sums = (block - x) / config.residual_scale
    weights = np.stack([np.linalg.lstsq(branches[:, i], sums[:, i], rcond=None)[0] for i in range(config.dim)])
    changed = with_record(checkpoint, layer, placement="sandwich")
    for branch, part in enumerate(("attn", "ffn")):
        name = f"layers.{layer}.{part}_post_norm.weight"
        changed.tensors[name] = LazyTensor.of(weights[:, branch].astype(np.float32))
    text = f"layer {layer} lacks the norms after its branches (attn_post_norm and ffn_post_norm)"
    yield Suspect(text, changed)


# ---- recurrent layers


@dataclass(frozen=True)
class _Layer:
    """A recurrent layer for which products are computed once, and vectors can be replaced (`recurrent.Pass`)."""

    checkpoint: Checkpoint
    spans: list[slice]
    products: dict[str, Array] = field(default_factory=dict)
    vectors: dict[str, Array] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

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


def _vectors(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """Each vector with a number per head, with the numbers that fit."""
    record = checkpoint.config.layers[layer]
    names = [name for part in OF_HEADS if (name := f"layers.{layer}.{part}") in checkpoint.tensors]
    if not names or checkpoint.config.rounds_inputs:
        return
    h = reference.stages["attn_norm", layer][:ROWS].astype(np.float64)
    width = replay(checkpoint, reference, ("attn_mix", layer)).shape[1]
    own = record.state_heads * record.state_value_dim  # attention, if there is any, comes first
    expected = reference.stages["attn_mix", layer][:ROWS, width - own : width].astype(np.float64)
    run = _Layer(checkpoint, [slice(0, len(h))])
    for name in names:
        start = run.vector(name)
        try:
            numbers = _fit(run, h, layer, name, expected)
        except NO_FIT:
            continue
        finally:
            run.vectors.pop(name, None)
        state = "is missing" if not start.any() else "is wrong"
        text = f"{name} {state}: with numbers that are fitted to the capture, the stage agrees"
        tensors = checkpoint.tensors | {name: LazyTensor.of(numbers.astype(np.float32))}
        yield Suspect(text, replace(checkpoint, tensors=tensors))


def _fit(run: _Layer, h: Array, layer: int, name: str, expected: Array) -> Array:
    """The numbers of a vector, one per head, with which a layer gives the expected rows, by the Gauss-Newton method.

    h (n, dim), expected (n, heads * value_dim).
    """
    record = run.config.layers[layer]
    is_delta_net = record.mixer == "delta_net"

    def read(numbers: Array) -> tuple[Array, Array]:
        run.vectors[name] = numbers
        of_mixer = recurrent.delta_net_read if is_delta_net else recurrent.mamba2_read
        return of_mixer(run, h, layer, record)

    def normed(states: Array, z: Array) -> Array:
        of_mixer = recurrent.delta_net_norm if is_delta_net else recurrent.mamba2_gated
        return of_mixer(run, states, z, layer, record).reshape(-1)

    numbers, wanted = run.vector(name), expected.reshape(-1)
    with np.errstate(all="ignore"):
        for _ in range(PASSES):
            states, z = read(numbers)
            now = normed(states, z)
            moved, _ = read(numbers + STEP)
            effects = np.empty((len(now), len(numbers)))
            for head in range(len(numbers)):  # the heads of a norm depend on one another
                changed = states.copy()
                changed[:, head] = moved[:, head]
                effects[:, head] = (normed(changed, z) - now) / STEP
            step = _least_squares(effects, wanted - now)
            error = np.abs(wanted - now).max()
            for _ in range(HALVINGS):
                left = np.abs(wanted - normed(*read(numbers + step))).max()
                if left < error:
                    break
                step /= 2
            else:
                break
            numbers = numbers + step
            if left > ENOUGH * error:
                break
    return numbers


def _least_squares(matrix: Array, y: Array) -> Array:
    """The x for which matrix @ x is nearest to y. matrix (n, m), y (n), x (m)."""
    gram = matrix.T @ matrix
    if np.linalg.cond(gram) < WELL_CONDITIONED:
        solved: Array = np.linalg.solve(gram, matrix.T @ y)
        return solved
    return np.linalg.lstsq(matrix, y, rcond=None)[0].astype(np.float64)
