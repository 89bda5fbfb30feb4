"""Wrong arguments of llamac.ops: errors say what was given, what was expected and what to do."""

from __future__ import annotations

import copy
import enum
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamac
from llamac import _core, ops
from llamac.errors import ArgumentError, ArgumentTypeError, ModelError, UnsupportedError
from ops_samples import normal, some_matrix

X, W = normal(3, 64), some_matrix("f32", 40, 64)
Q, K = normal(5, 6, 8), normal(9, 2, 8)
INV_FREQ = np.ones(4, np.float32)


def wrong(*values: Any) -> Any:
    """An argument whose type the signature does not allow."""
    return values[0] if len(values) == 1 else list(values)


CASES: list[tuple[Callable[[], object], str]] = [
    (lambda: ops.matmul(X[:, :48], W), "x has shape (3, 48), expected (..., 64): the matrix has shape (40, 64)"),
    (lambda: ops.matmul(X, W, X[0]), "bias has shape (64,), expected (40,): the matrix has shape (40, 64)"),
    (lambda: ops.matmul(X[:0], W), "x has shape (0, 64), which holds no numbers: expected at least one"),
    (lambda: ops.matmul(X, W, numerics=wrong("quick")), "numerics is 'quick', expected 'exact' or 'fast'"),
    (lambda: ops.matmul(np.ma.masked_array(X, X > 0), W), "x is a masked array, whose mask would be ignored: use "),
    (lambda: ops.matmul(X, W, threads=0), "threads is 0, expected 1 to 1024, or None for this machine's default"),
    (lambda: ops.matmul(X, W, isa="avx9"), "isa is 'avx9'; this build has "),
    (lambda: ops.dequantize(W, [0, 40]), "rows holds 40, expected 0 to 39"),
    (lambda: ops.dequantize(W, wrong([1], [2, 3])), "rows holds lists of different lengths, expected integers"),
    (lambda: ops.dequantize(W, np.ma.masked_array([1, 2], [True, False])), "rows is a masked array"),
    (lambda: ops.dequantize(W, []), "rows has shape (0,), expected (n,) with at least one number"),
    (lambda: ops.quantize(X, wrong("q5")), "dtype is 'q5', expected 'f32' or 'f16' or 'bf16' or 'q8' or "),
    (lambda: ops.quantize(X[0], "q8"), "weights has shape (64,), expected (rows, columns)"),
    (lambda: ops.quantize(X * np.float32(1e6), "f16"), ", which does not fit f16"),
    (lambda: ops.quantize(X * np.float32(np.nan), "q4"), "weights holds numbers that are not finite"),
    (
        lambda: ops.quantize(X, "q4", importance=X[0, 1:]),
        "importance has shape (63,), expected (64,): a number for each",
    ),
    (lambda: ops.quantize(X, "q4", importance=-np.abs(X[0])), "importance holds a number that is negative"),
    (lambda: ops.quantize(X, "bf16", importance=X[0]), "bf16 rounds each weight by itself: importance must be None"),
    (lambda: ops.Matrix(b"", "q5_9", (1, 1)), "dtype is 'q5_9', expected one of f32, f16, bf16, q8"),
    (lambda: ops.Matrix(bytes(5), "f32", (1, 1)), "data has 5 bytes, but 1 x 1 numbers of f32 take 64"),
    (lambda: ops.Matrix(bytes(5), "f32", (1,)), "shape is (1,), expected (rows, columns)"),
    (lambda: ops.Matrix(bytes(5), "f32", (0, 1)), "shape is (0, 1), expected up to"),
    (
        lambda: ops.rms_norm(X, X[0, :9]),
        "weight has shape (9,), expected (64,): a number for each of the 64 columns of x",
    ),
    (lambda: ops.rms_norm(X, X[0], -1), "eps is -1, expected a number of at least 0"),
    (lambda: ops.layer_norm(X, X[0], X), "bias has shape (3, 64), expected (64,): a number for each of the 64 columns"),
    (lambda: ops.softmax(np.float32(3) * np.ones((), np.float32).reshape(())), "x must be a NumPy array of float32"),
    (lambda: ops.gelu(X, wrong("sigmoid")), "kind is 'sigmoid', expected 'tanh' or 'erf' or 'quick'"),
    (lambda: ops.rope(Q, range(5), INV_FREQ, factor=np.nan), "factor is nan, expected a finite float32"),
    (lambda: ops.attention(Q, K, K, scale=np.inf), "scale is inf, expected a finite float32"),
    (lambda: ops.attention(Q, K, K, scale=1e39), "scale is 1e+39, expected a finite float32, up to 3.4e38"),
    (lambda: ops.attention(Q, K, K, soft_cap=1e39), "soft_cap is 1e+39, expected a finite float32, up to 3.4e38"),
    (
        lambda: ops.rope(Q, range(5), INV_FREQ, factor=-1e300),
        "factor is -1e+300, expected a finite float32",
    ),
    (lambda: ops.rms_norm(X, X[0], 1e39), "eps is 1e+39, expected a finite float32, up to 3.4e38"),
    (lambda: ops.attention(Q, K, K, causal=wrong("no")), "causal must be True or False, not str"),
    (lambda: ops.rope(X, [0], INV_FREQ), "x has shape (3, 64), expected (rows, heads, head_dim)"),
    (lambda: ops.rope(Q, range(4), INV_FREQ), "positions has shape (4,), expected (5,): one for each row"),
    (lambda: ops.rope(Q, [0, 1, 2, 3, 1 << 24], INV_FREQ), "positions holds 16777216, expected 0 to 16777215"),
    (lambda: ops.rope(Q, range(5), normal(5)), "inv_freq has 5 numbers, but heads of 8 numbers have 4 pairs"),
    (
        lambda: ops.attention(Q, K[..., :7], K),
        "k has shape (9, 2, 7), expected (n, kv_heads, 8): q has shape (5, 6, 8)",
    ),
    (
        lambda: ops.attention(Q, K, K[1:]),
        "v has shape (8, 2, 8), expected (9, 2, 8): keys and values have the same shape",
    ),
    (lambda: ops.attention(Q[:, :5], K, K), "q has 5 heads and k has 2: expected a multiple of k's heads in q"),
    (lambda: ops.attention(Q, K[:4], K[:4]), "q has 5 rows, but k has only 4 positions: give positions, or use causal"),
    (lambda: ops.attention(Q, K, K, positions=[0, 1, 2, 3, 9]), "positions holds 9, expected 0 to 8"),
    (
        lambda: ops.attention(Q, K, K, causal=False, window=3),
        "with causal=False each row sees all positions: leave out",
    ),
    (lambda: ops.attention(Q, K, K, window=-1), "window is -1, expected a number of positions, or 0 for no window"),
    (lambda: ops.attention(Q, K, K, soft_cap=-1), "soft_cap is -1, expected a positive number, or 0 for none"),
    (
        lambda: ops.attention(Q, K, K, sinks=INV_FREQ),
        "sinks has shape (4,), expected (6,): a number for each head of q",
    ),
    (lambda: ops.attention(Q, K, K, kv_dtype=wrong("q4")), "kv_dtype is 'q4', expected 'f32' or 'f16' or 'q8'"),
    (lambda: ops.sample(X), "logits has shape (3, 64), expected (vocabulary,)"),
    (lambda: ops.sample(X[0], seed=-1), "seed is -1, expected 0 to 18446744073709551615"),
    (lambda: ops.sample(X[0], top_p=0), "top_p is 0, expected more than 0 and at most 1"),
    (lambda: ops.sample(X[0], temperature=-1), "temperature is -1, expected "),
    (lambda: ops.sample(X[0], position=2**64), "position is 18446744073709551616, expected 0 to"),
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message for _, message in CASES])
def test_errors_teach(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.softmax(X.astype(np.float64)),
            "x is an array of float64, expected float32: convert it with .astype(np.float32)",
        ),
        (
            lambda: ops.silu(wrong(1.0, 2.0)),
            "x must be a NumPy array of float32: use np.array(..., np.float32), not list",
        ),
        (lambda: ops.matmul(X, wrong(X)), 'matrix must be an ops.Matrix: make one with ops.quantize(weights, "f32")'),
        (
            lambda: ops.rope(Q, wrong(np.zeros(5)), INV_FREQ),
            "positions holds numbers of float64, expected integers",
        ),
        (
            lambda: ops.Matrix(wrong(X), "f32", (3, 64)),
            "data must be bytes in strips: ops.quantize makes a",
        ),
        (lambda: ops.Matrix(wrong(1, 2), "f32", (3, 64)), "data must be bytes in strips: ops.quantize makes a matrix"),
        (lambda: ops.Matrix(bytes(5), wrong(["q4"]), (1, 1)), "dtype must be a str, not list"),
        (lambda: ops.silu(X, isa=wrong(["scalar"])), "isa must be a str, not list"),
        (lambda: ops.matmul(X, W, numerics=wrong(np.array(["a", "b"]))), "numerics must be a str, not ndarray"),
        (lambda: ops.gelu(X, wrong(np.array([1, 2]))), "kind must be a str, not ndarray"),
        (lambda: ops.matmul(X, W, threads=wrong(1.5)), "threads must be an integer, not float"),
        (
            lambda: ops.Matrix.of(wrong("model.bin"), "output.weight"),
            "model must be a model: open one with llamac.load",
        ),
    ],
)
def test_types_are_checked(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=re.escape(message)):
        call()


