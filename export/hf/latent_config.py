"""Reads the keys of config.json that only families with multi-head latent attention have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamac.export.hf.keys import LIMITS, Keys
from llamac.export.hf.rope import RopeParameters
from llamac.export.latent import NORM_EPS

MULTIPLE = 16  # of the latent's width and of a head of v (docs/format.md)


@dataclass(frozen=True)
class Latent:
    """The widths of latent attention, as config.json states them; q_rank 0: q has no latent."""

    q_rank: int
    kv_rank: int
    nope: int
    rotated: int
    value: int

    @property
    def query_dim(self) -> int:
        """The width of a head of q."""
        return self.nope + self.rotated

    @property
    def head_dim(self) -> int:
        """The width of the key that all heads share."""
        return self.kv_rank + self.rotated

    def fields(self) -> dict[str, Any]:
        """The fields of the layer records."""
        return {
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope,
            "v_head_dim": self.value,
            "latent_norm_eps": NORM_EPS,
        }


def latent_attention(keys: Keys, row: Mapping[str, Any], dim: int, n_heads: int, n_kv_heads: int) -> Latent:
    """Read the widths."""

    def size(key: str, default: int | None) -> int:
        meaning = key if key in LIMITS else "qk_nope_head_dim"
        return keys.size(key, meaning, default, nullable=row[key] is None)

    has_no_latent = "q_lora_rank" in keys.nulls or (row["q_lora_rank"] is None and "q_lora_rank" not in keys.values)
    found = Latent(
        q_rank=0 if has_no_latent else size("q_lora_rank", row["q_lora_rank"]),
        kv_rank=size("kv_lora_rank", row["kv_lora_rank"]),
        nope=size("qk_nope_head_dim", row["qk_nope_head_dim"]),
        rotated=size("qk_rope_head_dim", row["qk_rope_head_dim"]),
        value=size("v_head_dim", row["v_head_dim"] or max(1, dim // n_heads)),
    )
    if keys.problems:
        return found
    for key, width in (("kv_lora_rank", found.kv_rank), ("v_head_dim", found.value)):
        if width % MULTIPLE:
            keys.wrong(key, f"a multiple of {MULTIPLE}")
    if found.head_dim > LIMITS["head_dim"]:
        keys.wrong("kv_lora_rank", f"at most {LIMITS['head_dim']:g} together with qk_rope_head_dim")
    if n_kv_heads != n_heads:
        keys.wrong("num_key_value_heads", f"num_attention_heads ({n_heads}): the latent has no groups of heads")
    # transformers computes both from the other keys
    head_dim = found.rotated if rotated_part(row, found) == 1 else found.query_dim
    for key, width in (("head_dim", head_dim), ("qk_head_dim", found.query_dim)):
        shared = found.head_dim if key == "head_dim" else width  # the width of the shared key, in Sarvam's own code
        if keys.value(key) not in (None, width, shared):
            keys.wrong(key, f"{width}, which follows from the other widths")
    return found


def rotated_part(row: Mapping[str, Any], latent: Latent | None) -> float:
    """The partial_rotary_factor that follows from the widths. Only some families take head_dim for all of a head."""
    return latent.rotated / latent.query_dim if latent and "partial_rotary_factor" in row else 1.0


def attention_factor(keys: Keys, parameters: RopeParameters) -> float:
    """What YaRN multiplies the attention scale by: the square of its factor of all dimensions."""
    weight = parameters.values.get("mscale_all_dim")
    if not weight:
        return 1.0
    factor = parameters.values.get("factor")
    if factor is None:
        keys.problems.append("mscale_all_dim needs a factor, which is null")
        return 1.0
    return (1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0) ** 2


def minicpm_scales(keys: Keys, row: Mapping[str, Any], dim: int, n_layers: int) -> dict[str, float]:
    """The scales of MiniCPM's embedding, branches and logits. null means none for the last two."""

    def number(key: str) -> float:
        value = keys.number(key, row[key], LIMITS["logit_scale"])
        if not value:
            keys.wrong(key, "a number above 0")
        return value or 1.0

    depth = 1.0 if "scale_depth" in keys.nulls else number("scale_depth") / math.sqrt(n_layers)
    base = 1.0 if "dim_model_base" in keys.nulls else number("dim_model_base") / dim
    return {"embedding_scale": number("scale_emb"), "residual_scale": depth, "logit_scale": base}
