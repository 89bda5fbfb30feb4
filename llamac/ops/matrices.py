"""Matrices as the engine stores them, and the operations that make, read and multiply them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamac import _core
from llamac.arguments import NUMERICS, Numerics, to_int, wrong_type
from llamac.engine.hardware.machine import choose_isa
from llamac.engine.model import Model
from llamac.errors import ArgumentError
from llamac.format.strips import FLOATS, LINE_BYTES, OVERFLOW, QUANTIZED, pack_strips
from llamac.ops.arrays import NUMBERS, choice, floats, integers, optional, thread_count

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.ops.arrays import Floats

MAX_COLUMNS = 1 << 24
MAX_ROWS = 2**31 - 1
QUANTIZING_WORK = 256  # multiply-adds that take about as long as quantizing a weight


class Matrix:
    """A matrix (rows, columns) in one of the engine's number formats. It is immutable.

    `quantize` makes one from an array, `Matrix.of` from a model's tensor.

    Attributes:
        dtype: The number format: "f32", "q4", "q4_k", ... (docs/quantization.md).
        shape: (rows, columns). A product maps vectors of `columns` numbers to vectors of `rows` numbers.
        data: The stored bytes, uint8, read-only: strips of 16 rows (docs/format.md).
    """

    __array_ufunc__ = None  # `x @ matrix` is an error that names both types

    def __init__(self, data: bytes | bytearray | memoryview | NDArray[np.uint8], dtype: str, shape: Sequence[int]):
        """Copy the bytes of a matrix.

        Args:
            data: The bytes, in strips of 16 rows (docs/format.md), also as an array of uint8.
            dtype: The number format.
            shape: (rows, columns).

        Raises:
            ArgumentError: If there is no such dtype, or the number of bytes does not fit the shape; `ArgumentTypeError`
                if data is not bytes.
        """
        import numpy as np

        if not isinstance(dtype, str):
            raise wrong_type("dtype", dtype, "a str")
        if dtype not in NUMBERS:
            raise ArgumentError(f"dtype is {dtype!r}, expected one of {', '.join(NUMBERS)}")
        rows, columns = (to_int(size, "shape") for size in _pair(shape))
        if not 1 <= rows <= MAX_ROWS or not 1 <= columns <= MAX_COLUMNS:
            raise ArgumentError(f"shape is ({rows}, {columns}), expected up to {MAX_ROWS} rows, {MAX_COLUMNS} columns")
        if isinstance(data, np.ndarray) and data.dtype == np.uint8:
            data = data.data
        if not isinstance(data, bytes | bytearray | memoryview) or memoryview(data).format != "B":
            raise wrong_type("data", data, "bytes in strips: ops.quantize makes a matrix from an array of numbers")
        stored = np.frombuffer(memoryview(data).tobytes(), np.uint8)
        size = _core.matrix_bytes(NUMBERS[dtype], rows, columns)
        if len(stored) != size:
            raise ArgumentError(f"data has {len(stored)} bytes, but {rows} x {columns} numbers of {dtype} take {size}")
        memory = np.empty(size + LINE_BYTES, np.uint8)
        start = -memory.ctypes.data % LINE_BYTES  # a line of a strip is a cache line
        memory[start : start + size] = stored
        memory.flags.writeable = False
        self.data: NDArray[np.uint8] = memory[start : start + size]
        self.dtype = str.__str__(dtype)  # of a subclass, too, such as an enum
        self.shape = (rows, columns)

    @classmethod
    def of(cls, model: Model, tensor: str) -> Matrix:
        """Copy a matrix of a model file.

        Adapters of the model do not change it.

        Args:
            model: An open model.
            tensor: The tensor's name, such as "layers.0.attn_q.weight". `model.file.tensors` has all.

        Raises:
            ArgumentError: If the model has no such tensor, or it is a vector.
        """
        if not isinstance(model, Model):
            raise wrong_type("model", model, "a model: open one with llamac.load(path)")
        if not isinstance(tensor, str):
            raise wrong_type("tensor", tensor, "a name such as 'layers.0.attn_q.weight'")
        record, data = model.file.stored(tensor)
        if len(record.shape) != 2:
            raise ArgumentError(
                f"{tensor} is a vector of {record.shape[0]} numbers, not a matrix: use model.file.tensor({tensor!r})"
            )
        return cls(data, record.dtype, record.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored matrix."""
        return int(self.data.size)

    def dequantize(self, rows: Sequence[int] | NDArray[np.integer] | None = None, *, isa: str | None = None) -> Floats:
        """Return the matrix, or some of its rows, as float32: `ops.dequantize` of this matrix."""
        return dequantize(self, rows, isa=isa)

    def __reduce__(self) -> tuple[type[Matrix], tuple[bytes, str, tuple[int, int]]]:
        """Pickle and copy as the arguments: only `__init__` makes memory that is aligned and read-only."""
        return type(self), (self.data.tobytes(), self.dtype, self.shape)

    def __repr__(self) -> str:
        return f"<llamac.ops.Matrix {self.shape[0]} x {self.shape[1]}, {self.dtype}, {self.nbytes} bytes>"


def _pair(shape: object) -> tuple[object, object]:
    if not isinstance(shape, tuple | list) or len(shape) != 2:
        raise ArgumentError(f"shape is {shape!r}, expected (rows, columns)")
    return shape[0], shape[1]


def _matrix(value: object) -> Matrix:
    if not isinstance(value, Matrix):
        raise wrong_type("matrix", value, 'an ops.Matrix: make one with ops.quantize(weights, "f32")')
    return value


