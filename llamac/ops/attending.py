"""Attention of queries to keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamac import _core
from llamac.arguments import KV_DTYPES, KVDtype, to_int, wrong_type
from llamac.engine.hardware.machine import choose_isa
from llamac.engine.sampling.params import MIN_POSITIVE
from llamac.errors import ArgumentError
from llamac.ops.arrays import NUMBERS, choice, finite_number, floats, integers, optional, thread_count

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.ops.arrays import Floats, Integers

MAX_HEAD_DIM = 4096  # of a model file
MAX_HEADS = 2**31 - 1  # rows times heads


def attention(
    q: Floats,
    k: Floats,
    v: Floats,
    *,
    scale: float | None = None,
    causal: bool = True,
    positions: Sequence[int] | NDArray[np.integer] | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Floats | None = None,
    kv_dtype: KVDtype = "f32",
    isa: str | None = None,
    threads: int | None = None,
) -> Floats:
    """Compute softmax(scale q k^T) v for each head (Vaswani et al. 2017), with grouped queries (Ainslie et al. 2023).

    Query head h reads KV head h // (heads / kv_heads). Keys and values are stored as in a KV cache of `kv_dtype`, and
    blocks of 256 positions are merged by an online softmax (Milakov and Gimelshein 2018; docs/determinism.md).

    Args:
        q: (rows, heads, head_dim), float32.
        k: (n, kv_heads, head_dim), float32: the keys of positions 0 to n - 1.
        v: (n, kv_heads, head_dim), float32: their values.
        scale: Multiplies q. None: 1 / sqrt(head_dim). A model's is `model.config["attention_scale"]`.
        causal: Whether a row at position p sees positions 0 to p only. False: it sees all.
        positions: (rows): the position of each row, 0 to n - 1. None: the last ones, n - rows to n - 1.
        window: A row at position p sees only positions above p - window. 0: no window.
        soft_cap: Scores s become soft_cap tanh(s / soft_cap) (Gemma 2). 0: off.
        sinks: (heads), float32: one more logit of each head's softmax, without a value (gpt-oss).
        kv_dtype: "f32", "f16" or "q8": how keys and values are stored.
        isa: The kernel set. None: `LLAMAC_ISA`, otherwise the best of this machine. It does not change the bits.
        threads: 1 to 1024. None: this machine's default, or 1 for little work. They do not change the bits.

    Returns:
        The shape of q.

    Raises:
        ArgumentError: If shapes do not fit each other, or an argument is out of range; `ArgumentTypeError` if an array
            has another type.
        UnsupportedError: If this machine does not support the kernel set.
    """
    import numpy as np

    q = floats(q, "q", ("rows", "heads", "head_dim"))
    rows, heads, head_dim = q.shape
    k = floats(k, "k", ("n", "kv_heads", head_dim), f"q has shape {q.shape}")
    n, kv_heads, _ = k.shape
    v = floats(v, "v", k.shape, "keys and values have the same shape")
    if heads % kv_heads:
        raise ArgumentError(f"q has {heads} heads and k has {kv_heads}: expected a multiple of k's heads in q")
    if head_dim > MAX_HEAD_DIM or max(rows * heads, n * kv_heads) > MAX_HEADS:
        raise ArgumentError(f"q has shape {q.shape} and k {k.shape}: expected heads of up to {MAX_HEAD_DIM} numbers")
    if not isinstance(causal, bool | np.bool_):
        raise wrong_type("causal", causal, "True or False")
    begin, end = _visible(rows, n, causal, positions, window)
    sinks = None if sinks is None else floats(sinks, "sinks", (heads,), "a number for each head of q")
    cap = finite_number(soft_cap, "soft_cap")
    if cap < 0:
        raise ArgumentError(f"soft_cap is {cap:g}, expected a positive number, or 0 for none")
    cap = cap and max(cap, MIN_POSITIVE)
    factor = head_dim**-0.5 if scale is None else finite_number(scale, "scale")
    out = np.empty_like(q)
    number = NUMBERS[KV_DTYPES[choice(kv_dtype, "kv_dtype", KV_DTYPES)]]
    count = thread_count(threads, 2 * heads * head_dim * int((end - begin).sum(dtype=np.int64)))
    seen, kernel_set = (begin.data, end.data), choose_isa(isa)
    _core.op_attend(q.data, k.data, v.data, *seen, number, factor, cap, optional(sinks), out.data, kernel_set, count)
    return out


def _visible(
    rows: int, n: int, causal: bool, positions: Sequence[int] | NDArray[np.integer] | None, window: int
) -> tuple[Integers, Integers]:
    """The first position that each row sees, and the end of those that it sees."""
    import numpy as np

    width = to_int(window, "window")
    if width < 0:
        raise ArgumentError(f"window is {width}, expected a number of positions, or 0 for no window")
    if not causal:
        if positions is not None or width:
            raise ArgumentError("with causal=False each row sees all positions: leave out positions and window")
        return np.zeros(rows, np.int32), np.full(rows, n, np.int32)
    if positions is None and rows > n:
        raise ArgumentError(f"q has {rows} rows, but k has only {n} positions: give positions, or use causal=False")
    last = np.arange(n - rows, n) if positions is None else positions
    end = integers(last, "positions", rows, 0, n - 1) + np.int32(1)
    begin = np.maximum(end - np.int32(min(width, n)), 0).astype(np.int32) if width else np.zeros(rows, np.int32)
    return begin, end
