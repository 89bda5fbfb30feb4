"""LoRA adapters as PEFT stores them (Hu et al., "LoRA", arXiv:2106.09685): read strictly, and merged into a checkpoint.

An adapter adds `scale * b a` to matrices; it may bring whole tensors (biases, an output matrix), and scale the rows of
a sum to lengths of its own (DoRA, Liu et al., arXiv:2402.09353). What changes the computation in any other way is
refused by the name of its key.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint, LazyTensor, ModelConfig
from llamac.export.families import FAMILIES, HEAD
from llamac.export.family import Family
from llamac.export.flat import model_config
from llamac.export.hf import Taken, canonical_shapes, take
from llamac.export.safetensors_file import read_safetensors
from llamac.export.stored import WEIGHT_DTYPES, StoredTensor
from llamac.export.strict_json import read_object
from llamac.export.torch_file import read_torch
from llamac.export.writer import pack_strips
from llamac.flatfile import FlatFile

Floats = NDArray[np.float32]

CONFIG = "adapter_config.json"
WEIGHTS = {"adapter_model.safetensors": read_safetensors, "adapter_model.bin": read_torch}

# Keys that tell how the adapter was made or how PEFT finds its matrices: the tensors' names say all that counts.
_HARMLESS = """
    auto_mapping base_model_name_or_path revision inference_mode peft_version task_type target_modules exclude_modules
    layers_to_transform layers_pattern lora_dropout megatron_config megatron_core modules_to_save fan_in_fan_out r
    rank_pattern bias loftq_config eva_config runtime_config save_embedding_layers ensure_weight_tying qalora_group_size
    peft_type lora_alpha alpha_pattern use_rslora use_dora init_lora_weights
"""
HARMLESS = frozenset(_HARMLESS.split())
# Starting points of training that leave the base as it is. Others (PiSSA, OLoRA, CorDA) belong to a changed base.
STARTS = (True, False, "gaussian", "eva", "orthogonal")

# Names of tensors. (Old versions of PEFT stored the adapter's own name, "default", in them.)
_FACTOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\."
    r"(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)
_WHOLE = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.(?P<kind>weight|bias)"
)


@dataclass(frozen=True)
class Factors:
    """scale * b a, which is added to a matrix (rows, columns). a (r, columns), b (rows, r).

    lengths: what the rows of the sum are scaled to (DoRA), (rows), or None.
    """

    a: LazyTensor
    b: LazyTensor
    scale: float
    lengths: LazyTensor | None = None


@dataclass(frozen=True)
class Adapter:
    """name: the folder's. factors: by the canonical names of matrices. whole: tensors that it brings, likewise."""

    name: str
    factors: dict[str, Factors] = field(default_factory=dict)
    whole: dict[str, LazyTensor] = field(default_factory=dict)


def read_adapter(folder: Path, architecture: Any, model: ModelConfig) -> Adapter:
    """The adapter of a PEFT directory, for the model that it was trained on, of a family of this name.

    Raises UnsupportedError for kinds of adapters that are not known, and ExportError for everything in it that fits no
    matrix of the model.
    """
    if not (folder / CONFIG).is_file():
        raise ExportError(f"{folder} is no adapter: expected a PEFT directory with {CONFIG} in it")
    values = read_object(folder / CONFIG)
    _check_config(values, folder / CONFIG)
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(f"the model's architecture is {architecture!r}: adapters are known for {known}")
    reading = _Reading(values, FAMILIES[architecture], model)
    for name, tensor in _read_weights(folder).items():
        reading.sort(name, tensor)
    adapter = Adapter(folder.resolve().name, reading.all_factors(), reading.all_whole())
    if reading.problems:
        problems = "\n  ".join(sorted(reading.problems))
        raise ExportError(f"the adapter {folder} does not fit the model:\n  {problems}")
    if not adapter.factors and not adapter.whole:
        raise ExportError(f"the adapter {folder} changes nothing: there are no tensors in it")
    return adapter


