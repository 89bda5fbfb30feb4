"""The keys of config.json of the families in `families_classic` that other families do not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamac.export.hf.families_classic import FALCON_NORMS
from llamac.export.hf.family import Family
from llamac.export.hf.keys import Keys

KINDS = ("global", "local")  # of GPT-Neo's layers; the second have a window


def with_norms(family: Family, values: Mapping[str, Any]) -> Family:
    """The row for Falcon's layers with two norms side by side, if a config.json describes these."""
    has_two = values.get("new_decoder_architecture") is True and values.get("num_ln_in_parallel_attn") in (None, 2)
    return FALCON_NORMS[family.model_type] if has_two and family.model_type in FALCON_NORMS else family


def n_kv_heads(keys: Keys, row: Mapping[str, Any], n_heads: int) -> int:
    """The number of KV heads of families with `multi_query`. Falcon's newer models state it."""
    stated = keys.size("num_kv_heads", "n_kv_heads", n_heads, nullable=True) if "num_kv_heads" in row else n_heads
    if "new_decoder_architecture" in row and keys.flag("new_decoder_architecture", row["new_decoder_architecture"]):
        keys.flag("multi_query", row["multi_query"])
        return stated
    return 1 if keys.flag("multi_query", row["multi_query"]) else n_heads


def is_parallel(keys: Keys, row: Mapping[str, Any]) -> bool:
    """Whether attention and the network of Falcon's layers are side by side."""
    is_new = keys.flag("new_decoder_architecture", row["new_decoder_architecture"])
    are_parallel = keys.flag("parallel_attn", row["parallel_attn"])
    if is_new and not are_parallel:
        keys.wrong("parallel_attn", "true: new_decoder_architecture is true")
    if keys.integer("num_ln_in_parallel_attn", 1, 2) == 2 and not is_new:
        keys.wrong("num_ln_in_parallel_attn", "1 or null: new_decoder_architecture is not true")
    return are_parallel


def check_widths(keys: Keys, dim: int) -> None:
    """Check that OPT's embedding is as wide as the model."""
    if keys.value("word_embed_proj_dim") not in (None, dim):
        keys.wrong("word_embed_proj_dim", f"hidden_size ({dim}): matrices after the embedding are not supported")


def _repeated(types: Any, most: int) -> list[Any] | None:
    """The kinds of up to `most` layers. GPT-Neo's config.json has them as lists, each with a number of repetitions."""
    found: list[Any] = []
    for pair in types if isinstance(types, list) else [None]:
        kinds, count = pair if isinstance(pair, list) and len(pair) == 2 else (None, 0)
        if not isinstance(kinds, list) or type(count) is not int or not 0 <= len(kinds) * count <= most:
            return None
        found += kinds * count
    return found


def local_layers(keys: Keys, n_layers: int) -> list[bool] | None:
    """Which of GPT-Neo's layers have a window; None: config.json does not say."""
    listed, types = keys.value("attention_layers"), keys.value("attention_types")
    if types is None:
        if listed is not None:
            keys.need("attention_types")
        return None
    found = _repeated(types, n_layers)
    if found is None or len(found) != n_layers or any(kind not in KINDS for kind in found):
        keys.wrong("attention_types", f"{' or '.join(KINDS)} for each of {n_layers} layers")
        return None
    if listed not in (None, found):
        keys.wrong("attention_layers", "the same kinds as attention_types")
    return [kind == KINDS[1] for kind in found]
