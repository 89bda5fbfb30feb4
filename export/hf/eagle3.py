"""Reads EAGLE-3 heads, which draft for another model. A directory has config.json and weights, but no tokenizer.

A head is one layer of LLaMA with inputs of its own (csrc/eagle.h). Two layouts are in use: that of EAGLE and SGLang
(`midlayer.*`), whose config.json is LLaMA's with a few more keys, and that of the library `speculators` (`layers.0.*`),
whose config.json has LLaMA's keys in `transformer_layer_config`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.hf import model as hf
from llamac.export.hf.config import HfConfig, parse_config
from llamac.export.hf.families_gated import LLAMA
from llamac.export.hf.family import Module
from llamac.export.hf.family_parts import EMBEDDING, attention, mlp, norm
from llamac.export.hf.keys import Keys, shortened
from llamac.export.stored import INTEGERS, StoredTensor, integers, read_bytes

KIND = "EAGLE-3 head"
N_STATES = 3
CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
IDS, IS_DRAFTED = "d2t", "t2d"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# The layer's modules; its first norm is of the embedding.
MODULES = (
    EMBEDDING,
    Module("fc", ("drafter.in",)),
    Module("layers.0.input_layernorm", ("drafter.embedding_norm",)),
    norm("hidden_norm", "attn_norm"),
    *attention("attention_bias"),
    norm("post_attention_layernorm", "ffn_norm"),
    *mlp("mlp_bias"),
    Module("norm", ("output_norm",)),
)
# Keys of config.json and of its eagle_config that must have this value.
FIXED: dict[str, Any] = {"norm_before_fc": False, "fc_norm": False, "norm_output": False, "use_sliding_window": False}
FIXED |= {"parallel_drafting": False}
FIXED_EAGLE: dict[str, Any] = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True}
FIXED_EAGLE |= {"use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True}
FIXED_EAGLE |= {"parallel_draft_step": 1}
# Keys without effect on what a head computes.
HARMLESS = (
    *("max_window_layers", "has_no_defaults_at_init", "speculators_version", "speculators_config", "auto_map"),
    *("embed_requires_grad", "speculators_model_type", "target_model_type"),
)
OWN = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_config", LAYER_IDS)
INNER = "transformer_layer_config"


def is_head(values: dict[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head."""
    classes = values.get("architectures")
    names = classes if isinstance(classes, list) else [classes]
    is_of_eagle = values.get("model_type") == "llama" and "draft_vocab_size" in values
    return is_of_eagle or values.get("speculators_model_type") == "eagle3" or any(name in CLASSES for name in names)


def read(folder: Path, values: dict[str, Any], warnings: list[str]) -> Checkpoint:
    """Read a head.

    Args:
        folder: The directory.
        values: Its config.json.
        warnings: Receives warnings for the user.

    Raises:
        UnsupportedError, ExportError: As `hf.model.read`.
    """
    config = _config(values, warnings)
    files, stored = hf._read_weights(folder, config, warnings)
    stored = {re.sub(r"^(model\.)?midlayer\.", "layers.0.", name): tensor for name, tensor in stored.items()}
    names = hf._names(config.family, stored)
    ids = _drafted_ids(stored, names.pop(IDS, None), names.pop(IS_DRAFTED, None), config)
    has_embedding = EMBEDDING.full_name("weight") in names
    modules = MODULES if has_embedding else MODULES[1:]
    tensors = hf._canonical(replace(config.family, modules=modules), config, stored, names)
    tensors["drafter.output_ids.weight"] = LazyTensor.of(ids.astype(np.float32))
    table = config.ropes[0]
    tensors["rope.0.inv_freq"] = LazyTensor.of(table.inv_freq)
    if table.inv_freq_long is not None:
        tensors["rope.0.inv_freq_long"] = LazyTensor.of(table.inv_freq_long)
    metadata = {
        "name": folder.resolve().name,
        "architecture": "eagle3",
        "source": {"format": "huggingface", "files": ["config.json", *files]},
        "config": values,
    }
    return Checkpoint(config.model, tensors, metadata=metadata)


