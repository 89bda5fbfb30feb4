"""llamac.ops against naive NumPy in float64: every number format, kernel set and thread count, odd shapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llamac import _core, ops
from llamac.arguments import NUMERICS, KVDtype, Numerics
from llamac.export.quantize import CalibrationStats, Quantizer
from llamac.export.rounding import round_to_q8, rounded_inputs
from llamac.format.strips import CODEBOOKS, QUANTIZED, unpack_tensor
from ops_samples import (
    DTYPES,
    RUNS_HERE,
    THREADS,
    Floats,
    assert_close,
    columns_of,
    everywhere,
    normal,
    on_all_sets,
    some_matrix,
)

Doubles = NDArray[np.float64]

ROUNDING = 2e-6  # relative: sums of a few hundred products in float32


# ---- matrices


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_is_unpacked_exactly(dtype: str) -> None:
    matrix = some_matrix(dtype, 37, columns_of(dtype))
    whole = on_all_sets(lambda isa: ops.dequantize(matrix, isa=isa))
    np.testing.assert_array_equal(whole, unpack_tensor(matrix.data.tobytes(), dtype, matrix.shape))
    np.testing.assert_array_equal(matrix.dequantize([36, 0, 36, 17]), whole[[36, 0, 36, 17]])


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_weights_are_quantized_like_those_of_an_export(dtype: str) -> None:
    weights, importance = normal(85, 70), np.abs(normal(70, seed=2))
    for given, stats in ((None, None), (importance, CalibrationStats(importance, None))):
        with Quantizer() as quantizer:
            expected = quantizer.pack(weights, dtype, stats)
        for isa in RUNS_HERE:
            for threads in THREADS:
                made = ops.quantize(weights, dtype, importance=given, isa=isa, threads=threads)
                assert made.data.tobytes() == expected
                assert (made.dtype, made.shape, made.nbytes) == (dtype, (85, 70), len(expected))
    bits = 4 if dtype in ("q4", "q4s") else int(dtype[1])
    error = float(np.square(made.dequantize() - weights).mean())
    assert error < 4.0 ** (1 - bits)  # about the square of a step of a normal distribution


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_only_ratios_of_importances_matter(dtype: str) -> None:
    weights, importance = normal(16, 300), np.abs(normal(300, seed=2))
    expected = ops.quantize(weights, dtype, importance=importance).data.tobytes()
    for power in (-100, 100, 120):
        scaled = np.ldexp(importance, power)
        assert ops.quantize(weights, dtype, importance=scaled).data.tobytes() == expected, power


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_blocks_without_importance_keep_their_numbers(dtype: str) -> None:
    weights, importance = normal(16, 300), np.zeros(300, np.float32)
    plain = ops.quantize(weights, dtype).dequantize()
    for begin in (300, 128):  # no block has importance; only later blocks have
        importance[begin:] = 1
        found = ops.quantize(weights, dtype, importance=importance).dequantize()
        errors = [float(np.square(made - weights)[:, :begin].mean()) for made in (found, plain)]
        assert errors[0] < 1.2 * errors[1]


@pytest.mark.parametrize(("dtype", "limit"), [("f32", 0), ("f16", 2.0**-11), ("bf16", 2.0**-8)])
def test_floats_round_to_nearest(dtype: str, limit: float) -> None:
    weights = normal(19, 33)
    found = ops.quantize(weights, dtype).dequantize()
    assert (np.abs(found - weights) <= limit * np.abs(weights)).all()
    assert (found == weights).all() == (dtype == "f32")


@pytest.mark.parametrize("m", [1, 5, 300])  # one row; few; more than are packed at a time
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul(dtype: str, m: int) -> None:
    columns = columns_of(dtype)
    matrix, x, bias = some_matrix(dtype, 37, columns), normal(m, columns, seed=3), normal(37, seed=4)
    weights = matrix.dequantize().astype(np.float64)
    for numerics in NUMERICS:
        inputs = rounded_inputs(x.astype(np.float64), dtype, numerics)
        found = everywhere(
            lambda isa, threads, numerics=numerics: ops.matmul(  # type: ignore[misc]
                x, matrix, bias, numerics=numerics, isa=isa, threads=threads
            )
        )
        assert_close(found, inputs @ weights.T + bias, ROUNDING)
    is_rounded = dtype not in ("f32", "f16", *CODEBOOKS)
    assert (found != ops.matmul(x, matrix, bias)).any() == is_rounded  # fast numerics


def test_matmul_keeps_the_leading_dimensions_and_reads_any_memory_order() -> None:
    matrix, x = some_matrix("q8", 21, 64), normal(2, 3, 64)
    expected = ops.matmul(x.reshape(6, 64), matrix)
    np.testing.assert_array_equal(ops.matmul(x, matrix), expected.reshape(2, 3, 21))
    np.testing.assert_array_equal(ops.matmul(np.asfortranarray(x), matrix), expected.reshape(2, 3, 21))
    np.testing.assert_array_equal(ops.matmul(x[0, 1], matrix), expected[1])


def test_large_products_use_the_default_threads() -> None:
    matrix, x = some_matrix("q4", 1040, 512), normal(9, 512)
    np.testing.assert_array_equal(ops.matmul(x, matrix), ops.matmul(x, matrix, threads=1))


# ---- rows


@pytest.mark.parametrize("width", [1, 15, 16, 83, 200])
def test_norms_and_softmax(width: int) -> None:
    x, weight, bias = 3 * normal(2, 5, width) + 1, normal(width, seed=2), normal(width, seed=3)
    exact, eps = x.astype(np.float64), 1e-3
    rms = exact / np.sqrt(np.square(exact).mean(-1, keepdims=True) + eps) * weight
    assert_close(on_all_sets(lambda isa: ops.rms_norm(x, weight, eps, isa=isa)), rms, 1e-6)
    centered = exact - exact.mean(-1, keepdims=True)
    normed = centered / np.sqrt(np.square(centered).mean(-1, keepdims=True) + eps) * weight
    tolerance = 1e-6 if width > 1 else 1e-4  # one number minus itself is 0, divided by sqrt(eps)
    assert_close(on_all_sets(lambda isa: ops.layer_norm(x, weight, bias, eps, isa=isa)), normed + bias, tolerance)
    np.testing.assert_array_equal(ops.layer_norm(x, weight, None, eps), ops.layer_norm(x, weight, 0 * bias, eps))
    powers = np.exp(exact - exact.max(-1, keepdims=True))
    assert_close(on_all_sets(lambda isa: ops.softmax(x, isa=isa)), powers / powers.sum(-1, keepdims=True), 1e-6)


def test_softmax_of_masked_scores() -> None:
    x = np.array([[0, -np.inf, 0, -1000], [-np.inf, 5, -np.inf, -np.inf]], np.float32)
    np.testing.assert_array_equal(ops.softmax(x), [[0.5, 0, 0.5, 0], [0, 1, 0, 0]])
    assert np.isnan(ops.softmax(np.full((1, 3), -np.inf, np.float32))).all()


def test_activations() -> None:
    x = np.linspace(-12, 12, 963, dtype=np.float32).reshape(3, 321)
    exact = x.astype(np.float64)
    cubic = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    normal_cdf = 0.5 * np.vectorize(math.erfc)(-exact / math.sqrt(2))
    expected: dict[Any, Doubles] = {
        "tanh": 0.5 * exact * (1 + np.tanh(cubic)),
        "erf": exact * normal_cdf,
        "quick": exact / (1 + np.exp(-1.702 * exact)),
    }
    for kind, values in expected.items():
        found = on_all_sets(lambda isa, kind=kind: ops.gelu(x, kind, isa=isa))  # type: ignore[misc]
        np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ops.gelu(x), ops.gelu(x, "tanh"))
    silu = on_all_sets(lambda isa: ops.silu(x, isa=isa))
    np.testing.assert_allclose(silu, exact / (1 + np.exp(-exact)), rtol=1e-6, atol=1e-8)
    infinities = np.array([-np.inf, np.inf], np.float32)
    assert np.isnan(on_all_sets(lambda isa: ops.gelu(infinities, "erf", isa=isa))).all()
    np.testing.assert_array_equal(on_all_sets(lambda isa: ops.silu(infinities, isa=isa)), infinities)


@pytest.mark.parametrize(("head_dim", "half"), [(2, 1), (20, 10), (64, 32), (80, 20)])
def test_rope(head_dim: int, half: int) -> None:
    x, positions = normal(4, 3, head_dim), [0, 7, 1 << 20, 300]
    inv_freq = (10000.0 ** (-np.arange(half) / half)).astype(np.float32)
    angles = (np.array(positions, np.float32)[:, None] * inv_freq).astype(np.float64)[:, None]
    cosine, sine = 1.5 * np.cos(angles), 1.5 * np.sin(angles)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    expected = np.concatenate([a * cosine - b * sine, b * cosine + a * sine, rest], axis=-1)
    before = x.copy()
    assert_close(on_all_sets(lambda isa: ops.rope(x, positions, inv_freq, factor=1.5, isa=isa)), expected, 1e-6)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(ops.rope(x, np.zeros(4, np.int64), inv_freq), x)


# ---- attention


def naive_attention(
    q: Floats, k: Floats, v: Floats, visible: NDArray[np.bool_], cap: float = 0, sinks: Floats | None = None
) -> Doubles:
    """softmax(q k^T / sqrt(head_dim)) v in float64. visible: (rows, positions)."""
    group = q.shape[1] // k.shape[1]
    keys, values = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("rhd,phd->hrp", q.astype(np.float64), keys) / math.sqrt(q.shape[2])
    scores = cap * np.tanh(scores / cap) if cap else scores
    weights = np.where(visible, np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks.astype(np.float64))[:, None, None])
    mixed: Doubles = np.einsum("hrp,phd->rhd", weights / total, values)
    return mixed


@pytest.mark.parametrize(
    ("rows", "n", "heads", "kv_heads", "head_dim"),
    [(1, 1, 1, 1, 4), (1, 700, 6, 2, 20), (33, 33, 4, 4, 16), (70, 300, 6, 1, 24), (5, 260, 9, 3, 70)],
)
@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "q8"])
def test_attention(rows: int, n: int, heads: int, kv_heads: int, head_dim: int, kv_dtype: KVDtype) -> None:
    q, k, v = (normal(count, h, head_dim, seed=h + count) for count, h in ((rows, heads), (n, kv_heads), (n, kv_heads)))
    v = normal(n, kv_heads, head_dim, seed=7)
    found = everywhere(lambda isa, threads: ops.attention(q, k, v, kv_dtype=kv_dtype, isa=isa, threads=threads))
    stored_k, stored_v = k, v
    if kv_dtype == "f16":
        stored_k, stored_v = (x.astype(np.float16).astype(np.float32) for x in (k, v))
    if kv_dtype == "q8":
        stored_k, stored_v = (
            round_to_q8(x.astype(np.float64), span).astype(np.float32) for x, span in ((k, 32), (v, head_dim))
        )
    visible = np.arange(n) <= np.arange(n - rows, n)[:, None]
    # with q8, queries become 15-bit integers, numerators of the softmax 8-bit ones
    assert_close(found, naive_attention(q, stored_k, stored_v, visible), 2e-2 if kv_dtype == "q8" else ROUNDING)


@pytest.mark.parametrize("window", [0, 1, 17, 280, 10_000])
def test_attention_at_any_positions(window: int) -> None:
    """Rows in any order, with a window, a cap and sinks."""
    positions = np.array([511, 0, 300, 77, 77, 256, 255, 64], np.int64)
    q, k, v = normal(8, 6, 20), normal(512, 2, 20, seed=2), normal(512, 2, 20, seed=3)
    sinks = normal(6, seed=4)
    found = everywhere(
        lambda isa, threads: ops.attention(
            q, k, v, positions=positions, window=window, soft_cap=2, sinks=sinks, isa=isa, threads=threads
        )
    )
    distance = positions[:, None] - np.arange(512)
    visible = (distance >= 0) & ((distance < window) if window else True)
    assert_close(found, naive_attention(q, k, v, visible, 2, sinks), ROUNDING)


def test_attention_that_sees_everything() -> None:
    q, k, v = normal(30, 2, 8), normal(9, 1, 8, seed=2), normal(9, 1, 8, seed=3)
    found = ops.attention(q, k, v, causal=False)
    assert_close(found, naive_attention(q, k, v, np.ones((30, 9), np.bool_)), ROUNDING)
    np.testing.assert_array_equal(ops.attention(q, k, v, causal=False, scale=8**-0.5), found)
    assert (ops.attention(q, k, v, causal=False, scale=1) != found).any()


def test_positions_outside_of_a_window_do_not_matter() -> None:
    q, k, v = normal(1, 1, 8), normal(80, 1, 8, seed=2), normal(80, 1, 8, seed=3)
    expected = ops.attention(q, k, v, window=10)
    k[:70], v[:70] = np.nan, np.inf
    np.testing.assert_array_equal(ops.attention(q, k, v, window=10), expected)


# ---- draws


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.2},
        {"typical_p": 0.4},
        {"xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"seed": 2**64 - 1, "candidate": 3},
    ],
)
def test_draws_are_the_core_s(settings: dict[str, Any]) -> None:
    logits = 2 * normal(311)
    core = _core.Sampling(**{"temperature": 1.0, **settings})
    for position in range(40):
        expected = _core.sample(logits.data, core, position)
        assert {ops.sample(logits, position=position, isa=isa, **settings) for isa in RUNS_HERE} == {expected}
        if settings.get("temperature") == 0:
            assert expected == logits.argmax()


def test_draws_follow_the_probabilities() -> None:
    logits = np.array([2.0, 1.0, 0.0, -np.inf], np.float32)
    counts = np.bincount([ops.sample(logits, position=i) for i in range(4000)], minlength=4)
    expected = np.exp(logits) / np.exp(logits).sum()
    assert np.abs(counts / 4000 - expected).max() < 0.03
    assert counts[3] == 0


@pytest.mark.parametrize("numerics", NUMERICS)
def test_results_do_not_depend_on_other_rows(numerics: Numerics) -> None:
    matrix, x = some_matrix("q5_1", 40, 320), normal(20, 320)
    whole = ops.matmul(x, matrix, numerics=numerics)
    for i in (0, 7, 19):
        np.testing.assert_array_equal(ops.matmul(x[i], matrix, numerics=numerics), whole[i])
