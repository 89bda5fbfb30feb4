"""Reads a PEFT directory as an adapter of a model. Every tensor must fit the model and the adapter's config."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import LazyTensor, ModelConfig
from llamac.export.hf.collected import Collected, Place, collect
from llamac.export.hf.config import parse_config
from llamac.export.hf.decoder_config import weight_factors
from llamac.export.hf.families import ENCODERS, FAMILIES, HEAD
from llamac.export.hf.family import Family
from llamac.export.hf.keys import Keys
from llamac.export.hf.mamba_config import Factor
from llamac.export.hf.model import canonical_shapes, in_order, multiplied
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.hf.torch_file import read_torch
from llamac.export.lora import config
from llamac.export.lora.adapter import EMBEDDING, OUTPUT, Adapter, Factors
from llamac.export.stored import WEIGHT_DTYPES, StoredTensor
from llamac.format.model_folders import check_links

Floats = NDArray[np.float32]

_WEIGHTS = {"adapter_model.safetensors": read_safetensors, "adapter_model.bin": read_torch}

# What an adapter of a model with images has in front of the names of its language model, whose family it is here.
_OF_IMAGES = re.compile(r"^language_model\.(?:model\.)?")
# Names of tensors. Old versions of PEFT include the adapter's name, "default". If several parameters of a module are
# adapted, they are nested: the factors of an inner one have "base_layer" in their names.
_FACTOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)(?P<inside>(?:\.base_layer)*)\."
    r"(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.default)?"
    r"(?P<bias>(?<=B)\.bias|(?<=B\.default)\.bias)?(?:\.weight)?"
)
_ROWS = re.compile(r"(?:base_model\.model\.)?(?P<module>.+?)\.token_adapter\.trainable_tokens_delta(?:\.default)?")
_WHOLE = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.(?P<kind>weight|bias)"
)
# The factor (a or b) that each kind of tensor is. For embeddings, PEFT adapts the transposed matrix.
_ROLES = {
    "lora_A": "a",
    "lora_B": "b",
    "lora_embedding_A": "b",
    "lora_embedding_B": "a",
    "lora_magnitude_vector": "magnitudes",
}
_TRANSPOSED = {"a": "b", "b": "a"}


def read_adapter(folder: Path, architecture: Any, model: ModelConfig, source_config: Any = None) -> Adapter:
    """Read a PEFT directory.

    Args:
        folder: The directory.
        architecture: The name of the model's family, as in a flat file's metadata.
        model: The config of the model.
        source_config: The content of the model's config.json, also from the metadata. None if it is unknown.

    Raises:
        UnsupportedError: If the adapter's config has unsupported fields, or the family is unknown.
        ExportError: If the adapter is damaged or does not fit the model.
    """
    check_links(folder)
    path = folder / config.NAME
    if not path.is_file():
        inside = sorted(str(found.parent) for found in folder.glob(f"*/{config.NAME}"))
        hint = f" (these directories inside have one: {', '.join(inside[:4])})" if inside else ""
        raise ExportError(f"{folder} is not an adapter: expected a PEFT directory with {config.NAME}{hint}")
    settings = config.AdapterConfig(path)
    families = {**FAMILIES, **ENCODERS} if model.two_sided else FAMILIES
    if architecture not in families:
        known = ", ".join(sorted(families))
        raise UnsupportedError(f"the model's architecture is {architecture!r}: adapters are supported for {known}")
    family = families[architecture]
    reading = _Reading(settings, family, model, _weight_factors(family, model, source_config))
    for name, tensor in _read_weights(folder).items():
        reading.sort(name, tensor)
    adapter = reading.adapter(folder.resolve().name)
    if reading.problems:
        problems = "\n  ".join(sorted(reading.problems))
        raise ExportError(f"the adapter {folder} does not fit the model:\n  {problems}")
    if not (adapter.factors or adapter.replaced or adapter.replaced_rows):
        raise ExportError(f"the adapter {folder} has no tensors: it changes nothing")
    return adapter


def _weight_factors(family: Family, model: ModelConfig, source_config: Any) -> Mapping[str, Factor | None]:
    """What the importer multiplies the model's tensors by, by the ends of their names. None: it is unknown."""
    names = weight_factors(Keys({}), family, model.layers)
    if names and isinstance(source_config, dict):
        return parse_config(source_config, []).factors
    embeddings = (EMBEDDING, OUTPUT) if "lm_head_multiplier" in family.keys else ()  # GGUF files have these multiplied
    return dict.fromkeys((*names, *embeddings))


