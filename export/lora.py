"""LoRA adapters as PEFT stores them (Hu et al., "LoRA", arXiv:2106.09685): read strictly, and merged into a checkpoint.

An adapter adds `scale * b a` to matrices and numbers to biases; it may bring whole tensors (biases, an output matrix)
and rows of embeddings, and scale the rows of a sum to lengths of its own (DoRA, Liu et al., arXiv:2402.09353). What
changes the computation in any other way is refused by the name of its key.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint, LazyTensor, ModelConfig
from llamac.export.flat import lazy_tensors, model_config
from llamac.export.hf.families import FAMILIES, HEAD
from llamac.export.hf.family import Family
from llamac.export.hf.model import Taken, canonical_shapes, take
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.hf.torch_file import read_torch
from llamac.export.patterns import matcher
from llamac.export.quantize import DTYPES
from llamac.export.stored import WEIGHT_DTYPES, StoredTensor
from llamac.export.strict_json import read_object
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
    peft_type lora_alpha alpha_pattern use_rslora use_dora init_lora_weights lora_bias target_parameters
    trainable_token_indices
"""
HARMLESS = frozenset(_HARMLESS.split())
# Starting points of training that leave the base as it is. Others (PiSSA, OLoRA, CorDA) belong to a changed base.
STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")

# Names of tensors. (Old versions of PEFT stored the adapter's own name, "default", in them.) An adapter of several
# parameters of one module lies around that of the one before: hence "base_layer".
_FACTOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)(?P<inside>(?:\.base_layer)*)\."
    r"(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.default)?"
    r"(?P<bias>(?<=B)\.bias|(?<=B\.default)\.bias)?(?:\.weight)?"
)
_ROWS = re.compile(r"(?:base_model\.model\.)?(?P<module>.+?)\.token_adapter\.trainable_tokens_delta(?:\.default)?")
_WHOLE = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.(?P<kind>weight|bias)"
)
# What a factor is: b and a of `b a`, for matrices (out, in); the other way around where PEFT sees the transposed one.
_ROLES = {
    "lora_A": "a",
    "lora_B": "b",
    "lora_embedding_A": "b",
    "lora_embedding_B": "a",
    "lora_magnitude_vector": "lengths",
}
_TURNED = {"a": "b", "b": "a"}


@dataclass(frozen=True)
class Factors:
    """scale * b a, which is added to a matrix (rows, columns). a (r, columns), b (rows, r).

    lengths: what the rows of the sum are scaled to (DoRA), (rows), or None. across: the columns instead, (columns).
    """

    a: LazyTensor
    b: LazyTensor
    scale: float
    lengths: LazyTensor | None = None
    across: bool = False


@dataclass(frozen=True)
class Adapter:
    """name: the folder's. By canonical names of tensors: factors of what is added to matrices; shifts: what is added to
    biases, and its scale; whole: tensors that it brings; rows: some rows of one that it brings, and their numbers."""

    name: str
    factors: dict[str, Factors] = field(default_factory=dict)
    shifts: dict[str, tuple[LazyTensor, float]] = field(default_factory=dict)
    whole: dict[str, LazyTensor] = field(default_factory=dict)
    rows: dict[str, tuple[list[int], LazyTensor]] = field(default_factory=dict)


def read_adapter(folder: Path, architecture: Any, model: ModelConfig) -> Adapter:
    """The adapter of a PEFT directory, for the model that it was trained on, of a family of this name.

    Raises UnsupportedError for kinds of adapters that are not known, and ExportError for everything in it that fits no
    matrix of the model.
    """
    if not (folder / CONFIG).is_file():
        inside = sorted(str(path.parent) for path in folder.glob(f"*/{CONFIG}"))
        found = f" (there are such directories in it: {', '.join(inside[:4])})" if inside else ""
        raise ExportError(f"{folder} is no adapter: expected a PEFT directory with {CONFIG} in it{found}")
    values = read_object(folder / CONFIG)
    _check_config(values, folder / CONFIG)
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(f"the model's architecture is {architecture!r}: adapters are known for {known}")
    reading = _Reading(values, FAMILIES[architecture], model)
    for name, tensor in _read_weights(folder).items():
        reading.sort(name, tensor)
    adapter = reading.adapter(folder.resolve().name)
    if reading.problems:
        problems = "\n  ".join(sorted(reading.problems))
        raise ExportError(f"the adapter {folder} does not fit the model:\n  {problems}")
    if not (adapter.factors or adapter.whole or adapter.rows):
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
    patterns, parameters = values.get("alpha_pattern") or {}, values.get("target_parameters") or []
    if not isinstance(patterns, dict):
        raise ExportError(f"{path}: alpha_pattern is {patterns!r}, expected an object of numbers")
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise ExportError(f"{path}: target_parameters is {parameters!r}, expected a list of names")
    for key, alpha in {"lora_alpha": values.get("lora_alpha", 8), **patterns}.items():
        if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:
            raise ExportError(f"{path}: {key} is {alpha!r}, expected a number")


