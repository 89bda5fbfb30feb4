"""The core's own operations on NumPy arrays: products, norms, softmax, RoPE, activations, attention, quantizing, draws.

    import numpy as np
    from llamac import ops

    weights = np.random.default_rng(1).standard_normal((64, 48), np.float32)
    x = np.ones((3, 48), np.float32)
    y = ops.matmul(x, ops.quantize(weights, "q4"))  # (3, 64)

They run on the engine's kernels: a stage of a forward pass that is built from these operations has the bits that
`Session.observe` returns. Arrays are float32. No function changes its arguments. The bits do not
depend on `isa` or `threads`.
"""

from llamac.ops.attending import attention
from llamac.ops.drawing import sample
from llamac.ops.matrices import Matrix, dequantize, matmul, quantize
from llamac.ops.rows import gelu, layer_norm, rms_norm, rope, silu, softmax

__all__ = [
    "Matrix",
    "attention",
    "dequantize",
    "gelu",
    "layer_norm",
    "matmul",
    "quantize",
    "rms_norm",
    "rope",
    "sample",
    "silu",
    "softmax",
]