def _config(values: dict[str, Any], warnings: list[str]) -> HfConfig:
    """The config of the head's layer, as a model of one layer."""
    inner = values.get(INNER, values)
    if not isinstance(inner, dict):
        raise ExportError(f"config.json: {INNER} is {shortened(inner)}, expected an object: the config of the layer")
    outside = {*OWN, *FIXED, *HARMLESS}
    of_layer = {key: value for key, value in inner.items() if key not in outside}
    kind = of_layer.get("model_type", "llama")
    if kind != "llama":
        raise UnsupportedError(f"config.json: the {KIND} has a layer of model_type {shortened(kind)}, expected 'llama'")
    of_layer |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
    config = parse_config(of_layer, warnings)
    keys = Keys(values)
    draft_vocab_size = keys.size("draft_vocab_size", "vocab_size", config.model.vocab_size, nullable=True)
    trunk_dim = keys.size("target_hidden_size", "dim", config.model.dim, nullable=True)
    is_normed = keys.flag("norm_before_residual", False, nullable=True)
    layers = _layers(keys)
    for key, expected in FIXED.items():
        if keys.value(key) not in (None, expected):
            keys.wrong(key, f"{expected}: llamac does not compute other heads")
    keys.finish(values if inner is values else {INNER, *HARMLESS, "tie_word_embeddings"})
    if len(config.model.layers) != 1:
        raise UnsupportedError(f"config.json: num_hidden_layers is {len(config.model.layers)}, expected 1 in an {KIND}")
    if draft_vocab_size > config.model.vocab_size:
        raise ExportError(
            f"config.json: draft_vocab_size is {draft_vocab_size}, expected at most vocab_size"
            f" {config.model.vocab_size}"
        )
    model = replace(
        config.model,
        drafter="eagle3",
        trunk_dim=trunk_dim,
        eagle_layers=layers,
        eagle_vocab_size=draft_vocab_size,
        eagle_normed=int(is_normed),
    )
    return replace(config, model=model, family=replace(LLAMA, modules=MODULES))


def _layers(keys: Keys) -> tuple[int, int, int]:
    """After how many layers the head reads the model's residual stream; zeros: the three that all engines assume.

    Two conventions are in use. If the list begins with 1, its numbers name layers whose outputs are read; otherwise,
    they name layers whose inputs are read. SGLang distinguishes the two by this first number.
    """
    eagle = keys.value("eagle_config")
    inner = Keys(eagle if isinstance(eagle, dict) else {}, "eagle_config.")
    if eagle is not None and not isinstance(eagle, dict):
        keys.wrong("eagle_config", "an object")
    for key, expected in FIXED_EAGLE.items():
        if inner.value(key) not in (None, expected):
            inner.wrong(key, f"{expected}: llamac does not compute other heads")
    found = inner.value(LAYER_IDS) or keys.value(LAYER_IDS)
    for key in inner.unused():
        inner.wrong(key, "no such key: llamac does not know it, and it could change what the head computes")
    keys.problems += inner.problems
    if not found:
        return (0, 0, 0)
    if not (isinstance(found, list) and len(found) == N_STATES and all(type(n) is int and n >= 0 for n in found)):
        keys.problems.append(f"{LAYER_IDS} is {shortened(found)}, expected {N_STATES} numbers of layers")
        return (0, 0, 0)
    first, second, third = (n + (found[0] == 1) for n in found)
    return (first, second, third)


def _drafted_ids(
    stored: dict[str, StoredTensor], ids: str | None, is_drafted: str | None, config: HfConfig
) -> NDArray[np.int64]:
    """The token ids to which the head's logits belong. They are stored as their distances from 0, 1, ..."""
    n, vocab_size = config.model.eagle_vocab_size, config.model.vocab_size
    if ids is None:
        if n != vocab_size:
            raise ExportError(f"the tensors do not match config.json:\n  missing: {IDS}, with draft_vocab_size {n}")
        return np.arange(n)
    found = np.arange(n) + _distances(stored[ids], n)
    if not ((found >= 0) & (found < vocab_size)).all() or not (np.diff(found) > 0).all():
        raise ExportError(f"{IDS}: the {n} ids that it encodes do not ascend from 0 to at most {vocab_size - 1}")
    if is_drafted is not None:
        flags = stored[is_drafted]
        if flags.shape != (vocab_size,) or flags.dtype not in ("bool", "u8"):
            raise ExportError(f"{IS_DRAFTED} is {flags.dtype} {flags.shape}, expected bool ({vocab_size},)")
        if not np.array_equal(np.flatnonzero(read_bytes(flags, 0, vocab_size, 1)[:, 0]), found):
            raise ExportError(f"{IS_DRAFTED} and {IDS} name different ids")
    return found


def _distances(tensor: StoredTensor, n: int) -> NDArray[np.int64]:
    if tensor.shape != (n,) or tensor.dtype not in INTEGERS:
        raise ExportError(f"{IDS} is {tensor.dtype} {tensor.shape}, expected i64 ({n},)")
    return integers(tensor)
