"""Launches of the kernels that pack inputs, multiply and embed: which kernel, with which grid.

Addresses are integers in the device's memory; 0 is none. Rows of floats lie side by side. csrc's struct gemm
(csrc/kernels.h) specifies what products compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from llamac import _core
from llamac.format.strips import CODEBOOKS
from llamac.gpu.driver import arguments, ceil_div

if TYPE_CHECKING:
    from llamac.gpu.driver import Argument, Driver
    from llamac.gpu.layer_launches import Norm

FEW_ROWS, MANY_ROWS = 8, 64  # rows of a tile: kernels/products_few.cuh and the others
MANY_STRIPS = (8, 4, 2)  # strips that a block of threads can compute for many rows; of floats always the first number
FEW_FLOAT_STRIPS = 2  # the same for few rows of floats
FEW_COLUMNS = 96  # of a stage, for few rows of floats: kernels/products_float.cu
RING_BYTES, WIDE_RING_BYTES = 4736, 6784  # of a warp's ring of blocks, and of wide ones: kernels/products_few.cuh
WARP_TERMS = 2048  # floats for the terms of each warp: kernels/products_few.cuh
BLOCK_COLUMNS = 128  # that packed inputs hold together: kernels/inputs.cuh
MOST_PARTS = 3  # of a launch: kernels/epilogue.cuh
_WARP = 32
_STRIP_PADDING = 64  # bytes after a strip of floats in shared memory: few_stage of kernels/products_float.cu
STRIP_ROWS = 16
# Pairs of dtypes that products of one row can mix in a launch: the kernels of kernels/products_mixed.cu.
MIXED = (("q4", "q8"), ("q4_k", "q6_k"))
_WIDE_BLOCKS = frozenset({"q4_k", "q5_k", "q6_k", "iq4_xs"})  # dtypes whose blocks have 256 columns
_NAMES = {number: name for name, number in _core.dtypes()}


class Form(IntEnum):
    """What inputs of products are packed to: enum input_form of kernels/inputs.cuh."""

    F32 = 0
    INT8 = 1
    INT16 = 2
    FAST = 3  # with int16 inputs and fast numerics
    BF16 = 4  # floats, rounded to bf16

    @property
    def is_float(self) -> bool:
        """Whether products read rows of floats, side by side."""
        return self in (Form.F32, Form.BF16)


class Matrix(NamedTuple):
    """A matrix in strips, in the device's memory."""

    address: int
    dtype: int
    rows: int
    columns: int
    scales: int = 0  # of the outputs: (rows) floats


class Part(NamedTuple):
    """One of the matrices that a launch multiplies with the same inputs, and where its outputs go."""

    matrix: Matrix
    y: int  # (m, rows) receives the outputs
    bias: int = 0  # (rows)
    experts: int = 0  # in place of the matrix's address, scales and bias: Experts.table


class Inputs(NamedTuple):
    """Addresses of what a launch multiplies with matrices."""

    packed: int
    tiles: int = 0  # what `tile_pairs` wrote; 0: tiles are adjacent rows
    row_of: int = 0  # the row of inputs of each row of outputs; 0: the same one


class Epilogue(NamedTuple):
    """What happens to the outputs of a product after the bias, in the order of the fields that are addresses."""

    copy: int = 0  # (m, rows) receives the outputs before row_weights; only with one part
    row_weights: int = 0  # (m) multiply the outputs
    accumulate: bool = False  # add to y
    accumulate_copy: bool = False  # add to the copy


NO_EPILOGUE = Epilogue()


class Embedding(NamedTuple):
    """A matrix of embeddings, and its adapter if it has one: f32 in strips, a (columns, rank) and b (rows, rank)."""

    matrix: Matrix
    a: int = 0
    b: int = 0
    rank: int = 0


class Experts(NamedTuple):
    """Matrices of the experts or the heads of a layer, or of clusters of tokens, of the same shape and dtype."""

    table: int  # (experts, 3) uint64: the address of each matrix, or 0 to leave the expert out; its scales; its bias
    dtype: int
    rows: int
    columns: int


