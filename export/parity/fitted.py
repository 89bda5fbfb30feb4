"""Suspects in a model file whose corrections are computed from the capture.

`suspects` lists corrections that need no numbers of the reference. Here the weights of norms that the file lacks are
fitted to the reference's stages; `fitted_parts`, `fitted_experts` and `fitted_states` do so for parts of a layer, for
experts and for recurrent layers. A fit alone proves nothing: `causes` computes the stage with it, as with every other
suspect. Stages have many times more numbers than the fits have unknowns, so a fit of the wrong tensor leaves a
difference.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.equations import rms_norm
from llamac.export.parity.capture import Capture
from llamac.export.parity.changes import Suspect, with_record
from llamac.export.parity.fitted_experts import fitted_experts
from llamac.export.parity.fitted_parts import of_parts
from llamac.export.parity.fitted_states import fitted_states, vectors_together
from llamac.export.parity.fitting import NO_FIT, least_squares
from llamac.export.parity.stages import Key

Array = NDArray[np.float64]


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
    fits = [of_parts(checkpoint, reference, key, not_searched)]
    if stage == "ffn":
        fits = [*fitted_experts(checkpoint, reference, layer, not_searched), *fits]
    if stage in ("ffn_norm", "block"):
        fits.insert(0, _missing_norms(checkpoint, reference, layer))
    for suspects in fits:
        try:
            yield from suspects
        except NO_FIT:
            continue


def fitted_together(checkpoint: Checkpoint, reference: Capture, key: Key) -> Iterator[Suspect]:
    """Yield the suspects that correct several vectors of a recurrent layer at once. Arguments as for `fitted`."""
    if key[0] == "attn_mix":
        yield from vectors_together(checkpoint, reference, key[1])


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
