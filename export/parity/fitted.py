"""What can be wrong with a model file, with a correction that is computed from the capture.

`suspects` lists corrections that need no numbers of the reference. Here the order of a layer's experts and the weights
of norms that the file lacks are fitted to the reference's stages; `fitted_parts` and `fitted_states` do so for parts of
a layer and for recurrent layers. A fit alone proves nothing: `causes` computes the stage with it, as with every other
suspect. Stages have many times more numbers than the fits have unknowns, so a fit of the wrong tensor leaves a
difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.equations import rms_norm
from llamac.export.parity.capture import Capture
from llamac.export.parity.changes import Suspect, swapped, transposed, with_changed, with_record
from llamac.export.parity.fitted_parts import of_parts
from llamac.export.parity.fitted_states import fitted_states, vectors_together
from llamac.export.parity.fitting import NO_FIT, least_squares
from llamac.export.parity.observed import of_one_expert
from llamac.export.parity.replay import replay
from llamac.export.parity.stages import Key
from llamac.export.parity.tensor_differences import listed

Array = NDArray[np.float64]

# A row does not use an expert whose weight is below this.
UNUSED = 1e-4
MOST_EXPERTS = 3  # that are tried one by one


def fitted(checkpoint: Checkpoint, reference: Capture, key: Key, not_searched: list[str]) -> Iterator[Suspect]:
    """Yield the suspects of a stage whose corrections are fitted to the reference's stages.

    Args:
        checkpoint: The file.
        reference: The capture, in the engine's form; the stages before `key` agree with it. It has `MIN_ROWS` positions
            or more.
        key: The first stage that differs.
        not_searched: Gets what is not fitted, or not to its end, since that costs too much.
    """
    stage, layer = key
    if stage == "attn_mix":
        yield from fitted_states(checkpoint, reference, layer, not_searched)
    of_stage = {"ffn": (_one_expert, _order_of_experts), "ffn_norm": (_missing_norms,), "block": (_missing_norms,)}
    fits = [fit(checkpoint, reference, layer) for fit in of_stage.get(stage, ())]
    for suspects in (*fits, of_parts(checkpoint, reference, key, not_searched)):
        try:
            yield from suspects
        except NO_FIT:
            continue


def fitted_together(checkpoint: Checkpoint, reference: Capture, key: Key) -> Iterator[Suspect]:
    """Yield the suspects that correct several vectors of a recurrent layer at once. Arguments as for `fitted`."""
    if key[0] == "attn_mix":
        yield from vectors_together(checkpoint, reference, key[1])


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
    weights = np.stack([least_squares(*row) for row in zip(outputs, sums, strict=True)])
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


def _one_expert(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """Faults of an expert that alone differs."""
    for expert in of_one_expert(checkpoint, reference, layer)[:MOST_EXPERTS]:
        start = f"layers.{layer}.experts.{expert}.ffn"
        for part in ("gate", "up", "down"):
            name = f"{start}_{part}.weight"
            yield Suspect(f"{name} is transposed", with_changed(checkpoint, name, transposed))
        if f"{start}_gate.weight" in checkpoint.tensors:
            text = f"{start}_gate and {start}_up are exchanged"
            yield Suspect(text, swapped(checkpoint, f"{start}_gate", f"{start}_up"))


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
    ones = np.ones(config.dim)
    branches = np.stack([rms_norm(branch, ones, config.norm_eps) for branch in (attn_out, ffn)], axis=2)
    sums = (block - x) / config.residual_scale
    weights = np.stack([least_squares(branches[:, i], sums[:, i]) for i in range(config.dim)])
    changed = with_record(checkpoint, layer, placement="sandwich")
    for branch, part in enumerate(("attn", "ffn")):
        name = f"layers.{layer}.{part}_post_norm.weight"
        changed.tensors[name] = LazyTensor.of(weights[:, branch].astype(np.float32))
    text = f"layer {layer} lacks the norms after its branches (attn_post_norm and ffn_post_norm)"
    yield Suspect(text, changed)