def _read_weights(folder: Path) -> dict[str, StoredTensor]:
    for name, reader in _WEIGHTS.items():
        if (folder / name).is_file():
            return reader(folder / name)
    raise ExportError(f"{folder} has no weights: neither {' nor '.join(_WEIGHTS)}")


@dataclass
class _Target:
    """An adapted module, or an adapted parameter, which can contain the matrices of all experts.

    Attributes:
        key: Its name in PEFT's config.
        transposed: Whether the factors are those of the transposed matrix.
        experts: The names of each expert's modules.
        tensors: Its tensors by role.
    """

    key: str
    transposed: bool = False
    experts: list[list[str]] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    def stored_name(self, role: str) -> str:
        """The name of a factor in PEFT's file."""
        return {"a": "lora_A", "b": "lora_B"}[_TRANSPOSED[role] if self.transposed else role]


class _Reading:
    """Assigns the tensors of an adapter to the modules of a family, and collects everything that does not fit."""

    def __init__(
        self,
        settings: config.AdapterConfig,
        family: Family,
        model: ModelConfig,
        weight_factors: Mapping[str, Factor | None],
    ) -> None:
        self._settings = settings
        self._model = model
        self._family = family
        self._weight_factors = weight_factors
        self._shapes = canonical_shapes(replace(model, tied_output=False))
        self._modules = {
            module.full_name("weight", **index).removesuffix(".weight"): (module, index)
            for module in (*family.modules, HEAD)
            for index in module.indices(model)
        }
        self._targets: dict[str, _Target] = {}
        self._whole: dict[tuple[str, str], tuple[str, StoredTensor]] = {}
        self._rows: dict[str, tuple[str, StoredTensor]] = {}
        # consecutive experts read parts of the same tensor, so it is cached
        self._cached = functools.lru_cache(maxsize=4)(lambda tensor: tensor.lazy().array())
        self.problems: list[str] = []

    def sort(self, full_name: str, tensor: StoredTensor) -> None:
        """Assign a tensor to its module."""
        match = _FACTOR.fullmatch(full_name) or _ROWS.fullmatch(full_name) or _WHOLE.fullmatch(full_name)
        name = self._module_name(match["module"]) if match else ""
        target = self._target(match, name) if match and match.re is _FACTOR else None
        if match is None or (target is None if match.re is _FACTOR else name not in self._modules):
            self.problems.append(f"surplus: {full_name} {tensor.shape}")
        elif tensor.dtype not in WEIGHT_DTYPES:
            self.problems.append(f"dtype: {full_name} is {tensor.dtype}, expected one of {', '.join(WEIGHT_DTYPES)}")
        elif target is not None:
            role = "bias" if match["bias"] else _ROLES[match["kind"]]
            if target.transposed and role in _TRANSPOSED:
                role = _TRANSPOSED[role] if "embedding" not in match["kind"] else role
                tensor = tensor.transposed
            target.tensors[role] = tensor
        elif match.re is _ROWS:
            self._rows[name] = (match["module"], tensor)
        else:
            self._whole[name, match["kind"]] = (match["module"], tensor)

    def _module_name(self, name: str) -> str:
        """A module's name in the family's current version, for a name from any version."""
        for pattern, replacement in self._family.renamed:
            name = re.sub(pattern, replacement, f"{name}.weight").removesuffix(".weight")
        name = name.removeprefix(self._family.prefix)
        return _OF_IMAGES.sub("", name) if name not in self._modules else name

    def _target(self, match: re.Match[str], name: str) -> _Target | None:
        """The module or parameter that a factor belongs to, or None if the model does not have it."""
        key, inside = match["module"], match["inside"].count(".")
        if name in self._modules:
            is_parameter = self._settings.is_parameter(f"{key}.weight")
            transposed = "embedding" in match["kind"] or (is_parameter and self._modules[name][0].transposed)
            found = self._targets.setdefault(name, _Target(f"{key}.weight" if is_parameter else key))
            found.transposed |= transposed
            return None if inside else found
        if self._family.fused_columns:
            return None
        fused = []  # the adapted parameters of a module that contains all experts, the innermost first
        for pattern, parts in self._family.fused:
            leaf = pattern.rpartition(r"\.")[2]
            if re.fullmatch(pattern, f"{name}.{leaf}") and self._settings.is_parameter(f"{key}.{leaf}"):
                fused.append((leaf, parts))
        if inside >= len(fused):
            return None
        leaf, parts = fused[len(fused) - 1 - inside]
        experts: list[list[str]] = []
        while f"{name}.{len(experts)}.{parts[0]}" in self._modules:
            experts.append([f"{name}.{len(experts)}.{part}" for part in parts])
        return self._targets.setdefault(f"{name}.{leaf}", _Target(f"{key}.{leaf}", experts=experts))

    def adapter(self, name: str) -> Adapter:
        """Build the adapter from the assigned tensors. Completes `problems`."""
        found = Adapter(name, replaced=self._replaced(), replaced_rows=self._replaced_rows())
        for target_name, target in self._targets.items():
            if not (self._settings.is_parameter(target.key) or self._settings.is_target(target.key)):
                self.problems.append(f"surplus: {target_name} is adapted, but not a target in {config.NAME}")
                continue
            for role, stored_name, wanted in (
                ("a", target.stored_name("a"), True),
                ("b", target.stored_name("b"), True),
                ("magnitudes", "lora_magnitude_vector", self._settings.use_dora),
                ("bias", "lora_B.bias", self._settings.lora_bias),
            ):
                if (role in target.tensors) != wanted:
                    self.problems.append(f"{'missing' if wanted else 'surplus'}: {target_name}.{stored_name}")
            a, b = target.tensors.get("a"), target.tensors.get("b")
            if a is not None and b is not None:
                add = self._add_experts if target.experts else self._add_module
                add(found, target_name, target, a, b)
        if self._family.normed_embedding and EMBEDDING in {*found.factors, *found.replaced, *found.replaced_rows}:
            self.problems.append("surplus: the embedding is adapted, which this family norms")
        return found

    def _fits(
        self, name: str, target: _Target, a: StoredTensor, b: StoredTensor, shapes: list[tuple[int, ...]], n: int
    ) -> bool:
        """Whether a and b are the factors of n matrices, each of which is a stack of matrices of these shapes."""
        rows, columns = sum(shape[0] for shape in shapes), shapes[0][-1]
        rank = self._settings.rank(target.key)
        if len(shapes[0]) == 2 and a.shape == (n * rank, columns) and b.shape == (rows, n * rank):
            return True
        needed = f"({n * rank}, {columns}) and ({rows}, {n * rank})" + (f" for {n} experts" if n > 1 else "")
        self.problems.append(
            f"misshaped: {name} has factors {a.shape} and {b.shape}, rank {rank} of {config.NAME} needs {needed}"
        )
        return False

    def _add_module(self, found: Adapter, name: str, target: _Target, a: StoredTensor, b: StoredTensor) -> None:
        module, index = self._modules[name]
        if module.absorbed:
            self.problems.append(
                f"unsupported: {name} is divided into matrices of single heads, which have no adapters"
            )
            return
        if module.pieces:
            (whole,) = module.part_names("weight", **index)
            self.problems.append(f"unsupported: {name} is a part of {whole}, which has no adapters of parts")
            return
        if not self._fits(name, target, a, b, [self._shapes[part] for part in module.part_names("weight", **index)], 1):
            return
        scale, magnitudes = self._settings.scale(target.key), target.tensors.get("magnitudes")
        by_column = target.transposed and not self._settings.is_parameter(target.key)  # an embedding
        row_magnitudes: dict[str, LazyTensor] = {}
        if magnitudes is not None and by_column and magnitudes.shape == (a.shape[1],):
            row_magnitudes = dict.fromkeys(module.part_names("weight", **index), magnitudes.lazy())
        elif magnitudes is not None:
            row_magnitudes = self._parts(name, magnitudes, "weight", None)
        for part, rows in self._parts(name, b, "weight", a.shape[0]).items():
            found.factors[part] = Factors(a.lazy(), rows, scale, row_magnitudes.get(part), by_column)
        if (bias := target.tensors.get("bias")) is not None:
            for part, numbers in self._parts(name, bias, "bias", 0).items():
                found.biases[part] = (numbers, scale)

    def _add_experts(self, found: Adapter, name: str, target: _Target, a: StoredTensor, b: StoredTensor) -> None:
        """Split the factors of all experts: a has the experts' rows consecutively, b their columns interleaved.

        Factors a and b of a transposed matrix are the transposed factors b and a of the matrix.
        """
        n = len(target.experts)
        parts = [[self._canonical(module) for module in modules] for modules in target.experts]
        is_turned = self._is_turned(name, target, a, b)
        if is_turned is None:
            return
        if not is_turned and not self._fits(name, target, a, b, [self._shapes[part] for part in parts[0]], n):
            return
        rank = a.shape[0] // n
        cached_b = functools.partial(self._cached, b)
        for expert, names in enumerate(parts):
            own_a = a.rows(expert * rank, (expert + 1) * rank)
            expert_a = own_a.lazy()
            dtype, first = expert_a.dtype, 0
            if is_turned:
                expert_a = LazyTensor((rank, b.shape[0]), dtype, _turned_reader(cached_b, expert, n))
            for part in names:
                rows = self._shapes[part][0]
                expert_b = LazyTensor((rows, rank), dtype, _expert_reader(cached_b, first, expert, n))
                if is_turned:
                    expert_b = own_a.transposed.rows(first, first + rows).lazy()
                expert_b = self._multiplied(part, expert_b)
                found.factors[part] = Factors(expert_a, expert_b, self._settings.scale(target.key))
                first += rows

    def _is_turned(self, name: str, target: _Target, a: StoredTensor, b: StoredTensor) -> bool | None:
        """Whether factors of all experts are those of the transposed matrices, as before PEFT 0.19.1. None: unclear.

        If the shapes fit both, other experts' shapes decide, or else PEFT's version.
        """
        fitting = self._layouts(target)
        if len(fitting) == 2:
            others = [self._layouts(other) for other in self._targets.values() if other.experts]
            fitting = set().union(*[one for one in others if len(one) == 1]) or self._layouts_of_version()
        if len(fitting) < 2:
            return True in fitting
        self.problems.append(
            f"unclear: {name} has factors {a.shape} and {b.shape}, which fit the matrices and the transposed ones: set "
            f"peft_version in {config.NAME} to the version of PEFT that trained them"
        )
        return None

    def _layouts(self, target: _Target) -> set[bool]:
        """What `_is_turned` can be by the shapes of the factors."""
        shapes = [self._shapes[self._canonical(module)] for module in target.experts[0]]
        rows, columns = sum(shape[0] for shape in shapes), shapes[0][-1]
        rank = len(target.experts) * self._settings.rank(target.key)
        found = tuple(tensor.shape for role, tensor in sorted(target.tensors.items()) if role in _TRANSPOSED)
        needed = {False: ((rank, columns), (rows, rank)), True: ((rank, rows), (columns, rank))}
        return {is_turned for is_turned, both in needed.items() if both == found}

    def _layouts_of_version(self) -> set[bool]:
        """What `_is_turned` can be by PEFT's version."""
        version, turned = self._settings.version, self._family.fused_turned
        if turned == "always":
            return {version == (0, 19, 0)}
        is_old = version is not None and version < (0, 19, 1)
        # old versions of transformers have tensors (experts, inputs, outputs) in the families that differ by shape
        return {False, True} if version is None or (is_old and turned == "by_shape") else {is_old}

    def _canonical(self, name: str) -> str:
        module, index = self._modules[name]
        return module.part_names("weight", **index)[0]

    def _replaced(self) -> dict[str, LazyTensor]:
        collected = Collected()
        for name in self._modules:  # in order, because `Collected` concatenates heads
            for kind in ("weight", "bias"):
                if (name, kind) in self._whole:
                    self._collect(collected, name, self._whole[name, kind][1], kind, 0)
        self.problems += collected.problems
        found = self._as_imported(collected.all())
        for part, tensor in found.items():
            if tensor.shape != self._shapes[part]:
                self.problems.append(f"missing: some heads of {part}")
        # A tensor that is not in modules_to_save replaces the base model's tensor, which tied modules share.
        shared = {
            self._canonical(name)
            for (name, kind), (key, _) in self._whole.items()
            if kind == "weight" and not self._settings.is_saved(key)
        } & {EMBEDDING, OUTPUT}
        last = found.get(OUTPUT if OUTPUT in shared else EMBEDDING)
        if self._model.tied_output and shared and last is not None:
            found |= {name: last for name in (EMBEDDING, OUTPUT) if name in shared or name not in found}
        return found

    def _replaced_rows(self) -> dict[str, tuple[list[int], LazyTensor]]:
        found = {}
        for name, (key, tensor) in self._rows.items():
            ids = self._settings.token_ids(key)
            part = self._canonical(name)
            n_rows, columns = self._shapes[part][0], self._shapes[part][-1]
            if ids is None or not all(0 <= token < n_rows for token in ids):
                self.problems.append(f"misplaced: trainable_token_indices are not rows of {name}, 0 to {n_rows - 1}")
            elif tensor.shape != (len(ids), columns):
                self.problems.append(f"misshaped: {name} has rows {tensor.shape}, expected {(len(ids), columns)}")
            else:
                found[part] = (ids, self._multiplied(part, tensor.lazy()))
        return found

    def _parts(self, name: str, tensor: StoredTensor, kind: str, columns: int | None) -> dict[str, LazyTensor]:
        collected = Collected()
        self._collect(collected, name, tensor, kind, columns)
        self.problems += collected.problems
        return self._as_imported(collected.all(), lengths=columns is None)

    def _as_imported(self, tensors: dict[str, LazyTensor], *, lengths: bool = False) -> dict[str, LazyTensor]:
        """The tensors with their rows in the order of the canonical pairs of RoPE, multiplied as the model's."""
        return {
            name: self._multiplied(name, in_order(self._family, name, tensor, self._model), lengths=lengths)
            for name, tensor in tensors.items()
        }

    def _multiplied(self, name: str, tensor: LazyTensor, *, lengths: bool = False) -> LazyTensor:
        """A tensor, or the lengths of its rows, times what the importer multiplies the model's by."""
        factor = self._weight_factors.get(".".join(name.split(".")[-2:]), 1.0)
        if factor is None:
            self.problems.append(
                f"unsupported: {name} is multiplied by a number of config.json, which the model file does not state: "
                "use a file that was imported from the model's Hugging Face directory"
            )
            return tensor
        return multiplied(tensor, np.abs(factor) if lengths else factor)

    def _collect(self, collected: Collected, name: str, tensor: StoredTensor, kind: str, columns: int | None) -> None:
        """Split a module's tensor into canonical parts.

        `columns` is the number of columns of each part, 0 for the part's own number, None for vectors.
        """
        module, index = self._modules[name]
        shapes = {}
        for part in module.part_names(kind, **index):
            shape = self._shapes.get(part, ())
            shapes[part] = shape if columns == 0 else shape[:1] if columns is None else (shape[0], columns)
        if () in shapes.values():
            self.problems.append(f"surplus: {name}.{kind} {tensor.shape}")
            return
        module = module if columns == 0 else replace(module, transposed=False, plus_one=False)
        collect(collected, Place(module, shapes, self._model, index["l"]), f"{name}.{kind}", tensor)


def _turned_reader(whole: Callable[[], Floats], expert: int, n: int) -> Callable[[int, int], Floats]:
    """A function that reads columns expert, expert + n, ... as rows."""
    return lambda first, last: whole()[:, expert::n].T[first:last]


def _expert_reader(whole: Callable[[], Floats], start: int, expert: int, n: int) -> Callable[[int, int], Floats]:
    """A function that reads columns expert, expert + n, ... of the rows from `start` on."""
    return lambda first, last: whole()[start + first : start + last, expert::n]