def test_a_matrix_is_no_operand_of_numpy() -> None:
    with pytest.raises(TypeError, match=r"unsupported operand type.* 'numpy.ndarray' and 'Matrix'"):
        X @ wrong(W)


def test_tensors_that_are_no_matrices(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        with pytest.raises(ArgumentTypeError, match=r"tensor must be a name such as .*, not int"):
            ops.Matrix.of(model, wrong(3))
        with pytest.raises(ArgumentError, match=r"has no tensor 'output'"):
            ops.Matrix.of(model, "output")
        text = "output_norm.weight is a vector of 48 numbers, not a matrix: use model.file.tensor('output_norm.weight')"
        with pytest.raises(ArgumentError, match=re.escape(text)):
            ops.Matrix.of(model, "output_norm.weight")


def test_logits_without_a_token() -> None:
    with pytest.raises(ModelError, match="no token can be chosen: none of the logits is a number"):
        ops.sample(np.full(5, np.nan, np.float32))


class Name(str, enum.Enum):
    ISA = "scalar"
    DTYPE = "f32"
    NUMERICS = "exact"


@pytest.mark.parametrize(
    ("isa", "dtype", "numerics"),
    [(np.str_("scalar"), np.str_("f32"), np.str_("exact")), (Name.ISA, Name.DTYPE, Name.NUMERICS)],
    ids=["numpy", "enum"],
)
def test_names_may_be_subclasses_of_str(isa: str, dtype: str, numerics: str) -> None:
    expected = ops.matmul(X, W, isa="scalar")
    np.testing.assert_array_equal(ops.matmul(X, W, numerics=wrong(numerics), isa=isa), expected)
    made = ops.Matrix(W.data, dtype, W.shape).dtype
    assert (made, type(made)) == ("f32", str)


def test_a_tiny_soft_cap_is_not_off() -> None:
    expected = ops.attention(Q, K, K, soft_cap=1e-30)
    np.testing.assert_allclose(ops.attention(Q, K, K, soft_cap=1e-46), expected, rtol=1e-6)


def test_a_copy_of_a_matrix_is_read_only() -> None:
    for made in (pickle.loads(pickle.dumps(W)), copy.deepcopy(W), ops.Matrix(W.data, W.dtype, W.shape)):
        assert (made.dtype, made.shape, made.data.tobytes()) == (W.dtype, W.shape, W.data.tobytes())
        assert made.data.ctypes.data % 64 == 0
        assert not made.data.flags.writeable


def test_an_unsupported_kernel_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "isas", lambda: [("avx2", False), ("scalar", True)])
    with pytest.raises(UnsupportedError, match="isa is 'avx2', which this processor does not support; it runs scalar"):
        ops.silu(X, isa="avx2")


