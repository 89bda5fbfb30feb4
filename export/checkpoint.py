"""What every importer produces and every writer consumes: a checkpoint in canonical form.

Canonical means: the tensor names and shapes of docs/format.md, matrices as (out, in), RoPE pairs in halves, the
family's oddities already folded away. Tensors are lazy: rows are read, converted to float32 and transformed when they
are asked for, so that a model much larger than memory can be converted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from llamac.errors import ExportError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.tokenizer import SpecialTokens

    Floats = NDArray[np.float32]

# Rows that are held in memory at once, in bytes of float32.
CHUNK_BYTES = 32 << 20
# Of all layers together: each has a name of its own, so that a few bytes of a config would become gigabytes of names.
MOST_EXPERTS = 1 << 17
T = TypeVar("T")


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is needed.

    shape: (n) or (rows, columns). dtype: what the source stores ("f32", "f16", "bf16", ...).
    read(first, last): rows [first, last) as float32, shape (last - first, columns); for a vector its elements.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Floats]

    @classmethod
    def of(cls, numbers: Floats) -> LazyTensor:
        """A float32 tensor that is in memory."""
        return cls(numbers.shape, "f32", lambda first, last: numbers[first:last])

    @classmethod
    def stacked(cls, parts: Sequence[LazyTensor], width: int = 0) -> LazyTensor:
        """Tensors one after another along the first dimension, as one; with `width` so many rows of each in turn."""
        import numpy as np

        rows = sum(part.shape[0] for part in parts)

        def place(row: int) -> tuple[LazyTensor, int, int]:
            """(the part in which a row lies, the row's number there, how many rows follow in it at least)."""
            if width:
                turn, rest = divmod(row, width * len(parts))
                index, rest = divmod(rest, width)
                return parts[index], turn * width + rest, width - rest
            for part in parts:
                if row < part.shape[0]:
                    return part, row, part.shape[0] - row
                row -= part.shape[0]
            raise IndexError(row)

        def read(first: int, last: int) -> Floats:
            runs = []
            while first < last:
                part, start, count = place(first)
                count = min(count, last - first)
                runs.append(part.read(start, start + count))
                first += count
            return np.concatenate(runs)

        return cls((rows, *parts[0].shape[1:]), parts[0].dtype, read)

    def rows(self, first: int, last: int) -> LazyTensor:
        """Some of its rows."""
        return LazyTensor((last - first, *self.shape[1:]), self.dtype, lambda a, b: self.read(first + a, first + b))

    def plus(self, number: float) -> LazyTensor:
        """The same tensor with a number added to every number, in float32."""
        import numpy as np

        return LazyTensor(self.shape, "f32", lambda first, last: self.read(first, last) + np.float32(number))

    def array(self) -> Floats:
        """The whole tensor as float32."""
        return self.read(0, self.shape[0])

    def finite(self, name: str) -> LazyTensor:
        """The same tensor, with an ExportError that has its name where a number is read that is not finite."""
        import numpy as np

        def read(first: int, last: int) -> Floats:
            rows = self.read(first, last)
            if not np.isfinite([rows.max(initial=0), rows.min(initial=0)]).all():  # NaN is larger and smaller
                raise ExportError(f"tensor {name} holds numbers that are not finite: the source is damaged")
            return rows

        return LazyTensor(self.shape, self.dtype, read)

    def chunks(self, multiple: int = 16) -> Iterator[tuple[int, Floats]]:
        """(first row, rows) in order, about CHUNK_BYTES each: a multiple of `multiple` rows in all but the last."""
        columns = self.shape[1] if len(self.shape) > 1 else 1
        step = max(multiple, CHUNK_BYTES // (4 * columns) // multiple * multiple)
        for first in range(0, self.shape[0], step):
            yield first, self.read(first, min(first + step, self.shape[0]))


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made on another thread while the one before it is in use."""
    end = object()
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(next, items, end)
        while (item := pending.result()) is not end:
            pending = pool.submit(next, items, end)
            yield cast(T, item)


@dataclass(frozen=True)
class LayerConfig:
    """One layer record of the flat file."""

    ffn: str
    ffn_dim: int
    window: int = 0
    rope: int = -1
    placement: str = "pre"
    n_experts: int = 0
    n_experts_used: int = 0
    expert_weights: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """The config record of the flat file; names and meanings are docs/format.md's."""

    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    n_token_ids: int
    context: int
    norm: str
    position: str
    activation: str
    tied_output: bool
    norm_eps: float
    attention_scale: float
    layers: tuple[LayerConfig, ...]
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    rope_dim: tuple[int, ...] = ()
    rope_original_context: tuple[int, ...] = ()
    rope_attention_factor: tuple[float, ...] = ()
    qk_norm: str = "none"

    def __post_init__(self) -> None:
        n_experts = sum(layer.n_experts for layer in self.layers)
        if n_experts > MOST_EXPERTS:
            raise ExportError(f"the model would have {n_experts} experts in all layers, more than {MOST_EXPERTS}")


@dataclass
class Checkpoint:
    """A whole model: config, tensors by canonical name (in any order), texts.

    tokenizer: (canonical tokenizer.json, rules for special tokens, original SentencePiece model or None), or None if
    the source has none. metadata: the JSON object of the metadata section, without "exporter" and "dtype". stop_ids:
    tokens that end a text whatever the tokenizer says, or without one.
    """

    config: ModelConfig
    tensors: dict[str, LazyTensor]
    tokenizer: tuple[bytes, SpecialTokens, bytes | None] | None = None
    chat_template: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