def _read_weights(folder: Path) -> dict[str, StoredTensor]:
    for name, reader in WEIGHTS.items():
        if (folder / name).is_file():
            return reader(folder / name)
    raise ExportError(f"{folder} has no weights: neither {' nor '.join(WEIGHTS)}")


@dataclass
class _Target:
    """What has factors: a module, or a parameter of one, which may hold the matrices of all experts.

    key: the name by which PEFT finds its alpha. turned: whether the factors are those of the transposed matrix.
    experts: of each expert, the names of its modules.
    """

    key: str
    turned: bool = False
    experts: list[list[str]] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    def stored_name(self, role: str) -> str:
        """The factor's own name."""
        return {"a": "lora_A", "b": "lora_B"}[_TURNED[role] if self.turned else role]


class _Reading:
    """The tensors of an adapter, sorted by the modules of a family."""

    def __init__(self, values: dict[str, Any], family: Family, model: ModelConfig) -> None:
        self._values = values
        self._model = model
        self._family = family
        self._shapes = canonical_shapes(replace(model, tied_output=False))
        self._modules = {
            module.full_name("weight", **place).removesuffix(".weight"): (module, place)
            for module in (*family.modules, HEAD)
            for place in module.places(model)
        }
        patterns: dict[str, float] = values.get("alpha_pattern") or {}
        self._alphas = [(matcher(pattern), alpha) for pattern, alpha in patterns.items()]
        self._targets: dict[str, _Target] = {}
        self._whole: dict[tuple[str, str], StoredTensor] = {}
        self._rows: dict[str, tuple[str, StoredTensor]] = {}
        # what the experts read in turn is read once
        self._held = functools.lru_cache(maxsize=4)(lambda tensor: tensor.lazy().array())
        self.problems: list[str] = []

    def sort(self, full_name: str, tensor: StoredTensor) -> None:
        """Finds out what a tensor is for."""
        match = _FACTOR.fullmatch(full_name) or _ROWS.fullmatch(full_name) or _WHOLE.fullmatch(full_name)
        name = self._module_name(match["module"]) if match else ""
        target = self._target(match, name) if match and match.re is _FACTOR else None
        if match is None or (target is None if match.re is _FACTOR else name not in self._modules):
            self.problems.append(f"surplus: {full_name} {tensor.shape}")
        elif tensor.dtype not in WEIGHT_DTYPES:
            self.problems.append(f"dtype: {full_name} is {tensor.dtype}, expected one of {', '.join(WEIGHT_DTYPES)}")
        elif target is not None:
            role = "shift" if match["bias"] else _ROLES[match["kind"]]
            if target.turned and role in _TURNED:
                role = _TURNED[role] if "embedding" not in match["kind"] else role
                tensor = tensor.transposed
            target.tensors[role] = tensor
        elif match.re is _ROWS:
            self._rows[name] = (match["module"], tensor)
        elif not (match["kind"] == "weight" and ".base_layer." in full_name):  # the base's own: PEFT may store it, too
            self._whole[name, match["kind"]] = tensor

    def _module_name(self, name: str) -> str:
        """The family's own name of a module that may have another version's."""
        for pattern, replacement in self._family.renamed:
            name = re.sub(pattern, replacement, f"{name}.weight").removesuffix(".weight")
        return name.removeprefix(self._family.prefix)

    def _target(self, match: re.Match[str], name: str) -> _Target | None:
        """What a factor belongs to."""
        key, inside = match["module"], match["inside"].count(".")
        if name in self._modules:
            is_parameter = self._is_parameter(f"{key}.weight")
            turned = "embedding" in match["kind"] or (is_parameter and self._modules[name][0].transposed)
            found = self._targets.setdefault(name, _Target(f"{key}.weight" if is_parameter else key))
            found.turned |= turned
            return None if inside else found
        held = []  # the parameters of a module of all experts that have factors, the innermost first
        for pattern, parts in self._family.fused:
            leaf = pattern.rpartition(r"\.")[2]
            if re.fullmatch(pattern, f"{name}.{leaf}") and self._is_parameter(f"{key}.{leaf}"):
                held.append((leaf, parts))
        if inside >= len(held):
            return None
        leaf, parts = held[len(held) - 1 - inside]
        experts: list[list[str]] = []
        while f"{name}.{len(experts)}.{parts[0]}" in self._modules:
            experts.append([f"{name}.{len(experts)}.{part}" for part in parts])
        return self._targets.setdefault(f"{name}.{leaf}", _Target(f"{key}.{leaf}", experts=experts))

    def _is_parameter(self, key: str) -> bool:
        """Whether `target_parameters` has a parameter, as PEFT finds it."""
        return any(key == name or key.endswith(f".{name}") for name in self._values.get("target_parameters") or ())

    def adapter(self, name: str) -> Adapter:
        """All of it; then `problems` has what is wrong with it."""
        found = Adapter(name, whole=self._all_whole(), rows=self._all_rows())
        for target_name, target in self._targets.items():
            a, b = target.tensors.get("a"), target.tensors.get("b")
            if a is None or b is None:
                self.problems.append(f"missing: {target_name}.{target.stored_name('a' if a is None else 'b')}")
            elif target.experts:
                self._add_experts(found, target_name, target, a, b)
            else:
                self._add_module(found, target_name, target, a, b)
        return found

    def _fits(self, name: str, a: StoredTensor, b: StoredTensor, shapes: list[tuple[int, ...]], n: int) -> bool:
        """Whether these are factors of n matrices that consist of parts of these shapes."""
        rows, columns = sum(shape[0] for shape in shapes), shapes[0][-1]
        rank = a.shape[0] // n if a.shape else 0
        if rank and len(shapes[0]) == 2 and a.shape == (n * rank, columns) and b.shape == (rows, n * rank):
            return True
        needed = f"({n} r, {columns}) and ({rows}, {n} r)".replace("1 r", "r") + ", r at least 1"
        self.problems.append(f"misshaped: {name} has factors {a.shape} and {b.shape}, the model needs {needed}")
        return False

    def _add_module(self, found: Adapter, name: str, target: _Target, a: StoredTensor, b: StoredTensor) -> None:
        module, place = self._modules[name]
        if not self._fits(name, a, b, [self._shapes[part] for part in module.part_names("weight", **place)], 1):
            return
        rank, lengths, scale = a.shape[0], target.tensors.get("lengths"), self._scale(target, a.shape[0])
        across = target.turned and not self._is_parameter(target.key)  # an embedding
        if bool(self._values.get("use_dora")) != (lengths is not None):
            self.problems.append(f"{'surplus' if lengths else 'missing'}: {name}.lora_magnitude_vector")
        row_lengths: dict[str, LazyTensor] = {}
        if lengths is not None and across and lengths.shape == (a.shape[1],):
            row_lengths = dict.fromkeys(module.part_names("weight", **place), lengths.lazy())
        elif lengths is not None:
            row_lengths = self._parts(name, lengths, "weight", None)
        for part, rows in self._parts(name, b, "weight", rank).items():
            found.factors[part] = Factors(a.lazy(), rows, scale, row_lengths.get(part), across)
        if "shift" in target.tensors:
            for part, numbers in self._parts(name, target.tensors["shift"], "bias", 0).items():
                found.shifts[part] = (numbers, scale)

    def _add_experts(self, found: Adapter, name: str, target: _Target, a: StoredTensor, b: StoredTensor) -> None:
        """PEFT holds the factors of all experts in two: of a the experts lie one after another, of b in turn."""
        n = len(target.experts)
        parts = [[self._canonical(module) for module in modules] for modules in target.experts]
        if not self._fits(name, a, b, [self._shapes[part] for part in parts[0]], n):
            return
        rank = a.shape[0] // n
        held = functools.partial(self._held, b)
        for expert, names in enumerate(parts):
            first = 0
            for part in names:
                rows = self._shapes[part][0]
                read = _reader_of_expert(held, first, expert, n)
                own = a.rows(expert * rank, (expert + 1) * rank).lazy()
                found.factors[part] = Factors(own, LazyTensor((rows, rank), own.dtype, read), self._scale(target, rank))
                first += rows

    def _canonical(self, name: str) -> str:
        module, place = self._modules[name]
        return module.part_names("weight", **place)[0]

    def _all_whole(self) -> dict[str, LazyTensor]:
        taken = Taken()
        for name in self._modules:  # in their order, in which heads are joined
            for kind in ("weight", "bias"):
                if (name, kind) in self._whole:
                    self._take(taken, name, self._whole[name, kind], kind, 0)
        self.problems += taken.problems
        found = taken.all()
        for part, tensor in found.items():
            if tensor.shape != self._shapes[part]:
                self.problems.append(f"missing: some heads of {part}")
        return found

    def _all_rows(self) -> dict[str, tuple[list[int], LazyTensor]]:
        """Rows of embeddings, whose numbers are in the config: a list, or one for each of several modules."""
        found = {}
        given = self._values.get("trainable_token_indices")
        for name, (key, tensor) in self._rows.items():
            numbers = given
            if isinstance(given, dict):
                numbers = next((given[end] for end in given if key == end or key.endswith(f".{end}")), None)
            part = self._canonical(name)
            n_rows, columns = self._shapes[part][0], self._shapes[part][-1]
            if not isinstance(numbers, list) or not all(type(row) is int and 0 <= row < n_rows for row in numbers):
                self.problems.append(f"misplaced: trainable_token_indices are not rows of {name}, 0 to {n_rows - 1}")
            elif tensor.shape != (len(numbers), columns):
                self.problems.append(f"misshaped: {name} has rows {tensor.shape}, expected {(len(numbers), columns)}")
            else:
                found[part] = (numbers, tensor.lazy())
        return found

    def _parts(self, name: str, tensor: StoredTensor, kind: str, columns: int | None) -> dict[str, LazyTensor]:
        taken = Taken()
        self._take(taken, name, tensor, kind, columns)
        self.problems += taken.problems
        return taken.all()

    def _take(self, taken: Taken, name: str, tensor: StoredTensor, kind: str, columns: int | None) -> None:
        """Takes a module's tensor apart. columns: instead of its own (0: its own, None: it is a vector)."""
        module, place = self._modules[name]
        shapes = {}
        for part in module.part_names(kind, **place):
            shape = self._shapes.get(part, ())
            shapes[part] = shape if columns == 0 else shape[:1] if columns is None else (shape[0], columns)
        if () in shapes.values():
            self.problems.append(f"surplus: {name}.{kind} {tensor.shape}")
            return
        module = module if columns == 0 else replace(module, transposed=False, plus_one=False)
        take(taken, module, f"{name}.{kind}", tensor, shapes, self._model)

    def _scale(self, target: _Target, rank: int) -> float:
        alphas = (alpha for matches, alpha in self._alphas if matches(target.key))
        alpha = next(alphas, self._values.get("lora_alpha", 8))
        return float(alpha) / (math.sqrt(rank) if self._values.get("use_rslora") else rank)


