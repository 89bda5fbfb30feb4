"""The MTP layer of a Hugging Face directory: its tensors are renamed to those of one more layer.

Of several MTP layers only the first is kept: it can predict any number of tokens.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from llamac.errors import ExportError
from llamac.export.hf.parsed_config import HfConfig
from llamac.export.stored import StoredTensor, are_equal

LEFT_OUT = "the MTP layer is left out, so llamac cannot draft with it"
# Copies of the model's matrices beside a numbered MTP layer, and the names of the originals; without the second, the
# first is both.
COPIES = {
    "embed_tokens.weight": ("model.embed_tokens.weight",),
    "shared_head.head.weight": ("lm_head.weight", "model.embed_tokens.weight"),
}

Stored = dict[str, StoredTensor]


def with_mtp(config: HfConfig, stored: Stored, warnings: list[str]) -> tuple[HfConfig, Stored]:
    """The config with an MTP layer, if the checkpoint has one, and the tensors, without those of further MTP layers.

    The MTP layer is like the family's `mtp_like`, unless the family's row or keys describe it.
    """
    family, model = config.family, config.model
    n = len(model.layers)
    layers = [layer for layer in model.layers if layer.mixer == "attention"]
    own = {name for name in stored if family.is_mtp(name, n)}
    others = {name: tensor for name, tensor in stored.items() if name not in own}
    if family.numbered_mtp:
        prefix = f"{family.prefix}layers.{n}."
        if f"{prefix}eh_proj.weight" not in own:  # these layers are too many
            return config, stored
        if different := _different_copy(stored, prefix):
            warnings.append(f"{LEFT_OUT}: {different} differ, and it can only share the model's")
            return config, others
        kept = {name: stored[name] for name in own if name.startswith(prefix) and name[len(prefix) :] not in COPIES}
    else:
        prefix, start, block = (re.escape(part) for part in (family.mtp_prefix, family.mtp_start, family.mtp_block))
        first, further = rf"^({prefix})?{block}\.0\.", rf"({prefix})?{start}[a-z_]+\.[1-9]\d*\..*"
        names = {name for name in own if not re.fullmatch(further, name)}
        kept = {re.sub(first, f"{family.prefix}layers.{n}.", name): stored[name] for name in names}
    if not layers or not kept:
        return config, others
    has_keys = "mtp_layer_types" in family.keys
    if has_keys and config.mtp_layer is None:
        warnings.append(f"{LEFT_OUT}: config.json has no mtp_layer_types, so the kind of its attention is unknown")
        return config, others
    layer = config.mtp_layer or layers[family.mtp_like]
    return replace(config, model=replace(model, mtp=layer)), others | kept


def dequantized(config: HfConfig, values: dict[str, Any], stored: Stored, warnings: list[str]) -> Stored:
    """The tensors with numbers in place of codes, without an MTP layer that cannot be read: nothing depends on it."""
    family, n_layers, quantization = config.family, len(config.model.layers), config.quantization
    if quantization is None:
        return stored
    others = {name: tensor for name, tensor in stored.items() if not family.is_mtp(name, n_layers)}
    if len(others) == len(stored):
        if number := _announced(family.mtp_key, values):
            warnings.append(f"{LEFT_OUT}: config.json has {family.mtp_key} {number}, but the files have no such layer")
        return quantization.dequantized(stored, family.is_ignored)
    try:
        return quantization.dequantized(stored, family.is_ignored)
    except ExportError as error:
        found = quantization.dequantized(others, family.is_ignored)
        warnings.append(f"{LEFT_OUT}: {error}")
        return found


def _announced(key: str, values: dict[str, Any]) -> int:
    """The number of MTP layers that config.json names."""
    texts = (values, values.get("text_config"))
    numbers = [text.get(key) for text in texts if isinstance(text, dict)] if key else []
    return next((number for number in numbers if type(number) is int and number > 0), 0)


def _different_copy(stored: Stored, prefix: str) -> str:
    """The names of a copy and its original that differ; "" if there are none."""
    for copy, originals in COPIES.items():
        original = next((name for name in originals if name in stored), None)
        if prefix + copy in stored and original and not are_equal(stored[prefix + copy], stored[original]):
            return f"{prefix}{copy} and {original}"
    return ""
