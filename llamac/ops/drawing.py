"""Draws of tokens from logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamac import _core
from llamac.arguments import to_float, to_int
from llamac.engine.hardware.machine import choose_isa
from llamac.engine.sampling.params import MAX_CANDIDATE, MAX_SEED, MIN_POSITIVE
from llamac.errors import ArgumentError
from llamac.ops.arrays import floats

if TYPE_CHECKING:
    from llamac.ops.arrays import Floats


def sample(
    logits: Floats,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    seed: int = 0,
    candidate: int = 0,
    position: int = 0,
    isa: str | None = None,
) -> int:
    """Draw a token as a generation does: temperature, top-k, top-p, min-p, typical-p, XTC, then the draw.

    The random number is a function of seed, candidate and position (Philox, Salmon et al. 2011). `SamplingParams`
    describes the filters.

    Args:
        logits: (vocabulary), float32. Tokens whose logit is NaN or -inf are never drawn. A generation draws from the
            first `model.n_token_ids` logits of a model; the rest is padding.
        temperature: Divisor of the logits, 0 to 1e6. 0: the most probable token; ties go to the lowest id.
        top_k: Keep the k most probable tokens. 0: off.
        top_p: Keep the most probable tokens that together reach this probability. 1: off.
        min_p: Keep the tokens that are at least this probable relative to the best one. 0: off.
        typical_p: Keep the tokens of typical surprise that together reach this probability. 1: off.
        xtc_probability: The probability of excluding the most probable tokens but one. 0: off.
        xtc_threshold: The probability from which on they are excluded.
        seed: 0 to 2^64 - 1.
        candidate: Selects one of several independent draws with the same seed.
        position: The position of the token in the text: the number of tokens before it, prompt included.
        isa: The kernel set. None: `LLAMAC_ISA`, otherwise the best of this machine. It does not change the token.

    Returns:
        The token's id.

    Raises:
        ArgumentError: If an argument is out of range; `ArgumentTypeError` if logits is not an array of float32.
        ModelError: If a logit is infinite, or none is a number.
        UnsupportedError: If this machine does not support the kernel set.
    """
    logits = floats(logits, "logits", ("vocabulary",))
    whole = {"seed": (seed, MAX_SEED), "candidate": (candidate, MAX_CANDIDATE), "position": (position, MAX_SEED)}
    for name, (value, high) in whole.items():
        if not 0 <= to_int(value, name) <= high:
            raise ArgumentError(f"{name} is {value}, expected 0 to {high}")
    settings = _core.Sampling(
        temperature,
        top_k,
        _share(top_p, "top_p"),
        min_p,
        seed,
        candidate=candidate,
        typical_p=_share(typical_p, "typical_p"),
        xtc_probability=to_float(xtc_probability, "xtc_probability"),
        xtc_threshold=to_float(xtc_threshold, "xtc_threshold"),
    )
    return _core.op_sample(logits.data, settings, position, choose_isa(isa))


def _share(value: float, name: str) -> float:
    """A probability above 0, which also is above 0 in the core's float32."""
    number = to_float(value, name)
    if not 0 < number <= 1:
        raise ArgumentError(f"{name} is {number:g}, expected more than 0 and at most 1")
    return max(number, MIN_POSITIVE)