def _check_config(values: dict[str, Any], path: Path) -> None:
    if values.get("peft_type") != "LORA":
        raise UnsupportedError(f"{path}: peft_type is {values.get('peft_type')!r}; only 'LORA' is supported")
    start = values.get("init_lora_weights", True)
    unsupported = [key for key, value in values.items() if key not in HARMLESS and value]
    if start not in STARTS:
        unsupported.append(f"init_lora_weights {start!r} (it belongs to a base model that was changed)")
    if unsupported:
        raise UnsupportedError(f"{path} asks for what this version does not support: {', '.join(unsupported)}")
    patterns = values.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(re.fullmatch(r"[\w.-]+", pattern) for pattern in patterns):
        # PEFT takes them as regular expressions, which a stranger's file could make run for years
        raise ExportError(f"{path}: alpha_pattern is {patterns!r}, expected names of modules, no regular expressions")
    for key, alpha in {"lora_alpha": values.get("lora_alpha", 8), **patterns}.items():
        if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:
            raise ExportError(f"{path}: {key} is {alpha!r}, expected a number")


def _read_weights(folder: Path) -> dict[str, StoredTensor]:
    for name, reader in WEIGHTS.items():
        if (folder / name).is_file():
            return reader(folder / name)
    raise ExportError(f"{folder} has no weights: neither {' nor '.join(WEIGHTS)}")


class _Reading:
    """The tensors of an adapter, sorted by the modules of a family."""

    def __init__(self, values: dict[str, Any], family: Family, model: ModelConfig) -> None:
        self._values = values
        self._model = model
        self._family = family
        self._shapes = canonical_shapes(model)
        self._modules = {
            module.full_name("weight", **place).removesuffix(".weight"): (module, place)
            for module in (*family.modules, HEAD)
            for place in module.places(model)
        }
        self._factors: dict[str, dict[str, StoredTensor]] = {}
        self._embeddings: set[str] = set()  # their factors are stored as those of the transposed matrix
        self._whole: dict[tuple[str, str], StoredTensor] = {}
        self.problems: list[str] = []

    def sort(self, full_name: str, tensor: StoredTensor) -> None:
        """Finds out what a tensor is for."""
        match = _FACTOR.fullmatch(full_name) or _WHOLE.fullmatch(full_name)
        name = self._module_name(match["module"]) if match else ""
        if match is None or name not in self._modules:
            self.problems.append(f"surplus: {full_name} {tensor.shape}")
        elif tensor.dtype not in WEIGHT_DTYPES:
            self.problems.append(f"dtype: {full_name} is {tensor.dtype}, expected one of {', '.join(WEIGHT_DTYPES)}")
        elif match.re is _FACTOR and "embedding" in match["kind"]:
            self._embeddings.add(name)
            self._factors.setdefault(name, {})[match["kind"].replace("embedding_", "")] = tensor.transposed
        elif match.re is _FACTOR:
            self._factors.setdefault(name, {})[match["kind"]] = tensor
        elif not (match["kind"] == "weight" and ".base_layer." in full_name):  # the base's own: PEFT may store it, too
            self._whole[name, match["kind"]] = tensor

    def _module_name(self, name: str) -> str:
        """The family's own name of a module that may have another version's."""
        for pattern, replacement in self._family.renamed:
            name = re.sub(pattern, replacement, f"{name}.weight").removesuffix(".weight")
        return name.removeprefix(self._family.prefix)

    def all_factors(self) -> dict[str, Factors]:
        found: dict[str, Factors] = {}
        for name, tensors in self._factors.items():
            module, place = self._modules[name]
            is_embedding = name in self._embeddings
            first, second = ("B", "A") if is_embedding else ("A", "B")
            a, b = tensors.get(f"lora_{first}"), tensors.get(f"lora_{second}")
            if a is None or b is None:
                self.problems.append(f"missing: {name}.lora_{first if a is None else second}")
                continue
            shapes = [self._shapes[part] for part in module.part_names("weight", **place)]
            columns = shapes[0][-1]
            if len(shapes[0]) != 2 or a.shape[1:] != (columns,) or b.shape[1:] != a.shape[:1]:
                needed = f"(r, {columns}) and ({sum(shape[0] for shape in shapes)}, r)"
                self.problems.append(f"misshaped: {name} has factors {a.shape} and {b.shape}, the model needs {needed}")
                continue
            lengths = tensors.get("lora_magnitude_vector")
            parts = self._parts(name, b, "weight", a.shape[0])
            row_lengths = self._parts(name, lengths, "weight", None) if lengths and not is_embedding else {}
            if self._values.get("use_dora") and (is_embedding or lengths is None):
                self.problems.append(f"missing: {name}.lora_magnitude_vector, or DoRA of an embedding (not supported)")
            for part, rows in parts.items():
                scale = self._scale(name, a.shape[0])
                found[part] = Factors(a.lazy(), rows, scale, row_lengths.get(part))
        return found

    def all_whole(self) -> dict[str, LazyTensor]:
        found: dict[str, LazyTensor] = {}
        for (name, kind), tensor in self._whole.items():
            found.update(self._parts(name, tensor, kind, 0))
        return found

    def _parts(self, name: str, tensor: StoredTensor, kind: str, columns: int | None) -> dict[str, LazyTensor]:
        """A module's tensor by canonical names. columns: instead of its own (0: its own, None: it is a vector)."""
        module, place = self._modules[name]
        shapes = {}
        for part in module.part_names(kind, **place):
            shape = self._shapes.get(part, ())
            shapes[part] = shape if columns == 0 else shape[:1] if columns is None else (shape[0], columns)
        if () in shapes.values():
            self.problems.append(f"surplus: {name}.{kind} {tensor.shape}")
            return {}
        taken = Taken()
        module = module if columns == 0 else replace(module, transposed=False, plus_one=False)
        take(taken, module, f"{name}.{kind}", tensor, shapes, self._model)
        self.problems += taken.problems
        return taken.all()

    def _scale(self, name: str, rank: int) -> float:
        alpha = self._values.get("lora_alpha", 8)
        for pattern, own in (self._values.get("alpha_pattern") or {}).items():
            if f".{self._family.prefix}{name}".endswith(f".{pattern}"):
                alpha = own
                break
        return float(alpha) / (math.sqrt(rank) if self._values.get("use_rslora") else rank)


