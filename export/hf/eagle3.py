"""Reads EAGLE-3 heads, which draft for another model. A directory has config.json and weights, but no tokenizer.

A head consists of layers of LLaMA or Qwen3. The first of them has other inputs (csrc/eagle.h). Two layouts are in
use: that of EAGLE and SGLang (`midlayer.*`), whose config.json is LLaMA's with a few more keys, and that of the library
`speculators` (`layers.0.*`), whose config.json has the layers' keys in `transformer_layer_config`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint, LazyTensor, ModelConfig
from llamac.export.drafters import EAGLE3, EAGLE_STATES, checked_ids
from llamac.export.hf import model as hf
from llamac.export.hf.config import parse_row
from llamac.export.hf.families_gated import LLAMA, QWEN3
from llamac.export.hf.family import Family, Module
from llamac.export.hf.family_parts import EMBEDDING, L
from llamac.export.hf.keys import Keys, shortened
from llamac.export.hf.parsed_config import HfConfig
from llamac.export.stored import INTEGERS, StoredTensor, integers, read_bytes

KIND = "EAGLE-3 head"
CLASSES = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "Eagle3Speculator"),
    "Eagle3DraftModel",
)
IDS, IS_DRAFTED = "d2t", "t2d"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
INNER, EAGLE = "transformer_layer_config", "eagle_config"
_SECTIONS = ("mrope_section", "mrope_interleaved")  # all three positions of a token of text are equal
# Rows of the heads' layers. In LLaMA's, only `layer_types` gives layers a window.
ROWS = {
    "llama": replace(
        LLAMA,
        keys={
            **LLAMA.keys,
            "layer_types": None,
            "sliding_window": None,
            "use_sliding_window": True,
            "max_window_layers": None,  # stored, but has no effect
        },
        windows="none",
        rope_harmless=_SECTIONS,
    ),
    "qwen3": replace(QWEN3, rope_harmless=_SECTIONS),
}
# What a head computes, and the names of the keys that say so, in config.json or its eagle_config.
FLAGS = {
    "norm_before_residual": ("norm_before_residual",),
    "norm_before_fc": ("norm_before_fc",),
    "fc_norm": ("fc_norm",),
    "norm_output": ("norm_output", "return_hidden_post_norm"),
}
# Keys of either that must have this value.
FIXED: dict[str, Any] = {
    "parallel_drafting": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "eh_proj_before_attn": False,
    "parallel_draft_step": 1,
    "num_aux_hidden_states": EAGLE_STATES,
    "num_aux_layers": EAGLE_STATES,
}
# Keys without effect on what a head computes.
HARMLESS = (
    *("has_no_defaults_at_init", "speculators_version", "speculators_config", "auto_map", "embed_requires_grad"),
    *("speculators_model_type", "target_model_type", "target_layer_count", "modal_type"),
)
SIZES = ("draft_vocab_size", "truncated_vocab_size", "target_hidden_size", "fc_input_size")
OF_HEAD = {*SIZES, LAYER_IDS, EAGLE, *FIXED, *(name for names in FLAGS.values() for name in names)}


def is_head(values: dict[str, Any]) -> bool:
    """Whether a config.json describes an EAGLE-3 head."""
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
    stored = {_usual_name(name): tensor for name, tensor in stored.items()}
    names = hf._names(config.family, stored)
    ids = _drafted_ids(stored, names.pop(IDS, None), names.pop(IS_DRAFTED, None), config)
    has_embedding = EMBEDDING.full_name("weight") in names
    modules = config.family.modules if has_embedding else config.family.modules[1:]
    tensors = hf._canonical(replace(config.family, modules=modules), config, stored, names)
    tensors["drafter.output_ids.weight"] = LazyTensor.of(ids.astype(np.float32))
    table = config.ropes[0]
    tensors["rope.0.inv_freq"] = LazyTensor.of(table.inv_freq)
    if table.inv_freq_long is not None:
        tensors["rope.0.inv_freq_long"] = LazyTensor.of(table.inv_freq_long)
    metadata = {
        "name": folder.resolve().name,
        "architecture": EAGLE3,
        "source": {"format": "huggingface", "files": ["config.json", *files]},
        "config": values,
    }
    return Checkpoint(config.model, tensors, metadata=metadata)


def _usual_name(name: str) -> str:
    """The name of a tensor, with layers.{l} in place of midlayer, which has a number if there are several layers."""
    return re.sub(r"^(model\.)?midlayer\.(?:(\d+)\.)?", lambda found: f"layers.{found[2] or 0}.", name)


def _modules(row: Family, model: ModelConfig) -> tuple[Module, ...]:
    """The modules of a head, the embedding first."""
    of_layers = [m for m in row.modules if m.per_layer and m.parts != (f"{L}attn_norm",)]
    in_norms = {
        "none": (),
        "whole": (Module("input_norm", ("drafter.in_norm",)),),
        "each": (Module("fc_norm.{h}", ("drafter.in_norm",)),),
    }
    return (
        EMBEDDING,
        *in_norms[model.eagle_in_norm],
        Module("fc", ("drafter.in",)),
        Module("layers.0.input_layernorm", ("drafter.embedding_norm",)),
        Module("layers.0.hidden_norm", ("layers.0.attn_norm",)),
        *(
            Module(f"layers.{later}.input_layernorm", (f"layers.{later}.attn_norm",))
            for later in range(1, len(model.layers))
        ),
        *of_layers,
        Module("norm", ("output_norm",)),
    )


def _config(values: dict[str, Any], warnings: list[str]) -> HfConfig:
    """The config of the head, as a model of its layers."""
    inner = values.get(INNER, values)
    if not isinstance(inner, dict):
        raise ExportError(f"config.json: {INNER} is {shortened(inner)}, expected an object: the config of the layers")
    outside = {*HARMLESS, *(OF_HEAD if inner is values else ())}
    of_layers = {key: value for key, value in inner.items() if key not in outside}
    kind = of_layers.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in ROWS:
        raise UnsupportedError(
            f"config.json: the {KIND} has layers of model_type {shortened(kind)}, expected one of {', '.join(ROWS)}"
        )
    row = ROWS[kind]
    of_layers |= {"architectures": [row.architectures[0]], "tie_word_embeddings": False}
    config = parse_row(row, of_layers, warnings)
    keys = Keys(values)
    given = values.get(EAGLE)
    if given is not None and not isinstance(given, dict):
        keys.wrong(EAGLE, "an object")
    eagle = Keys(given if isinstance(given, dict) else {}, f"{EAGLE}.")
    head = _Head(keys, eagle)
    vocab_size, dim = config.model.vocab_size, config.model.dim
    draft_vocab_size = head.size(("draft_vocab_size", "truncated_vocab_size"), "vocab_size", vocab_size)
    trunk_dim = head.size(("target_hidden_size",), "dim", dim)
    flags = {name: head.flag(names) for name, names in FLAGS.items()}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        keys.problems.append("norm_before_fc and fc_norm are both true, expected at most one of them")
    # SGLang distinguishes the two meanings by the first number; heads of speculators are trained with vLLM's meaning
    layers = head.layers(are_outputs_after_1=inner is values)
    head.finish(trunk_dim)
    keys.finish(values if inner is values else {INNER, *HARMLESS, "tie_word_embeddings"})
    if draft_vocab_size > vocab_size:
        raise ExportError(
            f"config.json: draft_vocab_size is {draft_vocab_size}, expected at most vocab_size {vocab_size}"
        )
    model = replace(
        config.model,
        drafter=EAGLE3,
        trunk_dim=trunk_dim,
        eagle_layers=layers,
        eagle_vocab_size=draft_vocab_size,
        eagle_normed=int(flags["norm_before_residual"]),
        eagle_in_norm="whole" if flags["norm_before_fc"] else "each" if flags["fc_norm"] else "none",
        eagle_out_normed=int(flags["norm_output"]),
    )
    return replace(config, model=model, family=replace(row, modules=_modules(row, model)))


class _Head:
    """The keys that do not describe the layers. They can be in config.json, in its eagle_config, or in both."""

    def __init__(self, keys: Keys, eagle: Keys) -> None:
        self._keys, self._eagle = keys, eagle

    def _all(self, names: tuple[str, ...]) -> list[tuple[Keys, str]]:
        """Where the keys with these names are."""
        return [(keys, name) for keys in (self._keys, self._eagle) for name in names if keys.value(name) is not None]

    def _same(self, names: tuple[str, ...], found: list[Any], default: Any) -> Any:
        """The value of all keys with these names, or the default if there are none."""
        if any(value != found[0] for value in found):
            places = " and ".join(f"{keys.prefix}{name}" for keys, name in self._all(names))
            self._keys.problems.append(f"{places} differ: {', '.join(map(shortened, found))}")
        return found[0] if found else default

    def size(self, names: tuple[str, ...], meaning: str, default: int) -> int:
        """A positive integer up to the limit of the flat file's number `meaning`."""
        found: int = self._same(names, [keys.size(name, meaning, default) for keys, name in self._all(names)], default)
        return found

    def flag(self, names: tuple[str, ...]) -> bool:
        """A boolean; False if there is none."""
        found: bool = self._same(names, [keys.flag(name, False) for keys, name in self._all(names)], False)
        return found

    def layers(self, *, are_outputs_after_1: bool) -> tuple[int, int, int]:
        """After how many layers the head reads the model's residual stream; zeros: the three that all engines assume.

        are_outputs_after_1: Whether a list that begins with 1 names layers whose outputs are read. All other lists name
        layers whose inputs are read.
        """
        lists = [keys.value(name) for keys, name in self._all((LAYER_IDS,)) if keys.value(name) != []]
        found = self._same((LAYER_IDS,), lists, None)
        if found is None:
            return (0, 0, 0)
        are_layers = isinstance(found, list) and all(type(n) is int and n >= 0 for n in found)
        if not are_layers or len(found) != EAGLE_STATES:
            expected = f"{EAGLE_STATES} numbers of layers"
            self._keys.problems.append(f"{LAYER_IDS} is {shortened(found)}, expected {expected}")
            return (0, 0, 0)
        first, second, third = (n + (are_outputs_after_1 and found[0] == 1) for n in found)
        return (first, second, third)

    def finish(self, trunk_dim: int) -> None:
        """Check the keys that must have a certain value, and that all keys of eagle_config are known."""
        for key, expected in (FIXED | {"fc_input_size": EAGLE_STATES * trunk_dim}).items():
            for keys, name in self._all((key,)):
                if keys.value(name) != expected:
                    keys.wrong(name, f"{expected}: llamac does not compute other heads")
        for key in self._eagle.unused():
            self._eagle.unknown(key)
        self._keys.problems += self._eagle.problems


def _drafted_ids(
    stored: dict[str, StoredTensor], ids: str | None, is_drafted: str | None, config: HfConfig
) -> NDArray[np.int64]:
    """The token ids to which the head's logits belong. They are stored as their distances from 0, 1, ..."""
    n, vocab_size = config.model.eagle_vocab_size, config.model.vocab_size
    if ids is None:
        if n != vocab_size:
            raise ExportError(f"the tensors do not match config.json:\n  missing: {IDS}, with draft_vocab_size {n}")
        return np.arange(n)
    found = checked_ids(IDS, np.arange(n) + _distances(stored[ids], n), vocab_size)
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
