"""The keys of config.json of models whose layers have short convolutions (LFM2)."""

from __future__ import annotations

from typing import Any

from llamac.export.hf.family import Family
from llamac.export.hf.keys import LIMITS, Keys
from llamac.export.hf.rope import FULL

SHORT_CONV = "conv"


def short_convs(keys: Keys, family: Family, attention: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fields of each layer's mixer, where some layers have a short convolution in place of attention."""
    row, n_layers = family.keys, len(attention)
    short_conv = {"mixer": "short_conv", "conv_width": keys.size("conv_L_cache", "conv_width", row["conv_L_cache"])}
    types = keys.value("layer_types")
    listed = keys.integers("full_attn_idxs", 0, n_layers - 1) if "full_attn_idxs" in row else None
    if types is None and "full_attn_idxs" in row:
        types = [FULL if listed is None or layer in listed else SHORT_CONV for layer in range(n_layers)]
    if not isinstance(types, list) or len(types) != n_layers or any(kind not in (FULL, SHORT_CONV) for kind in types):
        keys.wrong("layer_types", f"{FULL} or {SHORT_CONV} for each of {n_layers} layers")
        return attention
    return [short_conv if kind == SHORT_CONV else mixer for kind, mixer in zip(types, attention, strict=True)]


def network_width(keys: Keys, family: Family) -> int:
    """The width of the layers without experts. LFM2 computes it from the stated one."""
    row = family.keys
    stated = keys.size("intermediate_size", "ffn_dim", row.get("intermediate_size"))
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
        keys.wrong("block_ffn_dim_multiplier", f"a number for which the width is 1 to {LIMITS['ffn_dim']}")
    return max(1, width)