def _reader_of_expert(whole: Callable[[], Floats], start: int, expert: int, n: int) -> Callable[[int, int], Floats]:
    """Reads columns expert, expert + n, ... of the rows from `start` on."""
    return lambda first, last: whole()[start + first : start + last, expert::n]


# ---- at run time


def attach(file: FlatFile, adapters: Sequence[tuple[Path, float]]) -> None:
    """Lets the core add the adapters' products to those of the file's matrices, and replaces what they bring whole.

    (directory, strength) of each. Raises UnsupportedError for what can only be merged: DoRA of embeddings.
    """
    config, architecture = model_config(file), file.metadata.get("architecture")
    read = [(read_adapter(folder, architecture, config), strength) for folder, strength in adapters]
    found = [(adapter, strength) for adapter, strength in read if strength != 0]
    buffer = file.buffer
    base = Checkpoint(config, lazy_tensors(file, lambda offset, count: buffer[offset : offset + count]))
    changed = merge(base, [(replace(adapter, factors={}), strength) for adapter, strength in found])
    held = {*map(id, base.tensors.values())}
    for name, tensor in changed.tensors.items():
        if id(tensor) not in held:
            _replace(file, name, tensor.finite(name))
            if name == "token_embedding.weight" and changed.config.tied_output:
                _replace(file, "output.weight", tensor)
    changes: dict[str, list[tuple[Factors, float]]] = {}
    for adapter, strength in found:
        for name, factors in adapter.factors.items():
            if factors.lengths is not None and factors.across:
                raise UnsupportedError(
                    f"the adapter {adapter.name} cannot be applied to a loaded model, because of DoRA in {name}: "
                    "merge it (llamac export MODEL OUT --lora ...)"
                )
            changes.setdefault(name, []).append((factors, strength))
    for name, parts in changes.items():
        tied = changed.config.tied_output and name == "output.weight"
        _adapt(file, name, changed.tensors["token_embedding.weight" if tied else name], parts)


