"""Log probabilities of generated tokens and of prompt tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamac import _core
from llamac.errors import CancelledError

if TYPE_CHECKING:
    from llamac.engine.session import Session

CHUNK = 32  # maximum number of prompt rows whose logits are in memory at a time
CHUNK_LOGITS = 1 << 22  # maximum number of these logits: scoring them takes about 50 ms, while other requests wait


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities (natural logarithms) at one position.

    They refer to the model's own distribution: the softmax of the logits, before penalties, temperature and filters.

    Attributes:
        token: The token at this position.
        logprob: Its log probability.
        top: The most probable tokens at this position with their log probabilities, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Any, n: int, token: int, top: int) -> TokenLogprobs:
    """Compute the log probabilities at a token's position.

    Args:
        logits: A row of float32.
        n: The number of logits to use; the rest is padding.
        token: The token.
        top: The number of most probable tokens to add.
    """
    return described(_core.logprobs(logits, n, token, min(top, n)))


def described(found: list[tuple[int, float]]) -> TokenLogprobs:
    """Convert the core's result: a token, then the most probable ones."""
    (token, logprob), *best = found
    return TokenLogprobs(token, logprob, tuple(best))


def score_prompt(
    session: Session, ids: Sequence[int], top: int, is_cancelled: Callable[[], bool]
) -> list[TokenLogprobs | None]:
    """Compute all but the last id of a prompt in sequence 0, which is empty; return the log probabilities of all.

    Raises:
        CancelledError: If it was cancelled.
    """
    found: list[TokenLogprobs | None] = [None]
    n = session.model.n_token_ids
    size = chunk_rows(session._core.vocab_size)
    for start in range(0, len(ids) - 1, size):
        part = ids[start : min(start + size, len(ids) - 1)]
        rows = session.eval(part, logits="all")
        found += score_rows(rows, ids[start + 1 : start + 1 + len(part)], top, n, is_cancelled)
    if is_cancelled():
        raise CancelledError("the generation was cancelled")
    return found


def chunk_rows(vocab_size: int) -> int:
    """Return the maximum number of prompt rows whose logits are in memory at a time."""
    return max(1, min(CHUNK, CHUNK_LOGITS // vocab_size))


def score_rows(
    rows: Any, tokens: Sequence[int], top: int, n: int, is_cancelled: Callable[[], bool]
) -> list[TokenLogprobs | None]:
    """Return the log probabilities of a token in each row. Stops early once `is_cancelled()` is true.

    If `top` is the whole vocabulary, one row can take tenths of a second.
    """
    known = range(n)  # prompts may contain padding ids, which are never sampled
    found: list[TokenLogprobs | None] = []
    for row, token in zip(rows, tokens, strict=True):
        if is_cancelled():
            break
        found.append(token_logprobs(row, n, token, top) if token in known else TokenLogprobs(token, float("-inf")))
    return found
