"""The keys of config.json of models whose layers have short convolutions (LFM2, LFM3)."""

from __future__ import annotations

from typing import Any

from llamac.export.hf.family import Family
from llamac.export.hf.keys import LIMITS, Keys
from llamac.export.hf.rope import FULL, SLIDING

SHORT_CONV = "conv"
# Names of the network's width.
WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")


def short_convs(keys: Keys, family: Family, attention: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fields of each layer's mixer, where some layers have a short convolution in place of attention."""
    row = family.keys
    short_conv = {"mixer": "short_conv", "conv_width": keys.size("conv_L_cache", "conv_width", row["conv_L_cache"])}
    kinds = _kinds(keys, family, len(attention))
    if SHORT_CONV in kinds and keys.values.get("conv_L_cache") == 1:
        keys.wrong("conv_L_cache", "2 or more: a convolution of one position would keep no state")
    windowed: dict[str, Any] = {}
    if "sliding_window" in row:
        windowed = {"window": keys.size("sliding_window", "window", row["sliding_window"], nullable=True)}
        if SLIDING in kinds and "sliding_window" in keys.nulls:
            keys.wrong("sliding_window", f"a number, because layers are {SLIDING}")
    gated: dict[str, Any] = {}
    if "use_attention_gate" in row and keys.flag("use_attention_gate", row["use_attention_gate"]):
        gated = {"output_gate": "head"}
    return [
        short_conv if kind == SHORT_CONV else {**mixer, **gated, **(windowed if kind == SLIDING else {})}
        for kind, mixer in zip(kinds, attention, strict=True)
    ]


def _kinds(keys: Keys, family: Family, n_layers: int) -> list[str]:
    """The kind of each layer."""
    known = (FULL, SHORT_CONV, *((SLIDING,) if "sliding_window" in family.keys else ()))
    listed = keys.integers("full_attn_idxs", 0, n_layers - 1) if "full_attn_idxs" in family.keys else None
    types = keys.value("layer_types")
    if types is None and "full_attn_idxs" in family.keys:
        types = [FULL if listed is None or layer in listed else SHORT_CONV for layer in range(n_layers)]
    elif types is None and SLIDING in known:
        of_four = (SLIDING, SHORT_CONV, FULL, SHORT_CONV)
        types = [of_four[layer % 4] if layer else SHORT_CONV for layer in range(n_layers)]
    if isinstance(types, list) and len(types) == n_layers and all(kind in known for kind in types):
        return types
    keys.wrong("layer_types", f"{', '.join(known[:-1])} or {known[-1]} for each of {n_layers} layers")
    return [FULL] * n_layers


def network_width(keys: Keys, family: Family, dim: int) -> int:
    """The width of the layers without experts. LFM2 computes it from the stated one."""
    row = family.keys
    key = next((name for name in WIDTHS if name in row), WIDTHS[0])
    is_optional = key in row and row[key] is None  # then it is four times the model's
    stated = keys.size(key, "ffn_dim", 4 * dim if is_optional else row.get(key), nullable=is_optional)
    if "block_ff_dim" not in row:
        return stated
    stated = keys.size("block_ff_dim", "ffn_dim", stated, nullable=True)
    multiple = keys.size("block_multiple_of", "ffn_dim", row["block_multiple_of"])
    factor = keys.number("block_ffn_dim_multiplier", row["block_ffn_dim_multiplier"], nullable=True)
    if not keys.flag("block_auto_adjust_ff_dim", row["block_auto_adjust_ff_dim"]):
        return stated
    width = int(2 * stated / 3)
    if factor is not None:
        width = multiple * -(-int(factor * width) // multiple)
    if not 0 < width <= LIMITS["ffn_dim"]:
        keys.wrong("block_ffn_dim_multiplier", f"a number for which the width is 1 to {LIMITS['ffn_dim']:g}")
    return max(1, width)