def form_of(dtype: int, *, fast: bool) -> Form:
    """What products with a dtype multiply, with fast or exact numerics."""
    name = _NAMES[dtype]
    if name in ("f32", "f16", "bf16"):
        return Form.BF16 if fast and name == "bf16" else Form.F32
    if name in CODEBOOKS:
        return Form.INT8
    return Form.FAST if fast else Form.INT16


def input_row_bytes(form: Form, columns: int) -> int:
    """The bytes of a row of inputs: input_layout_of of kernels/inputs.cuh."""
    if form.is_float:
        return 4 * columns
    blocks = ceil_div(columns, BLOCK_COLUMNS)
    codes = 256 if form is Form.INT16 else 128
    floats = {Form.INT8: 4 + 4, Form.INT16: 4 + 1, Form.FAST: 4 + 4 + 1}[form]
    return ceil_div(blocks * (codes + 4 * floats), 64) * 64


def pack(
    driver: Driver, form: Form, x: int, rows: int, columns: int, inputs: int, heads: int = 1, stride: int = 0
) -> None:
    """Pack rows of x (rows, columns) as inputs, of `input_row_bytes` each.

    heads: the number of rows of inputs that each row has, for `head_products`. stride: the distance of two rows in x;
    0: side by side. Form.F32 is a copy, which products need only of rows that do not lie side by side.
    """
    warps = 4
    grid = ceil_div(ceil_div(columns, BLOCK_COLUMNS), warps), rows, heads
    values = arguments("piip", x, stride or columns, columns, inputs)
    driver.launch(f"pack_{form.name.lower()}", grid, warps * _WARP, values)


def round_and_pack(driver: Driver, form: Form, x: int, rows: int, columns: int, inputs: int) -> None:
    """The same for rows that are rounded to 8 bits first, in any form."""
    driver.launch(f"round_and_pack_{form.name.lower()}", (rows, 1, 1), 256, arguments("pip", x, columns, inputs))


def products(
    driver: Driver, parts: Sequence[Part], inputs: int, m: int, form: Form, epilogue: Epilogue = NO_EPILOGUE
) -> None:
    """Multiply m rows of inputs, packed in the matrices' form (form_of), with up to MOST_PARTS matrices."""
    _products(driver, parts, inputs, m, form, epilogue, 1)


def can_mix(first: int, second: int, *, fast: bool) -> bool:
    """Whether products of one row with matrices of two dtypes can be one launch."""
    return not fast and (_NAMES[first], _NAMES[second]) in MIXED


def mixed_products(driver: Driver, parts: Sequence[Part], inputs: tuple[int, int]) -> None:
    """Multiply a row with up to MOST_PARTS matrices of two dtypes (can_mix), those of the first dtype first.

    inputs: The row, packed in the form of the first dtype, and of the second.
    """
    shapes = parts[0].matrix, parts[-1].matrix
    names = [_NAMES[shape.dtype] for shape in shapes]
    first = sum(part.matrix.dtype == shapes[0].dtype for part in parts)
    values = *_product_arguments(parts, 1, Inputs(inputs[0]), NO_EPILOGUE), *arguments("pi", inputs[1], first)
    blocks = _blocks(parts, 1)
    warps, shared = _few_warps(driver, blocks, shapes, 1, _held(names[0], "one"))
    driver.launch(f"product_{names[0]}_{names[1]}_one", (1, blocks, 1), _WARP * warps, values, shared)


def head_products(driver: Driver, matrices: Experts, heads: int, inputs: int, m: int, form: Form, y: int) -> None:
    """HEAD_PRODUCT: multiply the inputs of each row's heads (m, heads) with the heads' own matrices.

    y: (m, heads, rows) receives the outputs.

    Budget for one row and the 128 heads of DeepSeek V3, 512 x 128 each, in q8: about 9 MB, 3 us of an H100's memory.
    But a block of threads has one block of columns, so one of its four warps works: about 10 us.
    """
    shape = Matrix(0, matrices.dtype, matrices.rows, matrices.columns)
    _products(driver, [Part(shape, y, experts=matrices.table)], inputs, m, form, NO_EPILOGUE, heads)


