"""Reads adapter_config.json of a PEFT adapter. A field that llamac cannot honor raises an error that names it."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamac.errors import ExportError, UnsupportedError
from llamac.export.patterns import matcher
from llamac.format.strict_json import read_object

NAME = "adapter_config.json"
Check = Callable[[Any], bool]

# Fields that do not change what a trained adapter computes.
_INERT_NAMES = """
    auto_mapping base_model_name_or_path revision inference_mode peft_type task_type lora_dropout fan_in_fan_out bias
    loftq_config eva_config runtime_config save_embedding_layers qalora_group_size megatron_core
"""
_INERT = frozenset(_INERT_NAMES.split())
# Initializations that do not change the base model's weights. The others (PiSSA, OLoRA, CorDA, LoRA-GA, LoftQ) do, and
# their adapters fit only the changed weights.
_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal", "mica")
_SHOWN = 200  # characters of a wrong value in an error


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_dict_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


_NAMES = (lambda value: isinstance(value, str) or _is_names(value), "a str or a list of str")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
# Fields that matter, each with a check of its value and the check's description for errors. null means the default.
_FIELDS: dict[str, tuple[Check, str]] = {
    "r": (_is_rank, "a positive integer"),
    "rank_pattern": (_is_dict_of(_is_rank), "an object of positive integers"),
    "lora_alpha": (_is_number, "a number"),
    "alpha_pattern": (_is_dict_of(_is_number), "an object of numbers"),
    "use_rslora": _FLAG,
    "use_dora": _FLAG,
    "lora_bias": _FLAG,
    "ensure_weight_tying": _FLAG,
    "peft_version": (lambda value: isinstance(value, str), "a str"),
    "target_modules": _NAMES,
    "exclude_modules": _NAMES,
    "layers_to_transform": (lambda value: type(value) is int or _is_ids(value), "an integer or a list of integers"),
    "layers_pattern": _NAMES,
    "target_parameters": (_is_names, "a list of str"),
    "modules_to_save": (_is_names, "a list of str"),
    "trainable_token_indices": (
        lambda value: _is_ids(value) or _is_dict_of(_is_ids)(value),
        "a list of integers or an object of such lists",
    ),
}


class AdapterConfig:
    """The fields that matter, with PEFT's rules for the names of modules.

    A module's key is its name in the base model as PEFT sees it, such as "model.layers.0.self_attn.q_proj". The key of
    a parameter ends with the parameter's name.

    Raises:
        UnsupportedError: If a field is not supported.
        ExportError: If a value has the wrong type, or the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        values = read_object(path)
        _check(values, path)
        self._values = {key: value for key, value in values.items() if value is not None}
        self._ranks = [(matcher(key), rank) for key, rank in self._values.get("rank_pattern", {}).items()]
        self._alphas = [(matcher(key), alpha) for key, alpha in self._values.get("alpha_pattern", {}).items()]

    @property
    def use_dora(self) -> bool:
        """Whether every target has a magnitude vector."""
        return bool(self._values.get("use_dora"))

    @property
    def lora_bias(self) -> bool:
        """Whether every target's B has a bias."""
        return bool(self._values.get("lora_bias"))

    @property
    def version(self) -> tuple[int, ...] | None:
        """The version of PEFT that wrote the adapter, if the config states it."""
        numbers = re.match(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", self._values.get("peft_version", ""))
        return tuple(map(int, numbers.groups())) if numbers else None

    def rank(self, key: str) -> int:
        """The rank of a module's or parameter's factors."""
        return int(next((rank for matches, rank in self._ranks if matches(key)), self._values.get("r", 8)))

    def scale(self, key: str) -> float:
        """The factor of B A."""
        alpha = next((alpha for matches, alpha in self._alphas if matches(key)), self._values.get("lora_alpha", 8))
        rank = self.rank(key)
        return float(alpha) / (math.sqrt(rank) if self._values.get("use_rslora") else rank)

    def is_parameter(self, key: str) -> bool:
        """Whether `target_parameters` has a parameter."""
        return _has(self._values.get("target_parameters", ()), key)

    def is_saved(self, key: str) -> bool:
        """Whether `modules_to_save` has a module. Such a module is a copy: modules tied to it do not change."""
        return any(key.endswith(name) for name in self._values.get("modules_to_save", ()))

    def token_ids(self, key: str) -> list[int] | None:
        """The token ids whose rows of an embedding or output matrix the adapter replaces."""
        given = self._values.get("trainable_token_indices")
        if isinstance(given, dict):
            return next((given[name] for name in given if _has((name,), key)), None)
        return given

    def is_target(self, key: str) -> bool:
        """Whether PEFT adapts a module. True if the fields are regular expressions that llamac does not support."""
        targets, excluded = self._values.get("target_modules"), self._values.get("exclude_modules", ())
        if isinstance(excluded, str):
            if _matches(excluded, key, unknown=False):
                return False
        elif _has(excluded, key):
            return False
        if isinstance(targets, str):
            return targets == "all-linear" or _matches(targets, key, unknown=True)
        if targets is None or key in targets or self._values.get("ensure_weight_tying"):
            return True
        return _has(targets, key) and self._is_target_layer(key)

    def _is_target_layer(self, key: str) -> bool:
        layers, patterns = self._values.get("layers_to_transform", []), self._values.get("layers_pattern", ())
        if layers == []:
            return True
        if patterns and not isinstance(patterns, str) and len(patterns) > 1:
            return True
        name = patterns if isinstance(patterns, str) else "".join(patterns)
        if not re.fullmatch(r"\w*", name):
            return True
        # the first number in the key is the layer, a later one the expert
        found = re.match(rf"(?:^|.*?\.){name}\.(\d+)\." if name else r".*?\.[^.]*\.(\d+)\.", key)
        return found is not None and int(found[1]) in (layers if isinstance(layers, list) else [layers])


def _has(names: Any, key: str) -> bool:
    """Whether any name equals the key or its end after a dot."""
    return any(key == name or key.endswith(f".{name}") for name in names)


def _matches(pattern: str, key: str, unknown: bool) -> bool:
    """Whether a regular expression matches the whole key; `unknown` if llamac does not support the expression."""
    try:
        return matcher(pattern, whole=True)(key)
    except UnsupportedError:
        return unknown


def _check(values: dict[str, Any], path: Path) -> None:
    """Raise an error that lists all unsupported fields, or one for a value of the wrong type."""
    if values.get("peft_type") != "LORA":
        raise UnsupportedError(f"{path}: peft_type is {values.get('peft_type')!r}; only 'LORA' is supported")
    known = {*_INERT, *_FIELDS, "init_lora_weights"}
    unsupported = [key for key, value in values.items() if key not in known and value not in (None, False, [], {})]
    start = values.get("init_lora_weights", True)
    if start is not None and start not in _INITIALIZATIONS:
        unsupported.append(f"init_lora_weights {start!r} (the adapter fits a base model with changed weights)")
    if unsupported:
        raise UnsupportedError(f"{path} has fields that this version does not support: {', '.join(unsupported)}")
    for key, (check, expected) in _FIELDS.items():
        value = values.get(key)
        if value is not None and not check(value):
            raise ExportError(f"{path}: {key} is {repr(value)[:_SHOWN]}, expected {expected}")
