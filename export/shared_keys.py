"""Layers that read the keys and values of an earlier layer of the same kind, as in Gemma 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamac.export.checkpoint import LayerConfig


def with_shared_keys(layers: Sequence[LayerConfig], n_shared: int) -> list[LayerConfig] | None:
    """The layers. The last `n_shared` read the keys and values of the last one before them.

    A layer reads those of one that has a window if it has a window itself. Layers that have none of their own have no
    fields of values. None: a kind of layers has none to read.
    """
    first = len(layers) - n_shared
    last = {layer.window > 0: index for index, layer in enumerate(layers[:first])}
    if any((layer.window > 0) not in last for layer in layers):
        return None
    return [
        layer if index < first else replace(layer, kv_source=last[layer.window > 0], v_is_k=0, v_norm="none")
        for index, layer in enumerate(layers)
    ]
