"""Log probabilities of tokens: of those that were generated, and of the prompt's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamac import _core
from llamac.errors import CancelledError

if TYPE_CHECKING:
    from llamac.engine.session import Session

CHUNK = 32  # rows of a prompt whose logits are held at a time
CHUNK_LOGITS = 1 << 22  # numbers in them: their log probabilities take about 50 ms, and other requests wait


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the probabilities that the model gives at one place.

    They are those of the model's own distribution: of the softmax of the logits, before penalties, temperature and
    filters.

    Attributes:
        token: The token at this place.
        logprob: Its log probability.
        top: The most probable tokens there, each with its log probability, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Any, n: int, token: int, top: int) -> TokenLogprobs:
    """Describe a token.

    Args:
        logits: A row of float32.
        n: Logits that count.
        token: The token.
        top: How many of the most probable tokens to add.
    """
    return described(_core.logprobs(logits, n, token, min(top, n)))


def described(found: list[tuple[int, float]]) -> TokenLogprobs:
    """The core's result: a token, then the most probable ones."""
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
    """The most rows of a prompt whose logits are held at a time."""
    return max(1, min(CHUNK, CHUNK_LOGITS // vocab_size))


def score_rows(
    rows: Any, tokens: Sequence[int], top: int, n: int, is_cancelled: Callable[[], bool]
) -> list[TokenLogprobs | None]:
    """The log probabilities of a token in each row; of the first rows only, once `is_cancelled` says so.

    With a `top` of the whole vocabulary, one row can take tenths of a second.
    """
    known = range(n)  # prompts may hold padding ids, which no draw can give
    found: list[TokenLogprobs | None] = []
    for row, token in zip(rows, tokens, strict=True):
        if is_cancelled():
            break
        found.append(token_logprobs(row, n, token, top) if token in known else TokenLogprobs(token, float("-inf")))
    return found
