"""Turns stored tensors into the canonical tensors that they hold, as the modules of a family's row describe them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from llamac.export import distances, latent
from llamac.export.checkpoint import LayerConfig, LazyTensor, ModelConfig
from llamac.export.hf.family import Module
from llamac.export.stored import WEIGHT_DTYPES, StoredTensor

Shape = tuple[int, ...]


@dataclass
class Collected:
    """The tensors found so far among those that the config requires."""

    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    heads: dict[str, list[LazyTensor]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def all(self) -> dict[str, LazyTensor]:
        """The tensors by canonical name."""
        return self.tensors | {name: LazyTensor.stacked(heads) for name, heads in self.heads.items()}


@dataclass(frozen=True)
class Place:
    """Where a stored tensor belongs.

    Attributes:
        module: The module that describes it.
        parts: The canonical tensors that it holds, and their shapes.
        model: The model's config.
        layer: The number of its layer.
        head: The number of its head or state ("{h}" in the module's name).
    """

    module: Module
    parts: dict[str, Shape]
    model: ModelConfig
    layer: int
    head: int = 0

    @property
    def record(self) -> LayerConfig:
        """The record of the layer."""
        return self.model.all_layers[self.layer]

    @property
    def n_heads(self) -> int:
        """The number of heads of q in the layer."""
        return self.record.n_heads or self.model.n_heads

    @property
    def is_of_head(self) -> bool:
        """Whether the tensor has only the rows of one head or state."""
        return "{h}" in self.module.name

    @property
    def is_taps(self) -> bool:
        """Whether the tensor is the weight of a convolution."""
        return self.module.taps and next(iter(self.parts)).endswith(".weight")

    def is_transposed(self, tensor: StoredTensor) -> bool:
        """Whether the tensor is a matrix (inputs, outputs)."""
        return self.module.transposed and len(tensor.shape) == 2

    def stored_shape(self, tensor: StoredTensor) -> Shape:
        """The shape that the tensor must have."""
        module, record, shapes = self.module, self.record, list(self.parts.values())
        needed = shapes[0] if module.shared else _stacked(shapes)
        if module.absorbed:
            needed = (self.n_heads * (record.qk_nope_head_dim + record.v_head_dim), record.kv_lora_rank)
        if module.bucketed:
            needed = (distances.BUCKETS, self.model.n_heads)
        if self.is_transposed(tensor):
            needed = needed[::-1]
        if module.one_row:
            needed = (1, *needed)
        if self.is_taps:
            needed = (needed[0] // record.conv_width, 1, record.conv_width)
        if self.is_of_head:
            first, last = module.span(self.model, record, self.head, needed[0])
            # transformers divides the channels of a convolution differently
            needed = (tensor.shape[0] if self.is_taps and tensor.shape else last - first, *needed[1:])
        return needed


def collect(collected: Collected, place: Place, full_name: str, tensor: StoredTensor) -> None:
    """Add the parts of a stored tensor, or its problem, to `collected`."""
    problem = _problem(place, full_name, tensor)
    if problem:
        collected.problems.append(problem)
        return
    lazy, module, parts = _canonical_rows(place, tensor), place.module, place.parts
    if module.absorbed:
        halves = latent.split(lazy, place.n_heads, place.record.qk_nope_head_dim)
        collected.tensors.update(zip(parts, halves, strict=True))
    elif module.shared:
        collected.tensors.update(dict.fromkeys(parts, lazy))
    elif place.is_of_head:
        _add_head(collected, place, full_name, lazy)
    else:
        collected.tensors.update((part, _canonical_values(place, part, rows)) for part, rows in _split(lazy, parts))


def _problem(place: Place, full_name: str, tensor: StoredTensor) -> str:
    """Why the tensor cannot be read; "": it can be read."""
    needed = place.stored_shape(tensor)
    if tensor.shape != needed:
        return f"misshaped: {full_name} is {tensor.shape}, the config requires {needed}"
    if tensor.dtype not in WEIGHT_DTYPES:
        return f"dtype: {full_name} is {tensor.dtype}, expected one of {', '.join(WEIGHT_DTYPES)}"
    if place.is_transposed(tensor) and tensor.is_by_rows:
        what = "has factors for rows or groups of columns, which are not read for a matrix (inputs, outputs)"
        return f"unsupported: {full_name} {what}"
    return ""


def _canonical_rows(place: Place, tensor: StoredTensor) -> LazyTensor:
    """The tensor as rows of outputs, in the order of the parts."""
    module, n_rows = place.module, tensor.shape[0]
    if place.is_transposed(tensor):
        tensor = tensor.transposed
    if module.one_row:
        tensor = replace(tensor, shape=tensor.shape[1:], strides=tensor.strides[1:])
    if place.is_taps:
        tensor = replace(tensor, shape=tensor.shape[::2], strides=tensor.strides[::2])
    lazy = tensor.lazy().by_columns() if place.is_taps and not place.is_of_head else tensor.lazy()
    order = module.order(place.model, place.record, n_rows)
    if order is not None:
        lazy = lazy.in_order(order)
    return distances.by_distance(lazy) if module.bucketed else lazy


def _canonical_values(place: Place, part: str, rows: LazyTensor) -> LazyTensor:
    """The rows of a part with the values that the engine computes with."""
    module = place.module
    if module.times_root:
        rows = rows.times(place.model.dim**-0.5)
    if module.plus_one and part.endswith(".weight"):
        return rows.plus(1)
    return rows.minus_exp() if module.log else rows


def _add_head(collected: Collected, place: Place, full_name: str, lazy: LazyTensor) -> None:
    """Add the rows of one head. The taps of a convolution are joined once all heads have theirs."""
    for part, shape in place.parts.items():
        tensors = collected.heads.setdefault(part, [])
        tensors.append(lazy)
        if place.is_taps and len(tensors) == place.module.n_heads(place.model):
            joined = LazyTensor.stacked(collected.heads.pop(part)).by_columns()
            if joined.shape != shape:
                collected.problems.append(f"misshaped: {full_name} and its like have {joined.shape}, not {shape}")
            collected.tensors[part] = joined


def _stacked(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _split(tensor: LazyTensor, parts: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, LazyTensor]]:
    """The parts of a tensor that concatenates them along the output dimension."""
    first = 0
    for part, shape in parts.items():
        yield part, tensor.rows(first, first + shape[0])
        first += shape[0]
