"""llamac.ops against PyTorch: the functions that checkpoints were trained with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llamac import ops
from llamac.format.strips import CODEBOOKS, FLOATS
from ops_samples import DTYPES, assert_close, columns_of, normal, some_matrix

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'llamac[parity]'")
functional = torch.nn.functional

Doubles = NDArray[np.float64]


def double(x: NDArray[np.float32]) -> Any:
    return torch.from_numpy(x.astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: str) -> None:
    """With 4-bit weights, inputs have 8 bits, otherwise 15."""
    columns = columns_of(dtype)
    matrix, x, bias = some_matrix(dtype, 37, columns), normal(9, columns), normal(37, seed=2)
    expected: Doubles = functional.linear(double(x), double(matrix.dequantize()), double(bias)).numpy()
    tolerance = 2e-2 if dtype in CODEBOOKS else 1e-6 if dtype in FLOATS else 2e-4
    assert_close(ops.matmul(x, matrix, bias), expected, tolerance)


@pytest.mark.parametrize(("dtype", "kind"), [("f16", "float16"), ("bf16", "bfloat16")])
def test_rounding_to_16_bits(dtype: str, kind: str) -> None:
    weights = normal(33, 50) * np.exp2(np.linspace(-25, 14, 50)).astype(np.float32)
    rounded = torch.from_numpy(weights).to(getattr(torch, kind)).float().numpy()
    np.testing.assert_array_equal(ops.quantize(weights, dtype).dequantize(), rounded)


@pytest.mark.parametrize("width", [7, 64, 130])
def test_norms_and_softmax(width: int) -> None:
    x, weight, bias = 3 * normal(4, 5, width) + 1, normal(width, seed=2), normal(width, seed=3)
    sizes = (width,)
    assert_close(
        ops.rms_norm(x, weight, 1e-6), functional.rms_norm(double(x), sizes, double(weight), 1e-6).numpy(), 1e-6
    )
    expected = functional.layer_norm(double(x), sizes, double(weight), double(bias), 1e-6).numpy()
    assert_close(ops.layer_norm(x, weight, bias, 1e-6), expected, 1e-6)
    assert_close(ops.softmax(x), functional.softmax(double(x), dim=-1).numpy(), 1e-6)


def test_activations() -> None:
    x = np.linspace(-12, 12, 963, dtype=np.float32)
    pairs = (
        (ops.silu(x), functional.silu(double(x))),
        (ops.gelu(x, "tanh"), functional.gelu(double(x), approximate="tanh")),
        (ops.gelu(x, "erf"), functional.gelu(double(x))),
        (ops.gelu(x, "quick"), double(x) * torch.sigmoid(1.702 * double(x))),
    )
    for found, expected in pairs:
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_rope() -> None:
    """As transformers rotates LLaMA's heads (`rotate_half`)."""
    x, positions = normal(6, 3, 20), np.array([0, 1, 5, 100, 1000, 4095])
    inv_freq = (10000.0 ** (-np.arange(10) / 10)).astype(np.float32)
    angles = torch.outer(torch.from_numpy(positions).float(), torch.from_numpy(inv_freq)).double()
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    first, second = double(x).chunk(2, dim=-1)
    expected = double(x) * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
    assert_close(ops.rope(x, positions, inv_freq), expected.numpy(), 1e-6)


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
@pytest.mark.parametrize(("rows", "heads", "kv_heads"), [(1, 4, 4), (40, 6, 2), (300, 8, 1)])
def test_attention(rows: int, heads: int, kv_heads: int, kv_dtype: str) -> None:
    q, k, v = normal(rows, heads, 24), normal(300, kv_heads, 24, seed=2), normal(300, kv_heads, 24, seed=3)
    mask = torch.ones(rows, 300, dtype=torch.bool).tril(300 - rows)
    by_head = [double(x).transpose(0, 1) for x in (q, k, v)]
    expected = functional.scaled_dot_product_attention(*by_head, attn_mask=mask, enable_gqa=True).transpose(0, 1)
    found = ops.attention(q, k, v, kv_dtype="f32" if kv_dtype == "f32" else "f16")
    assert_close(found, expected.numpy(), 2e-6 if kv_dtype == "f32" else 2e-3)
    everything = functional.scaled_dot_product_attention(*by_head, enable_gqa=True).transpose(0, 1)
    assert_close(ops.attention(q, k, v, causal=False), everything.numpy(), 2e-6)
