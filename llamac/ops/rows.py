"""Operations on rows: norms, softmax, activations, RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from llamac import _core
from llamac.engine.hardware.machine import choose_isa
from llamac.errors import ArgumentError
from llamac.format.flatfile import FIELDS
from llamac.ops.arrays import choice, finite_number, floats, integers, optional

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.ops.arrays import Floats

GeluKind = Literal["tanh", "erf", "quick"]
MAX_POSITION = (1 << 24) - 1  # of a model's context; f32 represents these numbers exactly

_ACTIVATION = next(field for field in FIELDS["config"] if field.name == "activation")


def rms_norm(x: Floats, weight: Floats, eps: float = 1e-5, *, isa: str | None = None) -> Floats:
    """Normalize rows: y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, "RMSNorm").

    Args:
        x: (..., n), float32.
        weight: (n), float32.
        eps: At least 0. A model's is `model.config["norm_eps"]`.
        isa: The kernel set. None: `LLAMAC_ISA`, otherwise the best of this machine. It does not change the bits.

    Returns:
        The shape of x.

    Raises:
        ArgumentError: If a shape or eps is wrong; `ArgumentTypeError` if an array is not of float32.
        UnsupportedError: If this machine does not support the kernel set.
    """
    return _norm(True, x, weight, None, eps, isa)


def layer_norm(
    x: Floats, weight: Floats, bias: Floats | None = None, eps: float = 1e-5, *, isa: str | None = None
) -> Floats:
    """Normalize rows: y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias (Ba et al. 2016).

    The variance is the mean squared deviation, without Bessel's correction.

    Args:
        x: (..., n), float32.
        weight: (n), float32.
        bias: (n), float32. None: 0.
        eps: At least 0. A model's is `model.config["norm_eps"]`.
        isa: The kernel set. None: `LLAMAC_ISA`, otherwise the best of this machine. It does not change the bits.

    Returns:
        The shape of x.

    Raises:
        ArgumentError: If a shape or eps is wrong; `ArgumentTypeError` if an array is not of float32.
        UnsupportedError: If this machine does not support the kernel set.
    """
    return _norm(False, x, weight, bias, eps, isa)


def _norm(is_rms: bool, x: Floats, weight: Floats, bias: Floats | None, eps: float, isa: str | None) -> Floats:
    import numpy as np

    x = floats(x, "x", (..., "n"))
    reason = f"a number for each of the {x.shape[-1]} columns of x"
    weight = floats(weight, "weight", x.shape[-1:], reason)
    bias = None if bias is None else floats(bias, "bias", x.shape[-1:], reason)
    number = finite_number(eps, "eps")
    if number < 0:
        raise ArgumentError(f"eps is {number:g}, expected a number of at least 0")
    y = np.empty_like(x)
    _core.op_norm(is_rms, _rows(x), weight.data, optional(bias), number, _rows(y), choose_isa(isa))
    return y


def _rows(x: Floats) -> memoryview:
    return x.reshape(-1, x.shape[-1]).data


def softmax(x: Floats, *, isa: str | None = None) -> Floats:
    """Compute y = exp(x - max(x)) / sum(exp(x - max(x))) of each row.

    Exponentials below exp(-87) become 0. The sum has 16 partial sums by column modulo 16, as in attention.

    Args:
        x: (..., n), float32. -inf becomes 0. A row whose numbers are all -inf, or that has a NaN, becomes NaN.
        isa: The kernel set. None: `LLAMAC_ISA`, otherwise the best of this machine. It does not change the bits.

    Returns:
        The shape of x.

    Raises:
        ArgumentError: If x is empty; `ArgumentTypeError` if it is not an array of float32.
        UnsupportedError: If this machine does not support the kernel set.
    """
    import numpy as np

    x = floats(x, "x", (..., "n"))
    y = np.empty_like(x)
    _core.op_softmax(_rows(x), _rows(y), choose_isa(isa))
    return y


def silu(x: Floats, *, isa: str | None = None) -> Floats:
    """Compute x / (1 + exp(-x)) (Elfwing et al. 2018), also known as swish.

    Exponentials above exp(87) become exp(87), here and in `gelu`: for x below -1e31, results differ from 0 by more than
    1e-7, and silu(-inf) is -inf.

    Args:
        x: (..., n), float32.
        isa: The kernel set. None: `LLAMAC_ISA`, otherwise the best of this machine. It does not change the bits.

    Returns:
        The shape of x.

    Raises:
        ArgumentError: If x is empty; `ArgumentTypeError` if it is not an array of float32.
        UnsupportedError: If this machine does not support the kernel set.
    """
    return _activated("silu", x, isa)


def gelu(x: Floats, kind: GeluKind = "tanh", *, isa: str | None = None) -> Floats:
    """Compute GELU (Hendrycks and Gimpel 2016).

    Args:
        x: (..., n), float32.
        kind: "tanh": 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). "erf": x Phi(x), with erf by Abramowitz and
            Stegun 7.1.26, whose absolute error is 1.5e-7; infinities give NaN. "quick": x / (1 + exp(-1.702 x)).
        isa: The kernel set. None: `LLAMAC_ISA`, otherwise the best of this machine. It does not change the bits.

    Returns:
        The shape of x.

    Raises:
        ArgumentError: If x is empty or there is no such kind; `ArgumentTypeError` if x is not an array of float32.
        UnsupportedError: If this machine does not support the kernel set.
    """
    names = ("gelu_tanh", "gelu_erf", "quick_gelu")
    return _activated(names[choice(kind, "kind", get_args(GeluKind))], x, isa)


def _activated(name: str, x: Floats, isa: str | None) -> Floats:
    import numpy as np

    x = floats(x, "x", (..., "n"))
    y = np.empty_like(x)
    number = _ACTIVATION.names.index(name) + int(_ACTIVATION.low)
    _core.op_activate(number, _rows(x), _rows(y), choose_isa(isa))
    return y


def rope(
    x: Floats,
    positions: Sequence[int] | NDArray[np.integer],
    inv_freq: Floats,
    *,
    factor: float = 1.0,
    isa: str | None = None,
) -> Floats:
    """Rotate heads by their positions (RoPE, Su et al. 2021).

    The pair (x[j], x[j + half]) is rotated by the angle position * inv_freq[j]: checkpoints of Hugging Face and model
    files pair the halves of a head, GPT-J and GGUF neighbors. Angles are rounded to float32; their sines and cosines
    are computed in float64. The rest of a head, from 2 * half on, does not change.

    Args:
        x: (rows, heads, head_dim), float32.
        positions: (rows), 0 to 2^24 - 1.
        inv_freq: (half), float32, radians per position: theta ** (-2 j / head_dim), often with theta = 10000. A model's
            are `model.file.tensor("rope.0.inv_freq")`.
        factor: Multiplies sines and cosines. A model's is `model.config["rope_attention_factor"][0]`.
        isa: The kernel set. None: `LLAMAC_ISA`, otherwise the best of this machine. It does not change the bits.

    Returns:
        The shape of x.

    Raises:
        ArgumentError: If a shape does not fit or a position is out of range; `ArgumentTypeError` if an array has
            another type.
        UnsupportedError: If this machine does not support the kernel set.
    """
    x = floats(x, "x", ("rows", "heads", "head_dim"))
    places = integers(positions, "positions", len(x), 0, MAX_POSITION)
    inv_freq = floats(inv_freq, "inv_freq", ("half",))
    if 2 * len(inv_freq) > x.shape[2]:
        raise ArgumentError(
            f"inv_freq has {len(inv_freq)} numbers, but heads of {x.shape[2]} numbers have {x.shape[2] // 2} pairs"
        )
    y: Floats = x.copy()
    _core.op_rope(y.data, places.data, inv_freq.data, finite_number(factor, "factor"), choose_isa(isa))
    return y
