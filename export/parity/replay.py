"""Computes one part of the graph again, in float64, from the inputs that the other implementation had.

The inputs of a part are right by definition, so the first stage that differs points to the weights or numbers that it
uses, and a changed checkpoint shows at once whether the change explains the difference.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.engine.model import Model
from llamac.export import pooling
from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.equations import attention_weights
from llamac.export.flat.model import model_config
from llamac.export.parity.capture import Capture
from llamac.export.parity.compare import Difference, Tolerance, difference, n_heads
from llamac.export.parity.stages import OF_TEXT, Key
from llamac.export.reference import Observer, forward_part

Array = NDArray[np.float64]


# Stages of a layer that only depend on what is before its mixer by the mixer's output and the layer's input.
AFTER_MIXER = ("ffn_norm", "ffn_router", "ffn", "block")


class _Found(Exception):
    """Ends a pass at the wanted stage, which it carries."""

    def __init__(self, values: Array) -> None:
        self.values = values


def checkpoint_of(model: Model) -> Checkpoint:
    """The open model's file as a checkpoint: what the engine computes with."""
    file = model.file
    whole = functools.lru_cache(maxsize=2)(file.tensor)  # matrices are read in chunks of rows

    def reader(name: str) -> Callable[[int, int], NDArray[np.float32]]:
        return lambda first, last: whole(name)[first:last]

    tensors = {record.name: LazyTensor(record.shape, record.dtype, reader(record.name)) for record in file.tensors}
    metadata = {key: value for key, value in file.metadata.items() if key == pooling.METADATA_KEY}
    return Checkpoint(model_config(file), tensors, metadata=metadata)


def replay(checkpoint: Checkpoint, inputs: Capture, key: Key) -> Array:
    """Compute a stage from the inputs of its part.

    Args:
        checkpoint: The weights.
        inputs: Whose stages are the inputs, in the engine's form.
        key: The stage.

    Returns:
        Shape (n, width), or (n, heads, n) for "weights".
    """
    stage, layer = key
    if stage in OF_TEXT:
        return pooling.pool(checkpoint, inputs.stages["output_norm", 0].astype(np.float64))
    wanted = "scores" if stage == "weights" else stage

    def observe(name: str, of_layer: int, values: Array) -> None:
        if name == wanted:
            raise _Found(values)

    mixed = None
    if stage in AFTER_MIXER and ("attn_out", layer) in inputs.stages:  # which has been compared before
        mixed = inputs.stages["attn_out", layer].astype(np.float64)
    try:
        _compute_part(checkpoint, inputs, part_of(checkpoint, key), observe, mixed)
    except _Found as found:
        values = found.values
    return _as_stage(checkpoint, key, values)


def replay_part(checkpoint: Checkpoint, inputs: Capture, key: Key) -> dict[Key, Array]:
    """Compute all stages of the part that has a stage, in one pass. Arguments as for `replay`, like the results."""
    found: dict[Key, Array] = {}

    def observe(name: str, layer: int, values: Array) -> None:
        own = ("weights" if name == "scores" else name), layer
        if own in inputs.stages:
            found[own] = _as_stage(checkpoint, own, values)

    if key[0] in OF_TEXT:
        return {key: replay(checkpoint, inputs, key)}
    _compute_part(checkpoint, inputs, part_of(checkpoint, key), observe)
    return found


def part_of(checkpoint: Checkpoint, key: Key) -> int:
    """The part of the pass that computes a stage, for `forward_part`."""
    n_layers = len(checkpoint.config.layers)
    return {"embedding": -1, "output_norm": n_layers, "logits": n_layers}.get(key[0], key[1])


def _compute_part(
    checkpoint: Checkpoint, inputs: Capture, part: int, observe: Observer, mixed: Array | None = None
) -> None:
    config, question = checkpoint.config, inputs.question
    x = inputs.stages["block", part - 1] if part > 0 else inputs.stages["embedding", 0]  # unused by the embedding
    options: dict[str, Any] = {"context": question.context, "observe": observe, "types": question.types}
    if 0 <= part < len(config.layers) and config.layers[part].kv_source >= 0:
        options["keys_values"] = _shared_keys_values(checkpoint, inputs, config.layers[part].kv_source)
    forward_part(checkpoint, question.ids, part, x.astype(np.float64), mixed=mixed, **options)


def _as_stage(checkpoint: Checkpoint, key: Key, values: Array) -> Array:
    """Observed values in the shape of a capture's stage."""
    stage, layer = key
    if stage != "weights":
        return values.reshape(len(values), -1)
    has_sinks = checkpoint.config.layers[layer].sinks
    sinks = checkpoint.tensors[f"layers.{layer}.attn_sinks.weight"].array() if has_sinks else None
    return attention_weights(values, None if sinks is None else sinks.astype(np.float64))


def _shared_keys_values(checkpoint: Checkpoint, inputs: Capture, source: int) -> tuple[Array, Array]:
    """The keys and values of layer `source` in a capture, (n, n_kv_heads, head_dim) each."""
    config, record = checkpoint.config, checkpoint.config.layers[source]
    n_kv_heads, head_dim = record.n_kv_heads or config.n_kv_heads, record.head_dim or config.head_dim
    keys, values = (
        inputs.stages[stage, source].reshape(len(inputs.question.ids), -1)[:, : n_kv_heads * head_dim]
        for stage in ("k", "v")
    )
    shape = (-1, n_kv_heads, head_dim)
    return keys.reshape(shape).astype(np.float64), values.reshape(shape).astype(np.float64)


def replayed_difference(checkpoint: Checkpoint, capture: Capture, key: Key, tolerance: Tolerance) -> Difference:
    """Compare a replayed stage with what the capture has for the same inputs."""
    return difference_of(checkpoint, capture, key, replay(checkpoint, capture, key), tolerance)


def difference_of(
    checkpoint: Checkpoint, capture: Capture, key: Key, replayed: Array, tolerance: Tolerance
) -> Difference:
    """Compare a stage that has been replayed with a capture's."""
    expected, width = capture.stages[key], math.prod(replayed.shape[1:])
    heads = n_heads(checkpoint.config, key)
    return difference(key, replayed, expected.reshape(len(expected), -1)[:, :width], heads, tolerance)