# ---- at run time


def attach(file: FlatFile, adapters: Sequence[tuple[Path, float]]) -> None:
    """Lets the core add the adapters' products to those of the file's matrices. (directory, strength) of each.

    Raises UnsupportedError for adapters that can only be merged: with tensors of their own, or with DoRA's lengths.
    """
    config, architecture = model_config(file), file.metadata.get("architecture")
    parts: dict[str, list[tuple[Floats, Floats]]] = {}
    for folder, strength in adapters:
        adapter = read_adapter(folder, architecture, config)
        others = [*adapter.whole, *(name for name, factors in adapter.factors.items() if factors.lengths is not None)]
        if others:
            raise UnsupportedError(
                f"the adapter {folder} cannot be applied to a loaded model, because of {', '.join(others[:4])}: "
                f"merge it (llamac export MODEL OUT --lora {folder})"
            )
        for name, factors in adapter.factors.items():
            b = factors.b.array() * np.float32(factors.scale * strength)
            parts.setdefault(name, []).append((factors.a.array(), b))
    for name, pairs in parts.items():
        a, b = np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs], axis=1)
        is_embedding = name in ("token_embedding.weight", "position_embedding.weight")
        file.core.adapt(name, len(a), _strips(a.T if is_embedding else a), _strips(b))


def _strips(matrix: Floats) -> memoryview[float]:
    return memoryview(pack_strips(np.ascontiguousarray(matrix, np.float32), "f32")).cast("f")


# ---- merging


def merge(checkpoint: Checkpoint, adapter: Adapter, strength: float = 1.0) -> Checkpoint:
    """The checkpoint with the adapter's changes in it. strength: multiplies what is added to matrices.

    A matrix that is tied to another one is parted from it: an adapter changes one of the two.
    """
    tensors, config = dict(checkpoint.tensors), checkpoint.config
    touched = adapter.factors.keys() | adapter.whole.keys()
    if config.tied_output and touched & {"token_embedding.weight", "output.weight"}:
        tensors["output.weight"] = tensors["token_embedding.weight"]
        config = replace(config, tied_output=False)
    for name, tensor in adapter.whole.items():
        tensors[name] = tensor
    for name, factors in adapter.factors.items():
        tensors[name] = _merged(tensors[name], factors, strength)
    entry = {"name": adapter.name, "strength": strength}
    metadata = {**checkpoint.metadata, "adapters": [*checkpoint.metadata.get("adapters", []), entry]}
    return replace(checkpoint, config=config, tensors=tensors, metadata=metadata)


def _merged(base: LazyTensor, factors: Factors, strength: float) -> LazyTensor:
    a = factors.a.array().astype(np.float64) * (factors.scale * strength)

    def read(first: int, last: int) -> Floats:
        rows = base.read(first, last) + factors.b.read(first, last).astype(np.float64) @ a
        if factors.lengths is not None:
            rows *= factors.lengths.read(first, last)[:, None] / np.linalg.norm(rows, axis=1, keepdims=True)
        return rows.astype(np.float32)

    return LazyTensor(base.shape, base.dtype, read)
