"""Beam search: chooses the sequences of tokens to continue. Independent of sessions and threads.

The rules match transformers: how many continuations a step considers, which of them can be results, and when a search
ends.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llamac import _core
from llamac.engine.generation.logprobs import TokenLogprobs, token_logprobs
from llamac.engine.generation.output import FinishReason
from llamac.errors import ArgumentError

if TYPE_CHECKING:
    from llamac.engine.sampling.sampler import Sampler

FindStop = Callable[[Sequence[int]], "str | None"]  # returns the stop string in the text of new tokens


@dataclass(frozen=True)
class Beam:
    """A sequence of new tokens.

    Attributes:
        sampler: The state of bans, penalties and the guide after these tokens.
        tokens: The tokens, without the stop token.
        total: The sum of their log probabilities, including the stop token's.
        logprobs: The log probabilities of the tokens, if requested.
        reason: Why the sequence has ended; None if it has not.
        stopped_by: The stop token or stop string that ended it.
        score: The score by which ended sequences are ranked.
    """

    sampler: Sampler
    tokens: tuple[int, ...] = ()
    total: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()
    reason: FinishReason | None = None
    stopped_by: int | str | None = None
    score: float = -math.inf


class BeamSearch:
    """The sequences of one search.

    Attributes:
        beams: The sequences to continue, best first. Initially one without tokens.
        finished: The best sequences that have ended, best first, at most as many as the width.
        is_done: Whether the search has ended.
    """

    def __init__(
        self, sampler: Sampler, prompt: Sequence[int], n_ids: int, limit: tuple[int, FinishReason], find_stop: FindStop
    ) -> None:
        """Start a search.

        Args:
            sampler: A sampler with the parameters of the request.
            prompt: Ids of the prompt.
            n_ids: The number of logits to use; the rest is padding.
            limit: The maximum number of new tokens, and the finish reason of sequences that reach it.
            find_stop: Returns the stop string in the text of new tokens.
        """
        self.beams = [Beam(sampler)]
        self.finished: list[Beam] = []
        self.is_done = False
        self._stop_ids = sampler.stop_ids
        self._params = sampler.params
        self._prompt = array("i", prompt)
        self._n_ids = n_ids
        self._most, self._limit_reason = limit
        self._find_stop = find_stop
        self._n_candidates = max(2, 1 + len(self._stop_ids)) * sampler.params.beam_width

    def is_ready(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for each guide. Return whether all guides are ready for `advance`."""
        return all(beam.sampler.is_ready(timeout) for beam in self.beams)

    def advance(self, rows: Sequence[Any]) -> list[int]:
        """Add a token to every sequence.

        Args:
            rows: The logits after each of `beams`.

        Returns:
            For each of the new `beams`, the index of the one that it continues.

        Raises:
            LlamacError: If the logits give no probabilities, or no sequence is left.
        """
        width = self._params.beam_width
        found: list[tuple[float, int, int]] = []
        for parent, (beam, row) in enumerate(zip(self.beams, rows, strict=True)):
            found += [(beam.total + logprob, parent, token) for token, logprob in self._best_tokens(beam, row)]
        found = sorted(found, key=lambda entry: -entry[0])[: self._n_candidates]
        running: list[tuple[Beam, int]] = []
        finished = list(self.finished)
        for place, (total, parent, token) in enumerate(found):
            if place >= width <= len(running):
                break
            beam = self._continued(self.beams[parent], token, total, rows[parent])
            if beam.reason is None:
                running.append((beam, parent))
            elif place < width:
                finished.append(beam)
        if not running and not finished:
            raise ArgumentError("the beam search has no sequence left: the guide and the bans exclude every token")
        finished.sort(key=lambda beam: -beam.score)
        del finished[width:]
        self.beams, self.finished = [beam for beam, _ in running[:width]], finished
        self.is_done = not self._can_improve()
        return [parent for _, parent in running[:width]]

    def results(self, reason: FinishReason) -> list[Beam]:
        """Return the sequences so far, best first: ended sequences, then unfinished ones, which end with `reason`."""
        ended = [replace(beam, reason=reason, score=self._score(beam.total, len(beam.tokens))) for beam in self.beams]
        ended.sort(key=lambda beam: -beam.score)
        return self.finished + ([] if self.is_done else ended)

    def _best_tokens(self, beam: Beam, row: Any) -> list[tuple[int, float]]:
        """Return the most probable next tokens with their log probabilities, as many as a step can need."""
        n = min(self._n_candidates, self._n_ids)
        if not beam.sampler.changes_rows:
            return _core.logprobs(row, self._n_ids, 0, n)[1:]
        return self._best_adjusted(beam, row, n)

    def _best_adjusted(self, beam: Beam, row: Any, n: int) -> list[tuple[int, float]]:
        """Like `_best_tokens`, with adjusted log probabilities."""
        import numpy as np

        logits = np.frombuffer(row, np.float32)[: self._n_ids].astype(np.float64)
        logits -= logits.max()
        scores = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
        beam.sampler.change(scores, (*self._prompt, *beam.tokens))
        if np.isposinf(scores).any():
            raise ArgumentError("a logit is infinite, after the logits processors")
        best = np.argpartition(-scores, n - 1)[:n]
        best = best[np.argsort(-scores[best], kind="stable")]
        left = self._most - len(beam.tokens)
        kept = dict.fromkeys(beam.sampler.within(int(token), left) for token in best if scores[token] > -np.inf)
        return [(token, float(scores[token])) for token in kept if scores[token] > -np.inf]

    def _continued(self, beam: Beam, token: int, total: float, row: Any) -> Beam:
        """Return the beam extended by a token, and ended if a rule applies."""
        score = self._score(total, len(beam.tokens) + 1)
        if token in self._stop_ids:
            return replace(beam, total=total, reason="stop", stopped_by=token, score=score)
        logprobs, top = beam.logprobs, self._params.logprobs
        if top is not None:
            logprobs = (*logprobs, token_logprobs(row, self._n_ids, token, top))
        sampler = beam.sampler.fork()
        sampler.accept(token)
        longer = Beam(sampler, (*beam.tokens, token), total, logprobs)
        if len(longer.tokens) > self._params.min_tokens and (stop := self._find_stop(longer.tokens)) is not None:
            return replace(longer, reason="stop", stopped_by=stop, score=score)
        is_last = len(longer.tokens) == self._most
        if sampler.is_complete or (is_last and sampler.is_accepting):
            return replace(longer, reason="stop", score=score)
        if is_last:
            return replace(longer, reason=self._limit_reason, score=score)
        return longer

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(max(length, 1), self._params.length_penalty)

    def _can_improve(self) -> bool:
        """Return whether a running sequence could still beat the ended ones."""
        if not self.beams:
            return False
        if len(self.finished) < self._params.beam_width:
            return True
        if self._params.early_stopping is True:
            return False
        length = len(self.beams[0].tokens)
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            length = self._most
        return self._score(self.beams[0].total, length) > self.finished[-1].score
