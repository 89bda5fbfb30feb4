"""Requests for several candidates: the parameters of each, and the result that combines them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llamac import _core
from llamac.engine.generation.output import Completion
from llamac.engine.sampling.params import MAX_CANDIDATE, ResolvedParams, SamplingParams
from llamac.errors import ArgumentError

if TYPE_CHECKING:
    from llamac.engine.batching.request import Request
    from llamac.engine.prompts.overflow import FittedPrompt
    from llamac.engine.session import Session

POLL_S = 0.02  # interval of checks for the cancellation of a session
SEQUENCES = 32  # maximum number of candidates that a session computes at a time

# Parameters that a beam search would ignore, with their neutral values.
WITHOUT_BEAMS: dict[str, object] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "xtc_probability": 0.0,
    "mirostat_tau": 0.0,
    "reasoning_budget": None,
}

STREAMS_ONE = (
    "a stream has one candidate, but the request asks for {}: use generate or chat, or Engine.submit, whose "
    "Request.candidates are streams"
)


def asks_for_several(params: ResolvedParams) -> bool:
    """Return whether a request generates more than one sequence of tokens."""
    return count(params) > 1


def count(params: ResolvedParams) -> int:
    """Return the number of sequences of tokens that a request generates."""
    return max(params.n, params.best_of or 1, params.beam_width)


def check_counts(params: ResolvedParams) -> None:
    """Check that the numbers of candidates are consistent.

    Raises:
        ArgumentError: If they contradict each other.
    """
    for name, most in (
        ("best_of", params.best_of),
        ("beam_width", params.beam_width if params.beam_width > 1 else None),
    ):
        if most is not None and params.n > most:
            raise ArgumentError(f"n is {params.n}, expected at most {name}, which is {most}")
    if params.beam_width > 1 and params.best_of is not None:
        raise ArgumentError("best_of and beam_width cannot be combined: a beam search returns the n best of its beams")
    if params.candidate + count(params) - 1 > MAX_CANDIDATE:
        raise ArgumentError(f"candidate is {params.candidate}, expected at most {MAX_CANDIDATE} for the last of them")


def check_beams(request: SamplingParams) -> None:
    """Check that a beam search ignores no parameter of a request.

    Raises:
        ArgumentError: If it would ignore one.
    """
    if (request.beam_width or 1) == 1:
        return
    for name, nothing in WITHOUT_BEAMS.items():
        if getattr(request, name) not in (None, nothing):
            reason = "it forces tokens" if name == "reasoning_budget" else "nothing is drawn"
            raise ArgumentError(f"beam search does not support {name}, because {reason}: omit it")
    if request.context_overflow == "shift":
        raise ArgumentError(
            "beam search does not support context_overflow='shift', because its sequences are ranked by the "
            "probabilities of whole texts: choose another"
        )


def check_streams(params: ResolvedParams) -> None:
    """Check that a stream has a single candidate.

    Raises:
        ArgumentError: If the request asks for several.
    """
    for name in ("n", "best_of", "beam_width"):
        if (getattr(params, name) or 1) > 1:
            raise ArgumentError(STREAMS_ONE.format(f"{name}={getattr(params, name)}"))


def params_of_each(params: ResolvedParams) -> list[ResolvedParams]:
    """Return the parameters that would request each candidate alone."""
    logprobs = params.logprobs
    if (params.best_of or 1) > params.n and logprobs is None:
        logprobs = 0  # to rank them
    one = replace(params, n=1, best_of=None, logprobs=logprobs)
    first = replace(one, candidate=params.candidate)
    # the prompt's log probabilities are the same for all
    rest = [replace(one, candidate=params.candidate + i, prompt_logprobs=None) for i in range(1, count(params))]
    return [first, *rest]


def combined(found: Sequence[Completion], params: ResolvedParams) -> Completion:
    """Combine candidates into the result of a request: the first candidate, with the others as an attribute.

    Args:
        found: The candidates, in the order of their numbers.
        params: The parameters of the request.
    """
    prompt = found[0].prompt_logprobs
    choices = [replace(completion, prompt_logprobs=prompt) for completion in found]
    if (params.best_of or 1) > params.n:
        scored = [replace(completion, score=_mean_logprob(completion)) for completion in choices]
        choices = sorted(scored, key=_rank)[: params.n]
    if params.logprobs is None:
        choices = [replace(completion, logprobs=None) for completion in choices]
    first, *others = choices
    return replace(first, others=tuple(others))


def _mean_logprob(completion: Completion) -> float:
    """Return the mean log probability of a candidate's tokens, or the worst score if it has none."""
    entries = completion.logprobs or []
    return math.fsum(entry.logprob for entry in entries) / len(entries) if entries else -math.inf


def _rank(completion: Completion) -> tuple[bool, float]:
    """Return the sort key of candidates: complete ones first, then the higher score."""
    was_cut = completion.finish_reason in ("cancelled", "deadline")
    return was_cut, math.inf if completion.score is None else -completion.score


def generate_several(session: Session, prompt: FittedPrompt, params: ResolvedParams) -> Completion:
    """Generate the candidates of a request that continues sequence 0 of a session.

    The session computes the prompt first. A temporary engine computes the candidates, which share the prompt's memory.
    """
    scope = _core.CancelScope(session._core)
    return scope.run(lambda: _generate_several(scope, session, prompt, params))


def _generate_several(
    scope: _core.CancelScope, session: Session, prompt: FittedPrompt, params: ResolvedParams
) -> Completion:
    from llamac.engine.batching.engine import Engine

    begun, reused = time.perf_counter(), 0
    if len(prompt.ids) > 1:
        reused = session._prefill_missing(prompt.ids[:-1])
    else:
        session.truncate(0)
    seconds = time.perf_counter() - begun
    with Engine(
        session.model,
        max_sequences=max(params.beam_width, min(count(params), SEQUENCES)),
        context=session.context,
        kv_dtype=session.kv_dtype,
        threads=None if session._default_threads is not None else session._threads,
        isa=session.isa,
        numerics=session.numerics,
        prefix_cache=False,
    ) as engine:
        request = engine._requested(prompt, params, 0, None)
        for candidate in request.candidates:
            candidate._source = session._core
        with request:
            engine._enqueue(request, wait=True)
            found = _result_unless(scope, request)
    return _with_prompt(found, params.candidate, reused, seconds)


def _with_prompt(found: Completion, first: int, reused: int, seconds: float) -> Completion:
    """Add the session's computation of the prompt to a result. Candidate `first` did not find its tokens computed."""
    usage, timings = found.usage, replace(found.timings, prefill=found.timings.prefill + seconds)
    if found.candidate == first:
        usage = replace(usage, cached_tokens=min(usage.cached_tokens, reused))
    others = tuple(_with_prompt(other, first, reused, seconds) for other in found.others)
    return replace(found, usage=usage, timings=timings, others=others)


def _result_unless(scope: _core.CancelScope, request: Request) -> Completion:
    """Wait for the result of a request. Cancelling the scope cancels the request."""
    while True:
        try:
            return request.result(POLL_S)
        except TimeoutError:
            if scope.cancelled:
                request.cancel()
