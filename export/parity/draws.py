"""Chooses tokens from logits as docs/sampling.md defines it, independently of the core."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
_LOW = 0xFFFFFFFF


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides a draw: Philox4x32-10 of the seed and the number of tokens before it."""
    counter, key = [position & _LOW, position >> 32, 0, 0], [seed & _LOW, seed >> 32]
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & _LOW, (a >> 32) ^ counter[3] ^ key[1], a & _LOW]
        key = [(key[0] + 0x9E3779B9) & _LOW, (key[1] + 0xBB67AE85) & _LOW]
    return (counter[0] >> 8) * 2.0**-24


def choose(way: str, logits: Logits, seed: int, position: int) -> int:
    """The next token.

    Args:
        way: "greedy": the most probable token. "sampled": one drawn at temperature 1 without filters.
        logits: Shape (n_token_ids,).
        seed: The seed.
        position: The number of tokens before it.
    """
    if way == "greedy":
        return int(logits.argmax())  # the lowest id among equal ones
    sums = _cumulated(logits)
    return int(np.searchsorted(sums, uniform(seed, position) * sums[-1], side="right"))


def is_close(way: str, logits: Logits, token: int, seed: int, position: int, tolerance: float) -> bool:
    """Whether `choose` may give a token if each logit changes by `tolerance` times the largest magnitude."""
    if token >= len(logits):  # another model's
        return False
    change = 2 * tolerance * float(np.abs(logits).max())
    if way == "greedy":
        return bool(logits.max() - logits[token] <= change)
    ends = np.append(0.0, _cumulated(logits))[token : token + 2] / _cumulated(logits)[-1]
    return bool(ends[0] - change <= uniform(seed, position) <= ends[1] + change)


def _cumulated(logits: Logits) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    sums: NDArray[np.float64] = np.cumsum(weights)
    return sums