def _replace(file: FlatFile, name: str, tensor: LazyTensor) -> None:
    if len(tensor.shape) == 1:
        file.core.replace(name, DTYPES["f32"], tensor.array().astype(np.float32).tobytes())
    else:
        dtype = tensor.dtype if tensor.dtype in ("f32", "f16", "bf16") else "f32"
        data = b"".join(pack_strips(rows, dtype) for _, rows in tensor.chunks())
        file.core.replace(name, DTYPES[dtype], data)


def _adapt(file: FlatFile, name: str, base: LazyTensor, changes: Sequence[tuple[Factors, float]]) -> None:
    """One adapter of all changes: a is all of theirs, and b, each with what the lengths after it multiply it by."""
    a, b = [], []
    scales = np.ones(base.shape[0])
    for factors, strength in changes:
        a.append(factors.a.finite(f"{name} (an adapter's A)").array())
        b.append(factors.b.finite(f"{name} (an adapter's B)").array() * np.float64(factors.scale * strength))
        if factors.lengths is not None:
            factor = factors.lengths.finite(name).array() / _row_lengths(base, a[-1], b[-1])
            scales *= factor
            b = [part * factor[:, None] for part in b]
    of_all = np.concatenate(a), np.concatenate(b, axis=1).astype(np.float32)
    is_embedding = name in ("token_embedding.weight", "position_embedding.weight")
    strips = _strips(of_all[0].T if is_embedding else of_all[0]), _strips(of_all[1])
    has_lengths = any(factors.lengths is not None for factors, _ in changes)
    of_rows = memoryview(scales.astype(np.float32).tobytes()).cast("f") if has_lengths else None
    file.core.adapt(name, len(of_all[0]), *strips, of_rows)