def test_a_matrix_describes_itself_and_outlives_its_model(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        matrix = ops.Matrix.of(model, "layers.1.ffn_up.weight")
        expected = model.file.tensor("layers.1.ffn_up.weight")
    np.testing.assert_array_equal(matrix.dequantize(), expected)
    assert repr(matrix) == "<llamac.ops.Matrix 76 x 48, f32, 15360 bytes>"
    with pytest.raises(ValueError, match="read-only"):
        matrix.data[0] = 1


@pytest.mark.parametrize("call", [lambda: ops.matmul(X, W), lambda: ops.attention(Q, K, K), lambda: ops.softmax(X)])
def test_every_failed_allocation_is_an_error(call: Callable[[], object]) -> None:
    _core.fail_allocation(0)
    call()
    n_allocations = _core.fail_allocation(0)
    assert n_allocations > 0
    for n in range(1, n_allocations + 1):
        _core.fail_allocation(n)
        with pytest.raises(llamac.OutOfMemoryError, match="out of memory: "):
            call()
    _core.fail_allocation(0)
    call()


def test_a_quantizer_without_memory_is_an_error() -> None:
    _core.fail_allocation(1)
    with pytest.raises(llamac.OutOfMemoryError, match="quantizing a strip"):
        ops.quantize(X, "q8", threads=1)
