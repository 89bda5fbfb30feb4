"""Requests that need more positions than the context has: raises an error, cuts the prompt, or shifts the context."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Literal, NamedTuple

from llamac.errors import ContextFullError

if TYPE_CHECKING:
    from llamac import _core
    from llamac.engine.generation.reading import Reading
    from llamac.engine.sampling.params import ResolvedParams

ContextOverflow = Literal["error", "shift", "truncate_middle"]
CONTEXT_OVERFLOWS: tuple[ContextOverflow, ...] = ("error", "shift", "truncate_middle")
# Models attend strongly to the first tokens, regardless of their content, and degrade without them. Xiao et al.,
# "Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453), section 3.1, keep four.
SINKS = 4


class FittedPrompt(NamedTuple):
    """A prompt that fits the context.

    Attributes:
        ids: Its token ids.
        truncated: Number of tokens that were cut from its middle.
        keep: Number of leading tokens that a shift keeps.
        reading: How to read the answer, if the prompt is a conversation.
    """

    ids: array[int]
    truncated: int
    keep: int
    reading: Reading | None = None


def fit_prompt(ids: array[int], params: ResolvedParams, context: int) -> FittedPrompt:
    """Fit a prompt to the context by the request's policy.

    A cut prompt keeps its first and its last tokens. The cut leaves room for max_tokens new tokens, or for a quarter of
    the context if there is no limit, but never for more than half of the context.

    Raises:
        ContextFullError: If the prompt does not fit and must not be cut, or if only its beginning would remain.
    """
    given, mode = len(ids), params.context_overflow
    if mode == "error":
        if given > context:
            raise overflow_error(f"{given}", params.max_tokens, context)
        return FittedPrompt(ids, 0, 0)
    wanted = params.max_tokens or 1 if mode == "truncate_middle" else 1
    room = min(params.max_tokens or context // 4, context // 2)
    limit = min(context, context + 1 - room)  # the last token needs no position
    head = (SINKS if mode == "shift" else limit // 2) if params.context_keep is None else params.context_keep
    keep = min(head, given)
    if given + wanted - 1 <= context or given <= limit:
        if mode == "shift" and keep >= context:
            raise _nothing_left(keep, context)
        return FittedPrompt(ids, 0, keep)
    if head >= limit:
        raise _nothing_left(head, context)
    return FittedPrompt(ids[:head] + ids[given - (limit - head) :], given - limit, keep)


def overflow_error(count: str, max_tokens: int | None, context: int) -> ContextFullError:
    """Return the error for a prompt with too many tokens. count: the number of tokens, or a lower bound."""
    wanted = "" if max_tokens is None else f", and max_tokens is {max_tokens}"
    return ContextFullError(
        f"the prompt has {count} tokens, but the context holds {context}{wanted}: shorten it, enlarge the context if "
        "the model allows it, or choose what to drop with context_overflow='truncate_middle' or 'shift'"
    )


def _nothing_left(keep: int, context: int) -> ContextFullError:
    return ContextFullError(
        f"the first {keep} tokens of the prompt are kept (context_keep), which leaves no room for others in a context "
        f"of {context} with max_tokens new ones: keep fewer, or enlarge the context"
    )


def make_room(session: _core.Session, sequence: int, keep: int) -> int:
    """Remove the older half of a sequence's positions after the first `keep` ones. Return the number of removed ones.

    Layers with large windows can reduce this number.

    Raises:
        OutOfMemoryError: If there is no memory for copies of shared pages.
    """
    half = max(1, (session.length(sequence) - keep) // 2)
    removed = min(half, session.longest_shift(keep, sequence))
    session.shift(keep, keep + removed, sequence)
    return removed
