"""Launches of the kernels of layers: norms, activations, heads and their cache, attention, experts. Which kernel, with
which grid and shared memory.

Addresses are integers in the device's memory; 0 is none. Rows of floats lie side by side. Each function names the step
of the plan (csrc/plan.h) that it computes. The kernels' comments give shapes, and name the functions of the core whose
results they reproduce bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from llamac.gpu.driver import arguments, ceil_div

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.gpu.driver import Argument, Driver, Properties
    from llamac.gpu.launches import Form

ATTENTION_BLOCK = 256  # positions of a partial softmax (csrc/kv_layout.h)
TILE_QUERIES = (1, 4, 8, 16, 32)  # of a tile of queries: the kernels attend_*_x1 to x32
TWO_SIDED_TILE_QUERIES = (4, 32)  # the kernels attend_two_sided_*: encoders compute whole texts

_HEADS_PER_BLOCK = 4  # kernels/heads.cu


class Norm(NamedTuple):
    """The weights of a norm over a row."""

    weight: int  # (width)
    bias: int  # (width), or 0
    eps: float
    is_rms: bool  # otherwise layer_norm


class Packed(NamedTuple):
    """Where rows are packed, right after they are computed, as inputs of products (launches.py)."""

    form: Form  # not of floats
    inputs: int  # (rows) of input_row_bytes


class Rows(NamedTuple):
    """The rows of a pass."""

    n: int
    positions: int  # (n) int32
    table_of: int  # (n) int32: the page table that a row reads, and the first one that it is stored into
    last_table_of: int  # (n) int32: the last one that it is stored into; another than table_of for drafts only
    ends: int  # (n) int32: the end of the positions that it sees in layers without a window


class HeadShape(NamedTuple):
    """The heads of a layer."""

    n: int
    n_kv: int
    dim: int
    value_dim: int  # of a value: equal to dim, except in latent attention


class Latents(NamedTuple):
    """The parts of a row's heads of q in latent attention. Keys end with v."""

    start: int  # (rows, heads, stride): a head begins with the first dim - value_dim numbers
    stride: int
    end: int  # (rows, heads, value_dim): the others


class Cache(NamedTuple):
    """A layer's keys and values in the pages of a pass's sequences. The layer's, or those of the layer it reads."""

    dtype: str  # "f32", "f16" or "q8"
    tables: int  # (tables, max_pages) uint64: addresses of pages
    max_pages: int
    offset: int  # of the layer in a page, in bytes
    head_bytes: int  # of the keys and values of a KV head
    value_offset: int  # of a head's values in them


class HeadNorm(IntEnum):
    """How heads are normed: enum head_norm of kernels/heads.cu."""

    NONE = 0
    RMS = 1
    LAYER = 2


class HeadNorms(NamedTuple):
    """The norms of q, k and v of a layer."""

    kind: HeadNorm
    per_head: bool  # whether each head has its own weights
    after_rope: bool
    eps: float
    q_weight: int  # (dim), or with per_head (heads, dim)
    k_weight: int
    v_eps: float = 0.0  # of the norm of v, which has no weights
    v_factor: float = 0.0  # 0: v is not normed


NO_HEAD_NORMS = HeadNorms(HeadNorm.NONE, per_head=False, after_rope=False, eps=0.0, q_weight=0, k_weight=0)


class Run(NamedTuple):
    """Rows of a pass that belong to one sequence, at consecutive positions."""

    first_row: int
    rows: int
    position: int  # of the first row, or a later one: the division is valid for all up to it


class AttentionKind(NamedTuple):
    """The properties of a layer that determine how its attention is divided."""

    heads: HeadShape
    window: int  # as in AttentionInputs
    two_sided: bool  # whether rows see up to an end of their own (Rows.ends), and scores can have biases


class Tiles(NamedTuple):
    """How attention is divided among blocks of threads: for layers of one kind."""

    entries: NDArray[np.int32]  # (tiles, 4): first row, first query, queries, 0; for the device
    queries: int  # of a tile at most: one of the kind's widths
    blocks: int  # of positions that a tile sees, at most; 0: a block of threads computes all of them


class AttentionInputs(NamedTuple):
    """What a layer's attention reads besides the cache."""

    q: int  # (rows, heads, dim), after norms and RoPE
    scale: float  # multiplies q
    scales: int  # (rows) floats that query_scales computed, in place of `scale`; or 0
    # positions that a row sees, itself included; a row of an encoder sees as many on the other side, too; 0: all;
    # negative: those of its chunk, up to itself
    window: int
    soft_cap: float  # 0: none
    biases: int = 0  # (heads, 2 bias_distance + 1), or 0: added to the scores, by the distance from a row to a position
    bias_distance: int = 0


