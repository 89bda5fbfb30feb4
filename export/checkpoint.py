"""The canonical form of a model: what every importer produces and every writer consumes.

A canonical checkpoint has the tensor names and shapes of docs/format.md, matrices as (out, in), and RoPE pairs in
halves; whatever is specific to a family has already been folded in. Tensors are lazy: rows are read, converted to
float32 and transformed on request, so a model much larger than memory can be converted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llamac.errors import ExportError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.text.special_tokens import SpecialTokens
    from llamac.text.tokenizer import Tokenizer

    Floats = NDArray[np.float32]
    Blocks = NDArray[np.uint8]

# The size of the rows that are read at once, in bytes of float32.
CHUNK_BYTES = 32 << 20
# Rows that are at most this far from each other are read together: a piece can have every other row of RoPE's pairs.
MAX_STEP = 2
# In all layers together; the largest known models have 25,000. Each expert has its own tensor names, so a config of a
# few bytes could expand to gigabytes.
MAX_EXPERTS = 1 << 17
# The widths of a recurrent layer's heads are multiples of this number (docs/format.md).
STATE_MULTIPLE = 16


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read on request.

    Attributes:
        shape: (n) or (rows, columns).
        dtype: What the source stores: "f32", "f16", "bf16", ...
        read: read(first, last) returns rows [first, last) as float32, shape (last - first, columns); for a vector, its
            elements [first, last).
        blocks: Of a matrix that the source stores in GGUF's blocks of a dtype that flat files have, too:
            blocks(first, last) returns rows [first, last) of them, shape (last - first, bytes of a row), uint8.
            Otherwise None.
        is_exact: Whether `dtype` holds the numbers exactly. It does not hold the sums of a merged adapter.
        strips: Of a matrix that a flat file stores in a quantized dtype: strips(first, last) returns the bytes of rows
            [first, last), where `first` is a multiple of 16. Otherwise None.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Floats]
    blocks: Callable[[int, int], Blocks] | None = None
    is_exact: bool = True
    strips: Callable[[int, int], bytes] | None = None

    @classmethod
    def of(cls, numbers: Floats) -> LazyTensor:
        """Wrap a float32 array."""
        return cls(numbers.shape, "f32", lambda first, last: numbers[first:last])

    @classmethod
    def stacked(cls, parts: Sequence[LazyTensor]) -> LazyTensor:
        """Concatenate tensors along the first dimension. They agree in all other dimensions.

        The result keeps blocks if all tensors have blocks of one type. It is in f32 if their types differ.
        """
        import numpy as np

        ends = np.cumsum([part.shape[0] for part in parts])

        def reader(readers: Sequence[Callable[[int, int], Any]]) -> Callable[[int, int], Any]:
            def rows(first: int, last: int) -> Any:
                runs = []
                for part, end, read in zip(parts, ends, readers, strict=True):
                    start = int(end) - part.shape[0]
                    if first < end and start < last:
                        runs.append(read(max(first - start, 0), min(last - start, part.shape[0])))
                return np.concatenate(runs)

            return rows

        dtype = parts[0].dtype if len({part.dtype for part in parts}) == 1 else "f32"
        kept = [part.blocks for part in parts if part.blocks is not None and part.dtype == dtype]
        blocks = reader(kept) if len(kept) == len(parts) else None
        return cls((int(ends[-1]), *parts[0].shape[1:]), dtype, reader([part.read for part in parts]), blocks)

    def in_order(self, order: NDArray[np.intp]) -> LazyTensor:
        """The rows with these numbers, in this order. Rows that are close to each other are read together, once."""
        import numpy as np

        def reader(read: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
            def rows(first: int, last: int) -> Any:
                wanted = order[first:last]
                ascending = np.sort(wanted)
                spans = np.split(ascending, np.flatnonzero(np.diff(ascending) > MAX_STEP) + 1)
                starts = np.array([span[0] for span in spans])
                found = [read(int(span[0]), int(span[-1]) + 1) for span in spans]
                before = np.cumsum([0, *map(len, found)])[:-1]
                places = wanted + (before - starts)[np.searchsorted(starts, wanted, side="right") - 1]
                return np.concatenate(found).take(places, axis=0)

            return rows

        blocks = None if self.blocks is None else reader(self.blocks)
        return LazyTensor((len(order), *self.shape[1:]), self.dtype, reader(self.read), blocks)

    def rows(self, first: int, last: int) -> LazyTensor:
        """Rows [first, last) as a tensor."""
        blocks = self.blocks
        return LazyTensor(
            (last - first, *self.shape[1:]),
            self.dtype,
            lambda a, b: self.read(first + a, first + b),
            None if blocks is None else lambda a, b: blocks(first + a, first + b),
        )

    def times(self, number: float) -> LazyTensor:
        """Multiply every element by `number`, in float32."""
        import numpy as np

        return LazyTensor(self.shape, "f32", lambda first, last: self.read(first, last) * np.float32(number))

    def times_rows(self, numbers: Floats) -> LazyTensor:
        """Multiply each row, or each element of a vector, by a number of its own, in float32."""

        def read(first: int, last: int) -> Floats:
            rows = self.read(first, last)
            return rows * numbers[first:last].reshape(-1, *[1] * (rows.ndim - 1))

        return LazyTensor(self.shape, "f32", read)

    def plus(self, number: float) -> LazyTensor:
        """Add `number` to every element, in float32."""
        import numpy as np

        return LazyTensor(self.shape, "f32", lambda first, last: self.read(first, last) + np.float32(number))

    def has_strips_of(self, dtype: str) -> bool:
        """Whether a flat file can have a copy of the matrix in this quantized dtype."""
        return self.strips is not None and self.dtype == dtype

    def array(self) -> Floats:
        """The whole tensor as float32."""
        return self.read(0, self.shape[0])

    def with_columns(self, order: NDArray[np.intp]) -> LazyTensor:
        """The columns of a matrix in another order. Blocks of several columns are not kept."""
        return LazyTensor(self.shape, self.dtype, lambda first, last: self.read(first, last)[:, order])

    def by_columns(self) -> LazyTensor:
        """The columns of a matrix, one after the other, as a vector. Every read reads the whole matrix."""
        return LazyTensor(
            (self.shape[0] * self.shape[1],), self.dtype, lambda first, last: self.array().T.reshape(-1)[first:last]
        )

    def minus_exp(self) -> LazyTensor:
        """-exp of every element, rounded to float32."""
        import numpy as np

        def read(first: int, last: int) -> Floats:
            return (-np.exp(self.read(first, last).astype(np.float64))).astype(np.float32)

        return LazyTensor(self.shape, "f32", read)

    def log_of_minus(self) -> LazyTensor:
        """The inverse of `minus_exp`."""
        import numpy as np

        def read(first: int, last: int) -> Floats:
            return np.log(-self.read(first, last).astype(np.float64)).astype(np.float32)

        return LazyTensor(self.shape, "f32", read)

    def finite(self, name: str) -> LazyTensor:
        """Check elements as they are read.

        Args:
            name: The tensor's name, for the error.

        Returns:
            This tensor. Reading it raises ExportError if an element is not finite. Reading its blocks does not:
            whoever unpacks their scales checks them.
        """
        import numpy as np

        def read(first: int, last: int) -> Floats:
            rows = self.read(first, last)
            if not np.isfinite([rows.max(initial=0), rows.min(initial=0)]).all():  # max and min propagate NaN
                raise ExportError(f"tensor {name} holds numbers that are not finite: the source is damaged")
            return rows

        return replace(self, read=read)

    def chunks(self, multiple: int = 16) -> Iterator[tuple[int, Floats]]:
        """Yield (first row, rows) in order, about CHUNK_BYTES each.

        Every chunk but the last has a multiple of `multiple` rows.
        """
        columns = self.shape[1] if len(self.shape) > 1 else 1
        step = max(multiple, CHUNK_BYTES // (4 * columns) // multiple * multiple)
        for first in range(0, self.shape[0], step):
            yield first, self.read(first, min(first + step, self.shape[0]))


@dataclass(frozen=True)
class LayerConfig:
    """One layer record of the flat file."""

    ffn: str
    ffn_dim: int
    mixer: str = "attention"
    placement: str = "pre"
    layer_scale: float = 1.0
    window: int = 0
    rope: int = -1
    n_heads: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    kv_source: int = -1
    v_is_k: int = 0
    v_norm: str = "none"
    output_gate: str = "none"
    sinks: int = 0
    query_beta: float = 0.0
    query_context: int = 0
    activation_limit: float = 0.0
    up_offset: float = 0.0
    n_experts: int = 0
    n_experts_used: int = 0
    router: str = "softmax"
    router_choice_bias: int = 0
    n_expert_groups: int = 0
    n_expert_groups_used: int = 0
    expert_weights: int = 0
    expert_scale: float = 1.0
    shared_ffn_dim: int = 0
    shared_gate: int = 0
    layer_embedding_dim: int = 0
    state_key_heads: int = 0
    state_heads: int = 0
    state_key_dim: int = 0
    state_value_dim: int = 0
    conv_width: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0
    latent_norm_eps: float = 0.0
    expert_weights_eps: float = 0.0
    expert_norms: int = 0
    expert_factors: int = 0
    plain_experts: int = 0
    sub_norms: int = 0
    window_chunks: int = 0
    query_offset: int = 0
    expert_weights_first: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """The config record of the flat file. docs/format.md defines the names."""

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
    qk_norm_after_rope: int = 0
    two_sided: int = 0
    n_types: int = 0
    scores_pairs: int = 0
    pooled_dim: tuple[int, ...] = ()
    pooled_activation: tuple[str, ...] = ()
    pooled_norm: tuple[int, ...] = ()
    state_norm: str = "none"
    state_step_min: float = 0.0
    state_step_max: float = 0.0
    rounds_inputs: int = 0
    mtp: LayerConfig | None = None
    bias_distance: int = 0
    drafter: str = "none"
    trunk_dim: int = 0
    n_clusters: int = 0
    clusters_used: int = 0
    eagle_layers: tuple[int, ...] = (0, 0, 0)
    eagle_vocab_size: int = 0
    eagle_normed: int = 0
    eagle_in_norm: str = "none"
    eagle_out_normed: int = 0
    state_norm_eps: float = 0.0
    state_beta_doubled: int = 0
    expert_dim: int = 0
    embedding_norm: int = 0

    def __post_init__(self) -> None:
        n_experts = sum(layer.n_experts for layer in self.all_layers)
        if n_experts > MAX_EXPERTS:
            raise ExportError(f"the model has {n_experts} experts in all layers, expected at most {MAX_EXPERTS}")

    @functools.cached_property
    def all_layers(self) -> tuple[LayerConfig, ...]:
        """The layers, and after them the MTP layer if there is one, as in the file."""
        return self.layers if self.mtp is None else (*self.layers, self.mtp)


@dataclass
class Checkpoint:
    """A whole model.

    Attributes:
        config: The model's config.
        tensors: Tensors by canonical name, in any order.
        tokenizer: (canonical tokenizer.json, special token rules, original SentencePiece model or None), or None if the
            source has no tokenizer.
        chat_template: The default chat template, or "".
        metadata: The JSON object of the metadata section, without "exporter" and "dtype".
        stop_ids: Tokens that end a generation, in addition to the tokenizer's.
        gguf_values: The metadata of a GGUF file until its tokenizer has been read from them.
        opened_tokenizer: `tokenizer` with all rules, if it has been opened.
    """

    config: ModelConfig
    tensors: dict[str, LazyTensor]
    tokenizer: tuple[bytes, SpecialTokens, bytes | None] | None = None
    chat_template: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    gguf_values: dict[str, Any] | None = None
    opened_tokenizer: Tokenizer | None = None

    def without_mtp(self) -> Checkpoint:
        """The model without its MTP layer."""
        if self.config.mtp is None:
            return self
        own = ("mtp.", f"layers.{len(self.config.layers)}.")
        tensors = {name: tensor for name, tensor in self.tensors.items() if not name.startswith(own)}
        return replace(self, config=replace(self.config, mtp=None), tensors=tensors)

    @property
    def n_parameters(self) -> int:
        """The number of elements in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())
