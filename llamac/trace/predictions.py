"""Summarizes logits: the next token's probability and rank, the likeliest tokens, the entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Ids = NDArray[np.int32]

BLOCK_LOGITS = 1 << 18  # of rows that are compared at once: they stay in the processor's cache
NEVER = -1e4  # a difference of logits whose exponential is 0


class Predictions(NamedTuple):
    """The predictions of n positions. Logarithms are natural.

    Attributes:
        top: The likeliest tokens, the likeliest first: (n, k).
        top_logprobs: Their log probabilities: (n, k).
        logprob: The log probability of the token that follows; NaN at the last position: (n).
        rank: One more than the number of tokens that are likelier than it; 0 at the last position: (n).
        entropy: The entropy of the distribution: (n).
    """

    top: Ids
    top_logprobs: Floats
    logprob: Floats
    rank: Ids
    entropy: Floats


def predictions(logits: Floats, following: Ids, count: int) -> Predictions:
    """Compare logits with the tokens that follow.

    Args:
        logits: (n, vocab_size).
        following: The token after each position, or -1: (n).
        count: k, the number of likeliest tokens.
    """
    import numpy as np

    rows = max(1, BLOCK_LOGITS // logits.shape[1])
    starts = range(0, len(logits), rows)
    blocks = [_of_block(logits[i : i + rows], following[i : i + rows], count) for i in starts]
    return Predictions(*(np.concatenate(arrays) for arrays in zip(*blocks, strict=True)))


def _of_block(logits: Floats, following: Ids, count: int) -> Predictions:
    import numpy as np

    rows = np.arange(len(logits))
    shifted = np.maximum(logits - logits.max(axis=1, keepdims=True), np.float32(NEVER))
    powers = np.exp(shifted)
    total = powers.sum(axis=1, dtype=np.float64)
    powers *= shifted
    log_total = np.log(total)
    entropy = log_total - powers.sum(axis=1, dtype=np.float64) / total
    known = following >= 0
    chosen = shifted[rows, np.maximum(following, 0)]
    rank = np.where(known, 1 + (shifted > chosen[:, None]).sum(axis=1), 0)
    logprob = np.where(known, chosen - log_total, np.nan)
    top = np.empty((len(logits), min(count, logits.shape[1])), np.int32)
    top_logprobs = np.empty(top.shape, np.float32)
    for i in range(top.shape[1]):
        top[:, i] = shifted.argmax(axis=1)
        top_logprobs[:, i] = shifted[rows, top[:, i]] - log_total
        shifted[rows, top[:, i]] = -np.inf
    return Predictions(top, top_logprobs, logprob.astype(np.float32), rank.astype(np.int32), entropy.astype(np.float32))