# ---- rows


def norm(
    driver: Driver,
    rows: int,
    width: int,
    weights: Norm,
    x: int,
    y: int,
    indices: int = 0,
    packed: Sequence[Packed] = (),
    parts: int = 1,
    strides: tuple[int, int] = (0, 0),
) -> None:
    """NORM: y = norm(x). indices: (rows) int32, the row of x that each row of y comes from; 0: the same row.

    A row has `parts` parts of `width` numbers, each of which is normed with weights of its own. Parts are not packed.
    strides: The distances between the rows of x and of y; 0: rows are contiguous. packed: In up to two forms.
    """
    add_and_norm(driver, rows, width, x, 0, 1.0, None, 0, weights, y, indices, packed, parts, strides)


def add(
    driver: Driver, rows: int, width: int, x: int, branch: int, scale: float, branch_norm: Norm | None, total: int
) -> None:
    """ADD: total = x + scale * norm(branch), or x + scale * branch without a norm. `total` may be x."""
    add_and_norm(driver, rows, width, x, branch, scale, branch_norm, total, None, 0)


def add_and_norm(
    driver: Driver,
    rows: int,
    width: int,
    x: int,
    branch: int,
    scale: float,
    branch_norm: Norm | None,
    total: int,
    weights: Norm | None,
    y: int,
    indices: int = 0,
    packed: Sequence[Packed] = (),
    parts: int = 1,
    strides: tuple[int, int] = (0, 0),
) -> None:
    """ADD and then NORM of the total, in one launch. The norms of a model have the same eps and kind."""
    kind = weights or branch_norm or Norm(0, 0, 0.0, True)
    branch_weight, branch_bias = (branch_norm.weight, branch_norm.bias) if branch_norm else (0, 0)
    weight, bias = (weights.weight, weights.bias) if weights else (0, 0)
    of_x, of_y = strides
    values = (
        *arguments("pippppf", x, of_x or parts * width, indices, branch, branch_weight, branch_bias, scale),
        *arguments("pppfiipi", total, weight, bias, kind.eps, kind.is_rms, width, y, of_y or parts * width),
        *(each for i in range(2) for each in _packed(packed[i] if i < len(packed) else None)),
    )
    driver.launch("norm_rows", (rows, parts, 1), 512, values, shared=16 + 4 * width)


def activate(
    driver: Driver,
    rows: int,
    width: int,
    activation: int,
    gate: int,
    up: int,
    *,
    limit: float = float("inf"),
    up_offset: float = 0.0,
    is_clamped: bool = False,
    stride: int = 0,
    output: int = 0,
    alphas: tuple[int, int] = (0, 0),
    row_weights: int = 0,
    packed: Packed | None = None,
) -> None:
    """ACTIVATE: output (rows, width) = activation(gate) * up; gate 0: output = activation(up).

    `output` is up unless it is given; then rows of up are `stride` numbers apart. alphas: the learned numbers of xIELU.
    row_weights: (rows), or 0; multiply gate and up.
    """
    values = (
        *arguments("ppipii", gate, up, stride if output else width, output or up, width, activation),
        *arguments("pppiff", *alphas, row_weights, is_clamped, limit, up_offset),
        *_packed(packed),
    )
    grid = ceil_div(ceil_div(width, 128), 4), rows, 1
    driver.launch("activate", grid, 128, values)


def scale(driver: Driver, n: int, y: int, factor: float, cap: float) -> None:
    """SCALE of n numbers, of any rows: y = factor * y; then y = cap * tanh(y / cap), unless cap is 0."""
    driver.launch("scale_numbers", (ceil_div(n, 256), 1, 1), 256, arguments("piff", y, n, factor, cap))


def gate(driver: Driver, n: int, y: int, gates: int, group: int) -> None:
    """GATE of n numbers, of any rows: y /= 1 + exp(-gates), where `group` neighbors share a gate."""
    driver.launch("gate_numbers", (ceil_div(n, 256), 1, 1), 256, arguments("ppii", y, gates, n, group))


def rope_angles(driver: Driver, rows: Rows, inv_freq: int, half: int, factor: float, angles: int) -> None:
    """ROPE: angles (rows, 2 * half), the cosines and then the sines of each row. inv_freq: (half)."""
    values = arguments("ppifp", rows.positions, inv_freq, half, factor, angles)
    driver.launch("rope_angles", (ceil_div(half, 64), rows.n, 1), 64, values)