def _row_lengths(base: LazyTensor, a: Floats, b: NDArray[np.float64]) -> NDArray[np.float64]:
    wide = a.astype(np.float64)
    parts = [np.linalg.norm(rows + b[first : first + len(rows)] @ wide, axis=1) for first, rows in base.chunks()]
    return np.concatenate(parts)


def _strips(matrix: Floats) -> memoryview[float]:
    return memoryview(pack_strips(np.ascontiguousarray(matrix, np.float32), "f32")).cast("f")


# ---- merging


def merge(checkpoint: Checkpoint, adapters: Sequence[tuple[Adapter, float]]) -> Checkpoint:
    """The checkpoint with the adapters' changes in it. (adapter, strength) of each: strength multiplies what it adds;
    what it brings whole stays as it is, unless the strength is 0, which stands for no adapter.

    A matrix that is tied to another one is parted from it: an adapter changes one of the two. (Rows for single tokens
    are for both, as PEFT has it.)
    """
    tensors, config = dict(checkpoint.tensors), checkpoint.config
    entries = [{"name": adapter.name, "strength": strength} for adapter, strength in adapters]
    adapters = [(adapter, strength) for adapter, strength in adapters if strength != 0]
    for adapter, _ in adapters:
        for name, (numbers, rows) in adapter.rows.items():
            if name in tensors:
                tensors[name] = _with_rows(tensors[name], numbers, rows.finite(f"{name} (rows of an adapter)"))
    touched = {name for adapter, _ in adapters for name in (*adapter.factors, *adapter.whole)}
    parted = {"output.weight"} & {name for adapter, _ in adapters for name in adapter.rows}
    if config.tied_output and (touched & {"token_embedding.weight", "output.weight"} or parted):
        tensors["output.weight"] = tensors["token_embedding.weight"]
        config = replace(config, tied_output=False)
    changes: dict[str, list[tuple[Factors, float]]] = {}
    for adapter, strength in adapters:
        for name, tensor in adapter.whole.items():
            tensors[name] = tensor
        for name, factors in adapter.factors.items():
            changes.setdefault(name, []).append((factors, strength))
    for name, found in changes.items():
        tensors[name] = _merged(name, tensors[name], found)
    for adapter, strength in adapters:
        for name, (shift, scale) in adapter.shifts.items():
            tensors[name] = _shifted(tensors.get(name), shift.finite(name), scale * strength)
    metadata = {**checkpoint.metadata, "adapters": [*checkpoint.metadata.get("adapters", []), *entries]}
    return replace(checkpoint, config=config, tensors=tensors, metadata=metadata)