def quantize(
    weights: Floats,
    dtype: str,
    *,
    importance: Floats | None = None,
    isa: str | None = None,
    threads: int | None = None,
) -> Matrix:
    """Store weights in one of llamac's own number formats, as `llamac export` does without calibration.

    q8, q6, q4, q4s, q3 and q2 make the squared error of each block's weights small, t2 that of each row's
    (docs/quantization.md says how close to the least). f16 and bf16 round to nearest, ties to even. f32 keeps every
    bit.

    Args:
        weights: (rows, columns), float32, finite.
        dtype: "f32", "f16", "bf16", "q8", "q6", "q4", "q4s", "q3", "q2" or "t2".
        importance: (columns), float32, at least 0: the weight of each column's squared error. Not for floats.
        isa: The kernel set. None: `LLAMAC_ISA`, otherwise the best of this machine. It does not change the bytes.
        threads: 1 to 1024. None: this machine's default. They do not change the bytes.

    Returns:
        The matrix.

    Raises:
        ArgumentError: If an argument is out of range, or a weight is not finite or does not fit the dtype.
        UnsupportedError: If this machine does not support the kernel set.
    """
    import numpy as np

    weights = floats(weights, "weights", ("rows", "columns"))
    rows, columns = weights.shape
    name = (*FLOATS, *QUANTIZED)[choice(dtype, "dtype", (*FLOATS, *QUANTIZED))]
    peak = float(np.abs(weights).max())
    if not peak < OVERFLOW.get(name, np.inf):
        problem = f"{peak:g}, which does not fit {name}" if np.isfinite(peak) else "numbers that are not finite"
        raise ArgumentError(f"weights holds {problem}")
    if importance is not None:
        if name in FLOATS:
            raise ArgumentError(f"{name} rounds each weight by itself: importance must be None")
        importance = floats(importance, "importance", (columns,), "a number for each column of weights")
        if not (importance >= 0).all() or not np.isfinite(importance).all():
            raise ArgumentError("importance holds a number that is negative or not finite")
    kernel_set, count = choose_isa(isa), thread_count(threads, QUANTIZING_WORK * weights.size)
    if name in FLOATS:
        return Matrix(pack_strips(weights, name), name, (rows, columns))
    data = np.empty(_core.matrix_bytes(NUMBERS[name], rows, columns), np.uint8)
    _core.op_quantize(NUMBERS[name], weights.data, optional(importance), data.data, kernel_set, count)
    return Matrix(data.data, name, (rows, columns))


def dequantize(
    matrix: Matrix, rows: Sequence[int] | NDArray[np.integer] | None = None, *, isa: str | None = None
) -> Floats:
    """Convert a matrix, or some of its rows, to float32. Rows of an embedding are looked up like this.

    A weight is S c + M with the scale, the code and the minimum of its block (docs/format.md).

    Args:
        matrix: The matrix.
        rows: (n): indices of rows, which can repeat. None: all rows.
        isa: The kernel set. None: `LLAMAC_ISA`, otherwise the best of this machine. It does not change the bits.

    Returns:
        (n, columns).

    Raises:
        ArgumentError: If there is no such row.
        UnsupportedError: If this machine does not support the kernel set.
    """
    import numpy as np

    n_rows, columns = _matrix(matrix).shape
    wanted = np.arange(n_rows, dtype=np.int32) if rows is None else integers(rows, "rows", None, 0, n_rows - 1)
    out = np.empty((len(wanted), columns), np.float32)
    _core.op_gather(NUMBERS[matrix.dtype], matrix.data.data, n_rows, wanted.data, out.data, choose_isa(isa))
    return out


def matmul(
    x: Floats,
    matrix: Matrix,
    bias: Floats | None = None,
    *,
    numerics: Numerics = "exact",
    isa: str | None = None,
    threads: int | None = None,
) -> Floats:
    """Multiply vectors by a matrix: y = W x + bias for each vector x.

    With float matrices, an output is a chain of fused multiply-adds over ascending columns in float32. With quantized
    ones, x is rounded to integers, and sums of products of codes are exact (docs/determinism.md).

    Args:
        x: (..., columns), float32.
        matrix: W, (rows, columns).
        bias: (rows), float32.
        numerics: "exact" or "fast": how products with bf16, q8, q6 and GGUF's types round x, as in `llamac.load`.
        isa: The kernel set. None: `LLAMAC_ISA`, otherwise the best of this machine. It does not change the bits.
        threads: 1 to 1024. None: this machine's default, or 1 for small products. They do not change the bits.

    Returns:
        (..., rows).

    Raises:
        ArgumentError: If a shape does not fit the matrix; `ArgumentTypeError` if an array is not of float32.
        UnsupportedError: If this machine does not support the kernel set.
    """
    import numpy as np

    rows, columns = _matrix(matrix).shape
    x = floats(x, "x", (..., columns), f"the matrix has shape {matrix.shape}")
    if bias is not None:
        bias = floats(bias, "bias", (rows,), f"the matrix has shape {matrix.shape}")
    number = choice(numerics, "numerics", NUMERICS)
    flat = x.reshape(-1, columns)
    out = np.empty((len(flat), rows), np.float32)
    count = thread_count(threads, len(flat) * rows * columns)
    strips, kernel_set = matrix.data.data, choose_isa(isa)
    _core.op_matmul(NUMBERS[matrix.dtype], strips, flat.data, optional(bias), number, out.data, kernel_set, count)
    return out.reshape(*x.shape[:-1], rows)