def query_scales(
    driver: Driver, rows: Rows, factor: float, beta: float, context: int, offset: int, scales: int
) -> None:
    """The scales (rows) of the queries of layers with a query_beta, for AttentionInputs."""
    values = arguments("piffiip", rows.positions, rows.n, factor, beta, context, offset, scales)
    driver.launch("query_scales", (ceil_div(rows.n, 64), 1, 1), 64, values)


# ---- heads and the cache


def heads(
    driver: Driver,
    rows: Rows,
    shape: HeadShape,
    norms: HeadNorms,
    q: int,
    k: int,
    v: int,
    angles: int,
    rope_dim: int,
    cache: Cache,
    *,
    is_source: bool = True,
    v_is_k: bool = False,
    latents: Latents | None = None,
) -> None:
    """HEADS: norms and rotates q and k in place and stores k and v. is_source False: only q. v_is_k: v becomes k.

    latents: what q becomes first, and the end of k becomes v.
    """
    n_kv = shape.n_kv if is_source else 0
    values = (
        *arguments("ppip", q, *(latents or (0, 0, 0))),
        *arguments("pppipp", k, v, angles, rope_dim // 2, norms.q_weight, norms.k_weight),
        *arguments("iiififf", norms.kind, norms.per_head, norms.after_rope, norms.eps, v_is_k, *norms[-2:]),
        *arguments("iiii", shape.n, n_kv, shape.dim, shape.value_dim),
        *arguments("ppp", rows.positions, rows.table_of, rows.last_table_of),
        *_cache(cache),
    )
    grid = ceil_div(shape.n + n_kv, _HEADS_PER_BLOCK), rows.n, 1
    shared = 4 * 3 * _HEADS_PER_BLOCK * shape.dim  # a head, its value and its angles per warp
    driver.launch(f"heads_{cache.dtype}", grid, 128, values, shared)


def read_cache(driver: Driver, rows: Rows, shape: HeadShape, cache: Cache, keys: int, values: int, width: int) -> None:
    """OBSERVE of cache_k and cache_v: keys and values (rows, width) as they are in the cache, then zeros."""
    rows_and_heads = width, *shape[1:], rows.positions, rows.table_of
    read = *arguments("ppiiiipp", keys, values, *rows_and_heads), *_cache(cache)
    driver.launch(f"read_cache_{cache.dtype}", (ceil_div(width, 128), rows.n, 1), 128, read)


# ---- attention


def attention_tiles(
    runs: Sequence[Run], kind: AttentionKind, cache_dtype: str, device: Properties, partial_bytes: int
) -> Tiles:
    """Divide the attention of a pass.

    The result does not depend on the division. The queries of a tile share one read of the keys and values; tiles are
    as large as they can be while there is work for all multiprocessors. Where tiles are few, or are whole runs, which
    can differ much in length, each block of positions is computed by itself, and blocks are merged afterwards.

    Args:
        runs: All rows of the pass, in their order. If rows see later positions, a run's sequence has none after the
            run's last one.
        kind: The layers' kind.
        cache_dtype: Of the cache.
        device: The device.
        partial_bytes: The most that the partial results may take.
    """
    import numpy as np

    shape = kind.heads
    group = shape.n // shape.n_kv
    most = max((run.rows * group for run in runs), default=1)
    widths = TWO_SIDED_TILE_QUERIES if kind.two_sided else TILE_QUERIES
    sizes = [n for n in widths if _attend_shared(cache_dtype, shape, n) <= device.shared_bytes]
    least, largest = (next((size for size in sizes if size >= n), sizes[-1]) for n in (group, most))
    for queries in (size for size in reversed(sizes) if least <= size <= largest):
        tiles = [tile for run in runs for tile in _tiles_of(run, group, queries)]
        entries = np.array(tiles[::-1], np.int32).reshape(-1, 4)  # the longest first
        divided = Tiles(entries, queries, max((_most_blocks(runs, tile, kind) for tile in tiles), default=1))
        can_split = divided.blocks > 1 and partial_size(divided, shape) <= partial_bytes
        if len(tiles) * shape.n_kv * (divided.blocks if can_split else 1) >= 2 * device.multiprocessors:
            break
    is_split = len(tiles) == len(runs) or len(tiles) * shape.n_kv < 2 * device.multiprocessors
    return divided if can_split and is_split else divided._replace(blocks=0)


def _tiles_of(run: Run, group: int, queries: int) -> list[tuple[int, int, int, int]]:
    total = run.rows * group
    count = ceil_div(total, queries)
    starts = [total * i // count for i in range(count + 1)]
    return [(run.first_row, start, end - start, 0) for start, end in itertools.pairwise(starts)]


def _most_blocks(runs: Sequence[Run], tile: tuple[int, int, int, int], kind: AttentionKind) -> int:
    """The most blocks that a tile sees while its run starts at most at the run's position."""
    run, group = next(run for run in runs if run.first_row == tile[0]), kind.heads.n // kind.heads.n_kv
    first, last = tile[1] // group, (tile[1] + tile[2] - 1) // group
    blocks = (run.position + (run.rows - 1 if kind.two_sided else last)) // ATTENTION_BLOCK + 1
    if not kind.window:
        return blocks
    # positions, which can begin anywhere in a block
    seen = abs(kind.window) + last - first + (kind.window - 1 if kind.two_sided else 0)
    return min(blocks, (seen + ATTENTION_BLOCK - 2) // ATTENTION_BLOCK + 1)


def partial_size(tiles: Tiles, shape: HeadShape) -> int:
    """Bytes of the partial results of attention: partial_floats of csrc/kv_layout.h for each query and block."""
    floats = 16 + ceil_div(shape.value_dim, 16) * 16
    return 4 * len(tiles.entries) * shape.n_kv * tiles.blocks * tiles.queries * floats


def attend(
    driver: Driver,
    rows: Rows,
    kind: AttentionKind,
    inputs: AttentionInputs,
    cache: Cache,
    tiles: Tiles,
    entries: int,
    sinks: int,
    mix: int,
    partials: int,
    packed: Packed | None = None,
) -> None:
    """ATTEND: mix (rows, heads, value_dim) = softmax(q K) V.

    Args:
        driver: The device.
        rows: The pass's rows.
        kind: The layer's kind.
        inputs: The queries and what they see.
        cache: Keys and values.
        tiles: The division of the pass, for layers of the kind.
        entries: `tiles.entries` in the device's memory.
        sinks: (heads), or 0.
        mix: Receives the result.
        partials: partial_size(tiles, kind.heads) bytes, unless tiles.blocks is 0.
        packed: Where the result is packed, too, if values have a multiple of 128 dimensions.
    """
    shape, count = kind.heads, len(tiles.entries)
    results = *arguments("pppp", entries, sinks, mix, partials if tiles.blocks else 0), *_packed(packed)
    shared = _attend_shared(cache.dtype, shape, tiles.queries)
    grid = max(tiles.blocks, 1), shape.n_kv, count
    driver.launch(
        f"attend_{'two_sided_' if kind.two_sided else ''}{cache.dtype}_x{tiles.queries}",
        grid,
        128,
        (*_attention(rows, shape, inputs, cache), *results),
        shared=shared,
    )
    if tiles.blocks:
        attend_merge(driver, rows, shape, inputs.window, tiles, entries, sinks, mix, partials, packed)


def attend_merge(
    driver: Driver,
    rows: Rows,
    shape: HeadShape,
    window: int,
    tiles: Tiles,
    entries: int,
    sinks: int,
    mix: int,
    partials: int,
    packed: Packed | None = None,
) -> None:
    """The second launch of `attend`, if each block of positions is computed by itself."""
    values = (
        *arguments("piippp", partials, tiles.blocks, tiles.queries, entries, rows.positions, rows.ends),
        *arguments("ipiiip", window, sinks, shape.n, shape.n_kv, shape.value_dim, mix),
        *_packed(packed),
    )
    driver.launch("attend_merge", (len(tiles.entries), shape.n_kv, tiles.queries), 128, values)


def observe_scores(
    driver: Driver,
    rows: Rows,
    shape: HeadShape,
    inputs: AttentionInputs,
    cache: Cache,
    observed_heads: int,
    context: int,
    scores: int,
) -> None:
    """OBSERVE of the scores: (rows, observed_heads, context), -inf at positions that a query does not see."""
    values = *_attention(rows, shape, inputs, cache), *arguments("iip", observed_heads, context, scores)
    grid = ceil_div(context, ATTENTION_BLOCK), observed_heads, rows.n
    shared = _attend_shared(cache.dtype, shape, 1)
    driver.launch(f"observe_scores_{cache.dtype}", grid, 128, values, shared=shared)


def _attention(rows: Rows, shape: HeadShape, inputs: AttentionInputs, cache: Cache) -> tuple[Argument, ...]:
    return (
        *arguments("pfpppp", inputs.q, inputs.scale, inputs.scales, rows.positions, rows.table_of, rows.ends),
        *_cache(cache),
        *arguments("iiiiifpi", *shape, *inputs[3:]),
    )


def _attend_shared(dtype: str, shape: HeadShape, queries: int) -> int:
    """Bytes of shared memory: Memory of kernels/attention.cuh and the running values of attend.cuh."""
    stride = queries if queries < 8 else queries + 4
    words = _part(ATTENTION_BLOCK * stride)
    if dtype == "q8":
        groups = ceil_div(shape.dim, 32)
        words += 2 * _part(groups * 8 * queries) + _part(ceil_div(groups, 4) * queries)
        words += _part(4 * 16 * queries) + 2 * _part(4 * queries)
    else:
        words += _part(shape.dim * queries)
    return 4 * (words + 4 * _part(queries) + 5 * queries + queries * ceil_div(shape.value_dim, 16) * 16)


def _part(words: int) -> int:
    return ceil_div(words, 4) * 4


# ---- experts


class Router(NamedTuple):
    """How experts and their weights follow from a router's logits: as the ROUTE step says."""

    n_experts: int
    n_used: int
    normalized: bool
    is_sigmoid: bool = False
    n_groups: int = 0
    n_groups_used: int = 0
    eps: float = 0.0
    scale: float = 1.0
    choice_bias: int = 0  # (n_experts), or 0
    factors: int = 0  # (n_experts), or 0


def choose_experts(
    driver: Driver,
    rows: int,
    router: Router,
    logits: int,
    experts: int,
    weights: int,
    *,
    shared_gate: int = 0,
    shared_weights: int = 0,
) -> None:
    """ROUTE, first part: experts and weights (rows, n_used); with a shared gate also shared_weights (rows)."""
    groups = router.is_sigmoid, router.n_groups, router.n_groups_used, router.normalized
    values = (
        *arguments("piiiiiiff", logits, router.n_experts, router.n_used, *groups, router.eps, router.scale),
        *arguments("pppppp", router.choice_bias, router.factors, shared_gate, experts, weights, shared_weights),
    )
    driver.launch("choose_experts", (rows, 1, 1), 256, values, shared=12 * router.n_experts + 8 * router.n_groups)


def sort_pairs_scratch(rows: int, n_experts: int) -> int:
    """Bytes of the scratch memory of sort_pairs."""
    return 4 * n_experts * ceil_div(rows, 32)


def sort_pairs(
    driver: Driver,
    rows: int,
    n_experts: int,
    n_used: int,
    experts: int,
    weights: int,
    scratch: int,
    starts: int,
    pair_rows: int,
    pair_of: int,
    pair_weights: int,
) -> None:
    """ROUTE, second part: the order of the pairs of experts and rows.

    Args:
        driver: The device.
        rows: Rows of the pass.
        n_experts: Experts of the layer.
        n_used: Experts of a row.
        experts: (rows, n_used) int32, as choose_experts wrote them.
        weights: (rows, n_used), likewise.
        scratch: sort_pairs_scratch bytes.
        starts: (n_experts + 1) int32, receives the first pair of each expert, then the number of pairs.
        pair_rows: (rows * n_used) int32, receives the row of each pair.
        pair_of: (rows, n_used) int32, receives the pair of each of a row's experts.
        pair_weights: (rows * n_used), receives the weight of each pair.
    """
    values = (
        *arguments("piiip", experts, rows, n_experts, n_used, weights),
        *arguments("ppppp", scratch, starts, pair_rows, pair_of, pair_weights),
    )
    driver.launch("sort_pairs", (1, 1, 1), 1024, values)


class ExpertAdapters(NamedTuple):
    """What adapters of down matrices add to the outputs of experts."""

    added: int  # (pairs, width)
    experts: int  # (rows, n_used) int32, of each row
    is_adapted: int  # (n_experts) int32: whether `added` has the pairs of an expert


NO_EXPERT_ADAPTERS = ExpertAdapters(0, 0, 0)


def combine_experts(
    driver: Driver,
    rows: int,
    n_used: int,
    width: int,
    outputs: int,
    pair_of: int,
    weights: int,
    y: int,
    *,
    accumulate: bool,
    adapters: ExpertAdapters = NO_EXPERT_ADAPTERS,
) -> None:
    """COMBINE: y (rows, width) = its old value or 0, plus the weighted outputs (pairs, width) of a row's experts.

    weights: (rows, n_used); 0: all are 1.
    """
    values = arguments("ppppppiiip", outputs, *adapters, pair_of, weights, n_used, width, accumulate, y)
    driver.launch("combine_experts", (ceil_div(width, 256), rows, 1), 256, values)


# ---- arguments


def _cache(cache: Cache) -> tuple[Argument, ...]:
    return arguments("piiii", cache.tables, cache.max_pages, cache.offset, cache.head_bytes, cache.value_offset)


def _packed(packed: Packed | None) -> tuple[Argument, ...]:
    return arguments("ip", packed.form, packed.inputs) if packed else arguments("ip", 0, 0)