def _products(
    driver: Driver, parts: Sequence[Part], inputs: int, m: int, form: Form, epilogue: Epilogue, heads: int
) -> None:
    many = _rows_are_many(driver, heads * _blocks(parts, 1), heads * _blocks(parts, MANY_STRIPS[0]), m, form)
    tiles = ceil_div(m, MANY_ROWS if many else FEW_ROWS)
    _launch_products(driver, parts, form, many, tiles, heads, m, Inputs(inputs), epilogue)


def _rows_are_many(driver: Driver, few_blocks: int, many_blocks: int, m: int, form: Form) -> bool:
    """Whether the kernels for many rows are faster: weights are decoded once for 64 rows, but fewer warps work.

    With quantized weights, the time of the kernels for few rows grows with their blocks; those for many rows need about
    as long for one block per multiprocessor as for a few. Looking up codes slows the kernels for few rows. Microseconds
    on an H200 (132 multiprocessors), few and many: 4096 x 4096 in q8, 16 blocks per multiprocessor: 44, 57; 28672 x
    4096, 27 blocks: 79, 50. In q4, 4096 x 4096, 8 blocks: 32, 36; 6144 x 4096, 12 blocks: 48, 37.

    few_blocks, many_blocks: along the outputs, of a strip and of MANY_STRIPS[0] strips.
    """
    multiprocessors = driver.properties.multiprocessors
    if m <= FEW_ROWS:
        return False
    if not form.is_float:
        enough = 9 if form is Form.INT8 else 20  # blocks for few rows, per multiprocessor
        return few_blocks * ceil_div(m, FEW_ROWS) >= enough * multiprocessors
    blocks = many_blocks * ceil_div(m, MANY_ROWS)
    return blocks >= (multiprocessors // 4 if m > 4 * FEW_ROWS else 2 * multiprocessors)


def _many_strips(driver: Driver, parts: Sequence[Part], tiles: int) -> int:
    """The strips of a block for many rows of quantized weights: as many as leave nearly all multiprocessors work."""
    enough = 9 * driver.properties.multiprocessors
    return next((n for n in MANY_STRIPS if 10 * tiles * _blocks(parts, n) >= enough), MANY_STRIPS[-1])


def _pairs_are_many(experts: int, pairs: int) -> bool:
    return pairs > 4 * FEW_ROWS * experts


def most_tiles(experts: int, pairs: int) -> int:
    """The most tiles that `tile_pairs` can need; at most as many as pairs."""
    return min(pairs, experts + pairs // (MANY_ROWS if _pairs_are_many(experts, pairs) else FEW_ROWS))


def tile_pairs(driver: Driver, starts: int, experts: int, pairs: int, tiles: int) -> None:
    """Divide the pairs of experts and rows into tiles (most_tiles, 3) int32: each an expert, its first pair, a number.

    starts: (experts + 1) int32, the first pair of each expert. Tiles that are not needed get 0 pairs.
    """
    most = MANY_ROWS if _pairs_are_many(experts, pairs) else FEW_ROWS
    values = arguments("piiip", starts, experts, most, most_tiles(experts, pairs), tiles)
    driver.launch("tile_pairs", (1, 1, 1), 256, values)


def expert_products(
    driver: Driver,
    parts: Sequence[tuple[Experts, int]],
    inputs: int,
    pair_rows: int,
    n: int,
    pairs: int,
    tiles: int,
    form: Form,
    *,
    accumulate: bool = False,
) -> None:
    """Multiply each pair's row of inputs with its expert's matrices, for all experts of a layer at once.

    Args:
        driver: The device.
        parts: Up to MOST_PARTS times the matrices, and the address of (pairs, rows) that receives their outputs.
        inputs: Packed rows.
        pair_rows: (pairs) int32, the row of inputs of each pair; 0: each pair has its own.
        n: The number of experts.
        pairs: The number of pairs.
        tiles: What `tile_pairs` wrote.
        form: The inputs' form.
        accumulate: Add to the outputs' memory.
    """
    found = [Part(Matrix(0, e.dtype, e.rows, e.columns), y, experts=e.table) for e, y in parts]
    many, most = _pairs_are_many(n, pairs), most_tiles(n, pairs)
    sums = Epilogue(accumulate=accumulate)
    _launch_products(driver, found, form, many, most, 1, pairs, Inputs(inputs, tiles, pair_rows), sums)


def tile_products(
    driver: Driver, matrices: Experts, inputs: int, pair_rows: int, pairs: int, tiles: int, form: Form, y: int
) -> None:
    """Multiply pairs of rows and matrices, each of which is a tile of its own (`tile_pairs`). y: (pairs, rows)."""
    part = Part(Matrix(0, matrices.dtype, matrices.rows, matrices.columns), y, experts=matrices.table)
    _launch_products(driver, [part], form, False, pairs, 1, pairs, Inputs(inputs, tiles, pair_rows), NO_EPILOGUE)


def _blocks(parts: Sequence[Part], strips: int) -> int:
    """The blocks of threads along the outputs, each for `strips` strips of a matrix."""
    return sum(ceil_div(part.matrix.rows, strips * STRIP_ROWS) for part in parts)


def _launch_products(
    driver: Driver,
    parts: Sequence[Part],
    form: Form,
    many: bool,
    tiles: int,
    heads: int,
    m: int,
    inputs: Inputs,
    epilogue: Epilogue,
) -> None:
    """tiles: of rows, the number of blocks of threads along them."""
    shape = parts[0].matrix
    values = _product_arguments(parts, m, inputs, epilogue)
    rows = "many" if many else "one" if m == 1 and not inputs.tiles and not form.is_float else "few"
    name = f"product_{_NAMES[shape.dtype]}_{rows}{'_fast' if form is Form.FAST else ''}"
    if many:
        strips = MANY_STRIPS[0] if form.is_float else _many_strips(driver, parts, tiles * heads)
        driver.launch(name, (tiles, _blocks(parts, strips), heads), _WARP * strips, values)
    elif form.is_float:
        shared = _few_float_shared(_NAMES[shape.dtype])
        driver.launch(name, (tiles, _blocks(parts, FEW_FLOAT_STRIPS), heads), 128, values, shared)
    else:
        blocks = _blocks(parts, 1)
        warps, shared = _few_warps(driver, tiles * blocks * heads, [shape], m, _held(_NAMES[shape.dtype], rows))
        driver.launch(name, (tiles, blocks, heads), _WARP * warps, values, shared)


def _product_arguments(parts: Sequence[Part], m: int, inputs: Inputs, epilogue: Epilogue) -> tuple[Argument, ...]:
    """PRODUCT_PARAMETERS of kernels/epilogue.cuh."""
    table: list[int] = []
    for w, y, bias, experts in parts:
        table += w.address, w.scales, bias, experts, y, w.rows
    table += [0] * (6 * (MOST_PARTS - len(parts)))
    sizes = m, parts[0].matrix.columns
    sums = epilogue.accumulate + 2 * epilogue.accumulate_copy, epilogue.copy, epilogue.row_weights
    x = inputs.tiles, inputs.packed, inputs.row_of
    return arguments("pppppi" * MOST_PARTS + "pppiiipp", *table, *x, *sizes, *sums)


def _held(dtype: str, rows: str) -> int:
    """The warps of products of few rows that a multiprocessor holds: as the kernels' launch bounds say."""
    return 32 if rows == "one" and dtype not in _WIDE_BLOCKS else 16


def _few_float_shared(dtype: str) -> int:
    """The shared memory of a block for few rows of floats: some stages (few_stage of kernels/products_float.cu)."""
    stages, weight = (4, 4) if dtype == "f32" else (6, 2)
    strips = FEW_FLOAT_STRIPS * (FEW_COLUMNS * STRIP_ROWS * weight + _STRIP_PADDING)
    return stages * (strips + FEW_ROWS * FEW_COLUMNS * 4)


def _few_warps(driver: Driver, blocks: int, shapes: Sequence[Matrix], m: int, held: int) -> tuple[int, int]:
    """The warps of a block for few rows of quantized weights, which divide the columns, and its shared memory.

    As many warps as a multiprocessor holds (`held`), so that all run at once. shapes: of the matrices of each dtype.
    """
    warps, most = 4, min(16, ceil_div(shapes[0].columns, BLOCK_COLUMNS))
    shared = max(_few_shared(warps, shape, m) for shape in shapes)
    while warps < most and 2 * warps * ceil_div(blocks, driver.properties.multiprocessors) <= held:
        larger = max(_few_shared(2 * warps, shape, m) for shape in shapes)
        if larger > driver.properties.shared_bytes:
            break
        warps, shared = 2 * warps, larger
    return warps, shared


def _few_shared(warps: int, shape: Matrix, m: int) -> int:
    """The shared memory of a block of `warps` warps (kernels/products_few.cuh).

    Each warp has a ring of blocks. All have the terms of as many columns as have room, and 1/16 of that for scales.
    """
    name = _NAMES[shape.dtype]
    is_wide, terms = name in _WIDE_BLOCKS, 4 if name in CODEBOOKS else 1
    blocks = ceil_div(ceil_div(shape.columns, BLOCK_COLUMNS << is_wide), warps) * warps << is_wide
    stride = 1 << (min(m, FEW_ROWS) - 1).bit_length()
    floats = min(WARP_TERMS * warps, blocks * terms * STRIP_ROWS * stride)
    return warps * (WIDE_RING_BYTES if is_wide else RING_BYTES) + 4 * (floats + floats // STRIP_ROWS)


def embed(
    driver: Driver,
    tokens: Embedding,
    types: Embedding | None,
    positions: Embedding | None,
    rows: int,
    ids: int,
    kinds: int,
    places: int,
    scale: float,
    x: int,
) -> None:
    """Write the embeddings of rows to x (rows, columns).

    Args:
        driver: The device.
        tokens: The tokens' embeddings.
        types: The embeddings of token types, or None.
        positions: Those of learned positions, or None.
        rows: The number of rows.
        ids: (rows) int32, the rows' tokens.
        kinds: (rows) int32, the rows' token types.
        places: (rows) int32, the rows' positions.
        scale: Multiplies the tokens' embeddings.
        x: Receives the embeddings.
    """
    columns = tokens.matrix.columns
    none = Embedding(Matrix(0, tokens.matrix.dtype, 0, columns))
    tables = [
        value
        for e in (tokens, types or none, positions or none)
        for value in (e.matrix.address, e.matrix.dtype, e.a, e.b, e.rank)
    ]
    values = arguments("pippi" * 3 + "pppifp", *tables, ids, kinds, places, columns, scale, x)
    driver.launch("embed", (ceil_div(columns, 256), rows, 1), 256, values)


def layer_inputs(
    driver: Driver,
    table: Embedding,
    rows: int,
    ids: int,
    dim: int,
    scales: tuple[float, float, float],
    norm: Norm,
    y: int,
) -> None:
    """Finish the inputs of layers (rows, layers, dim), which hold a product of the embeddings.

    Args:
        driver: The device.
        table: The tokens' embeddings of all layers.
        rows: The number of rows.
        ids: (rows) int32, the rows' tokens.
        dim: Of a layer's part.
        scales: Multiply the product, the token's embeddings, and the sum of both.
        norm: Of each layer's part, after the first scale.
        y: The inputs.
    """
    gathered = table.matrix.address, table.matrix.dtype, table.a, table.b, table.rank
    values = (
        *arguments("pippipi", *gathered, ids, dim),
        *arguments("fffpfip", *scales, norm.weight, norm.eps, norm.is_rms, y),
    )
    driver.launch("layer_inputs", (table.matrix.columns // dim, rows, 1), 32, values, shared=4 * dim)
