"""Keys of K-EXAONE's config.json: lists that repeat what other keys say about each layer, and the MTP layer."""

from __future__ import annotations

from collections.abc import Sequence

from llamac.export.checkpoint import LayerConfig
from llamac.export.hf.keys import LIMITS, Keys
from llamac.export.hf.rope import FULL, SLIDING


def mtp_layer(keys: Keys, layers: Sequence[LayerConfig]) -> LayerConfig | None:
    """The MTP layer, whose network is dense; None: config.json does not state the kind of its attention.

    As in the other layers, attention without a window has no RoPE, unless no layer has a window.
    """
    _check_repeated(keys, layers)
    ffn_dim = keys.size("intermediate_size", "ffn_dim")
    types, windows = keys.value("mtp_layer_types"), keys.value("mtp_sliding_windows")
    if not types:
        return None
    if not isinstance(types, list) or types[0] not in (FULL, SLIDING):
        keys.wrong("mtp_layer_types", f"{FULL} or {SLIDING} for each MTP layer")
        return None
    has_window, most = types[0] == SLIDING, int(LIMITS["window"])
    window = windows[0] if isinstance(windows, list) and windows else 0
    if has_window and (type(window) is not int or not 1 <= window <= most):
        keys.wrong("mtp_sliding_windows", f"an integer from 1 to {most} for each MTP layer with {SLIDING}")
        return None
    has_rope = has_window or not any(layer.window for layer in layers)
    return LayerConfig("gated", ffn_dim, window=window if has_window else 0, rope=0 if has_rope else -1)


def _check_repeated(keys: Keys, layers: Sequence[LayerConfig]) -> None:
    """Check the lists that vLLM reads and transformers does not."""
    expected = {
        "sliding_windows": [layer.window for layer in layers],
        "is_moe_layer": [layer.ffn == "experts" for layer in layers],
    }
    for key, values in expected.items():
        found = keys.value(key)
        if found is not None and (not isinstance(found, list) or [value or 0 for value in found] != values):
            keys.wrong(key, f"{values}, as the other keys say")