def _merged(name: str, base: LazyTensor, changes: Sequence[tuple[Factors, float]]) -> LazyTensor:
    """The sum of a matrix and its changes, one after another; lengths are those of the matrix with one change alone."""
    parts = []
    for factors, strength in changes:
        a = factors.a.finite(f"{name} (an adapter's A)").array().astype(np.float64) * (factors.scale * strength)
        b = factors.b.finite(f"{name} (an adapter's B)")

        def added(first: int, last: int, a: NDArray[np.float64] = a, b: LazyTensor = b) -> NDArray[np.float64]:
            return b.read(first, last).astype(np.float64) @ a

        parts.append((added, factors, _column_lengths(base, added) if factors.across and factors.lengths else None))

    def read(first: int, last: int) -> Floats:
        rows = base.read(first, last)
        total = rows.astype(np.float64)
        for added, factors, columns in parts:
            change = added(first, last)
            total += change
            if columns is not None and factors.lengths is not None:
                total *= factors.lengths.array() / columns()
            elif factors.lengths is not None:
                lengths = np.linalg.norm(rows + change, axis=1, keepdims=True)
                total *= factors.lengths.read(first, last)[:, None] / lengths
        return total.astype(np.float32)

    return LazyTensor(base.shape, base.dtype, read)


def _column_lengths(
    base: LazyTensor, added: Callable[[int, int], NDArray[np.float64]]
) -> Callable[[], NDArray[np.float64]]:
    @functools.cache
    def lengths() -> NDArray[np.float64]:
        squares = np.zeros(base.shape[1])
        for first, rows in base.chunks():
            squares += np.square(rows + added(first, first + len(rows))).sum(axis=0)
        return np.sqrt(squares)

    return lengths


def _with_rows(base: LazyTensor, numbers: list[int], rows: LazyTensor) -> LazyTensor:
    def read(first: int, last: int) -> Floats:
        result: Floats = base.read(first, last).copy()
        inside = [i for i, number in enumerate(numbers) if first <= number < last]
        result[[numbers[i] - first for i in inside]] = rows.array()[inside]
        return result

    return LazyTensor(base.shape, base.dtype, read)


def _shifted(base: LazyTensor | None, numbers: LazyTensor, scale: float) -> LazyTensor:
    def read(first: int, last: int) -> Floats:
        total: NDArray[np.float64] = numbers.read(first, last).astype(np.float64) * scale
        if base is not None:
            total += base.read(first, last)
        return total.astype(np.float32)

    return LazyTensor(numbers.shape, "f32", read)
