"""Speculation: extends a session by a generation's tokens, computing drafts of the next ones in the same pass.

A draft is never a token: it is computed ahead, and counts only once the sampler has drawn the same token from the
logits before it. The sampler draws each token as it would without drafts, in order and once, so the tokens are equal
for every way to sample, and a session holds the same tokens after each of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamac.engine.rows import draft_rows
from llamac.engine.speculation.draft_model import DraftModel, draft_model_of
from llamac.engine.speculation.draft_plan import LOGITS_BYTES, MAX_DRAFTS, MIN_DRAFTS, Credit, choose, row_costs
from llamac.engine.speculation.lookup import Lookup
from llamac.errors import CancelledError, LlamacError, OutOfMemoryError

if TYPE_CHECKING:
    from llamac.engine.generation.output import Output
    from llamac.engine.session import Session

SPARE_PAGES = 8  # of the KV budget that drafts leave to others


class Speculation:
    """Drafts for sequence 0 of a session, for one generation."""

    def __init__(self, session: Session, output: Output) -> None:
        """Begin.

        Args:
            session: The session. Its sequence 0 will hold the prompt.
            output: The generation.
        """
        self._session = session
        self._output = output
        self._is_on = output.params.speculation
        self._costs = row_costs(session)
        self._credit = Credit()
        self._lookup: Lookup | None = None
        self._model: DraftModel | None = None
        self._most = min(MAX_DRAFTS, max(MIN_DRAFTS, LOGITS_BYTES // (4 * session._core.vocab_size)))
        self._drafts: list[int] = []  # of the last pass
        self._n_tokens = 0  # that the last pass computed before its drafts
        self._n_right = 0  # drafts of the last pass that became tokens
        self._from_model = False  # whether the draft model made them
        self._cost = 1.0  # of the last pass and its drafts, in steps

    def observe_prompt(self, rows: int, seconds: float) -> None:
        """Record how long the prompt took."""
        self._costs.observe_prompt(rows, seconds)

    def extend(self, tokens: Sequence[int], left: int) -> Sequence[int]:
        """Append generated tokens to sequence 0, and store the logits of the last one, as far as drafts pay.

        Args:
            tokens: The tokens, at least one.
            left: Tokens that can be generated after these.

        Returns:
            The tokens that are to be computed without drafts. `observe` records that pass.
        """
        if self._is_on and not self._drafts and self._costs.is_tiny:
            self._is_on = False
        if not self._is_on:
            return tokens
        if self._lookup is None:
            self._begin()
        assert self._lookup is not None
        for token in tokens:
            self._lookup.push(token)
        rest = self._accept(tokens)
        if rest:
            self._settle()
            if (drafts := self._choose(len(rest), left)) and self._compute(rest, drafts):
                return ()
        return rest

    def observe(self, rows: int, seconds: float) -> None:
        """Record a pass without drafts."""
        if self._is_on:
            self._costs.observe(rows, seconds)
            self._n_tokens = rows

    def end(self) -> None:
        """Forget the drafts that are left."""
        if self._drafts and not self._session.closed:
            self._session._core.discard_drafts()
        self._drafts = []

    def _begin(self) -> None:
        self._lookup = Lookup(self._output.prompt)
        with contextlib.suppress(LlamacError):
            self._model = draft_model_of(self._session)

    def _accept(self, tokens: Sequence[int]) -> Sequence[int]:
        """Append those tokens whose drafts were right, without computing anything. Returns the others."""
        n = 0
        while self._n_right < len(self._drafts) and n < len(tokens) and self._drafts[self._n_right] == tokens[n]:
            self._n_right += 1
            n += 1
        if n:
            self._output.accepted += n
            self._session.accept(self._n_tokens + self._n_right - 1)
        return tokens[n:]

    def _settle(self) -> None:
        """Record what became of the last pass."""
        if self._drafts:
            if self._from_model and self._model is not None:
                self._model.learn(self._n_right, len(self._drafts))
            self._credit.settle(self._cost, 1 + self._n_right)
        else:
            self._credit.rest(self._lookup is not None and self._lookup.was_right)
            if self._model is not None:
                self._model.rest()
        self._drafts, self._n_right = [], 0

    def _choose(self, n_tokens: int, left: int) -> list[int]:
        """Drafts for the next pass, none if they would not pay."""
        lookup, session = self._lookup, self._session
        self._from_model, self._cost = False, 0.0
        assert lookup is not None
        room = session.context - session._core.length() - n_tokens
        most = min(self._most, left - 1, room)
        if most < 1 or not self._costs.is_known or not self._has_memory():
            return []
        costs = self._costs
        chosen = choose(lookup, self._model, costs.relative, costs.step, self._credit.left, most)
        self._from_model, self._cost = chosen.from_model, chosen.making
        if chosen.from_model and self._model is not None:
            return self._draft_with_model(self._model, chosen.n)
        return lookup.draft(chosen.n) if chosen.n else []

    def _draft_with_model(self, model: DraftModel, n: int) -> list[int]:
        assert self._lookup is not None
        try:
            return model.draft(self._lookup.ids, n, self._output.sampler.core)
        except CancelledError:
            raise
        except LlamacError:  # no memory, or the draft model has been closed: the model itself can go on
            self._model = None
            return []

    def _has_memory(self) -> bool:
        """Whether pages for drafts leave enough of the KV budget to others."""
        model = self._session.model
        budget = model.kv_budget
        if budget is None:
            return True
        _, page_bytes = self._session._core.page_size()
        return model.kv_bytes + SPARE_PAGES * page_bytes <= budget

    def _compute(self, tokens: Sequence[int], drafts: list[int]) -> bool:
        """Append tokens, with drafts computed in the same pass. Returns whether there was memory for them."""
        begun, rows = time.perf_counter(), len(tokens) + len(drafts)
        try:
            self._session._run_drafts(draft_rows([*tokens, *drafts], range(-1, rows - 1), 0), None)
        except OutOfMemoryError:
            self._is_on = False
            return False
        self._session.accept(len(tokens) - 1)
        cost = self._costs.observe(rows, time.perf_counter() - begun)
        self._cost += cost - self._costs.relative[len(tokens)] + 1  # a pass without drafts has the rows of the tokens
        self._drafts, self._n_tokens = drafts, len(tokens)
        self._output.drafted += len(drafts)
        return True
