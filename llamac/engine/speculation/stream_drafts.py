"""Speculation in a stream: computes drafts of the next tokens in the same pass as a generation's tokens.

A draft becomes a token only if the sampler draws the same token from the logits before it. The sampler draws each token
once and in order, exactly as without drafts. The tokens are therefore the same for every sampling method, and after
each token the session is in the same state.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamac.engine.rows import draft_rows
from llamac.engine.sampling.device_draws import drawing_on_device
from llamac.engine.speculation.draft_model import DraftModel, open_drafting
from llamac.engine.speculation.draft_plan import Credit, choose, max_drafts, pass_bytes, row_costs
from llamac.engine.speculation.drafter import Drafter
from llamac.engine.speculation.lookup import Lookup
from llamac.engine.speculation.mtp import KEPT
from llamac.errors import CancelledError, DeviceError, LlamacError, OutOfMemoryError

if TYPE_CHECKING:
    from llamac.engine.generation.output import Output
    from llamac.engine.session import Session
    from llamac.engine.speculation.states import States

SPARE_PAGES = 8  # pages of the KV budget that drafts leave free for others


def drafter_of(session: Session) -> Drafter | None:
    """Return what drafts for sequence 0 of a session: its draft model, otherwise its head, or nothing."""
    if session._drafting is None and session._draft_model is not None:
        session._drafting = DraftModel(open_drafting(session._draft_model, session, 1), session.model.n_token_ids)
    elif session._drafting is None and session._head is not None:
        session._drafting = session._head.drafter(0)
    return session._drafting


class Speculation:
    """Drafts for sequence 0 of a session, for one generation."""

    def __init__(self, session: Session, output: Output, *, draws_on_device: bool = False) -> None:
        """Prepare drafts for a generation.

        Args:
            session: The session. Its sequence 0 will contain the prompt.
            output: The generation.
            draws_on_device: Whether the session's device may draw tokens; the session has no logits of drawn ones.
        """
        self._session = session
        self._output = output
        self._draws_on_device = draws_on_device
        self._drawn: list[int | None] = []  # the tokens after the rows of the last pass with drafts
        self._is_on = output.params.speculation
        self._costs = row_costs(session)
        self._credit = Credit()
        self._lookup: Lookup | None = None
        self._model: Drafter | None = None
        self._states: States | None = None  # the hidden states of the last pass, if the drafter reads them
        self._max_drafts = max_drafts(session._core)
        self._drafts: list[int] = []  # of the last pass
        self._n_tokens = 0  # number of tokens before the drafts in the last pass
        self._n_accepted = 0  # number of accepted drafts of the last pass
        self._from_model = False  # whether these drafts came from the draft model
        self._cost = 1.0  # cost of the last pass and its drafts, in steps

    def begin(self) -> States | None:
        """Begin the text, before its prompt is computed. Returns what receives hidden states, as `states` does."""
        prompt = self._output.prompt
        if self._is_on and not self._costs.is_tiny:
            with contextlib.suppress(LlamacError):
                self._model = drafter_of(self._session)
            if self._model is not None:
                self._model.follow(prompt)
        return self.states(min(KEPT, len(prompt)))

    def states(self, rows: int) -> States | None:
        """Return what receives the hidden states of the next pass, or of its last rows; None: they are not needed."""
        self._states = None if self._model is None or not self._is_on else self._model.states(rows)
        return self._states

    def observe_prompt(self, rows: int, last: int, seconds: float) -> None:
        """Record how long the prompt took.

        Args:
            rows: The number of computed tokens.
            last: The number of those that were computed last, with hidden states.
            seconds: The time.
        """
        self._costs.observe_prompt(rows, seconds)
        if self._model is not None:
            kept = min(last, KEPT)
            self._model.keep(len(self._output.prompt) - kept, self._states, 0, kept)

    def extend(self, tokens: Sequence[int], left: int) -> Sequence[int]:
        """Append generated tokens to sequence 0, and store the logits of the last one, using drafts if they pay off.

        Args:
            tokens: The tokens, at least one.
            left: The number of tokens that can be generated after these.

        Returns:
            The tokens that the caller must compute without drafts. `observe` records that pass.
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
        remaining = self._accept(tokens)
        if remaining:
            self._settle()
            if (drafts := self._choose(len(remaining), left)) and self._compute(remaining, drafts):
                return ()
        return remaining

    @property
    def drawn(self) -> int | None:
        """The token that the device drew after the last tokens that `extend` appended; None: it drew none."""
        return self._drawn[self._n_tokens + self._n_accepted - 1] if self._drawn else None

    def observe(self, tokens: Sequence[int], seconds: float) -> None:
        """Record a pass without drafts, which computed the text's last tokens."""
        if self._is_on:
            self._n_tokens = rows = len(tokens)
            self._costs.observe(rows, seconds)
            self._keep(tokens, 0, rows)

    def end(self) -> None:
        """Discard the remaining drafts."""
        if self._drafts and not self._session.closed:
            self._session._core.discard_drafts()
        self._drafts = []

    def _begin(self) -> None:
        self._lookup = Lookup(self._output.prompt)

    def _keep(self, tokens: Sequence[int], first: int, n: int) -> None:
        """Give the drafter the hidden states of rows of the last pass: of the first n of the text's last tokens."""
        if self._model is not None and self._lookup is not None:
            self._model.keep(len(self._lookup.ids) - len(tokens), self._states, first, n)

    def _accept(self, tokens: Sequence[int]) -> Sequence[int]:
        """Append the leading tokens that equal their drafts, without computing. Returns the remaining tokens."""
        n = 0
        while self._n_accepted < len(self._drafts) and n < len(tokens) and self._drafts[self._n_accepted] == tokens[n]:
            self._n_accepted += 1
            n += 1
        if n:
            self._output.accepted += n
            self._session.accept(self._n_tokens + self._n_accepted - 1)
            self._keep(tokens, self._n_tokens + self._n_accepted - n, n)
        return tokens[n:]

    def _settle(self) -> None:
        """Record the outcome of the last pass."""
        if self._drafts:
            if self._from_model and self._model is not None:
                self._model.learn(self._n_accepted, len(self._drafts))
            self._credit.settle(self._cost, 1 + self._n_accepted)
        else:
            self._credit.skip(self._lookup is not None and self._lookup.was_right)
            if self._model is not None:
                self._model.skip()
        self._drafts, self._n_accepted = [], 0

    def _choose(self, n_tokens: int, left: int) -> list[int]:
        """Return drafts for the next pass, none if they would not pay off."""
        lookup, session = self._lookup, self._session
        self._from_model, self._cost = False, 0.0
        assert lookup is not None
        room = session.context - session._core.length() - n_tokens
        limit = min(self._max_drafts, left - 1, room)
        if limit < 1 or not self._costs.is_known or not self._has_memory():
            return []
        costs = self._costs
        chosen = choose(lookup, self._model, costs.relative, costs.step, self._credit.left, limit)
        self._from_model, self._cost = chosen.from_model, chosen.draft_cost
        if chosen.from_model and self._model is not None:
            return self._draft_with_model(self._model, chosen.n)
        return lookup.draft(chosen.n) if chosen.n else []

    def _draft_with_model(self, model: Drafter, n: int) -> list[int]:
        assert self._lookup is not None
        try:
            return model.draft(self._lookup.ids, n, self._output.sampler)
        except CancelledError:
            raise
        except LlamacError as error:  # no memory, or the draft model has been closed: continue without it
            # if the session has lost its own device, its next pass and the head continue elsewhere or fail
            if not (isinstance(error, DeviceError) and error.lost and self._session._draft_model is None):
                self._model = None
            return []

    def _has_memory(self) -> bool:
        """Return whether pages for drafts leave enough of the KV budget for others."""
        model = self._session.model
        budget = model.kv_budget
        if budget is None:
            return True
        core = self._session._core
        _, page_bytes = core.page_size()
        return model.kv_bytes + SPARE_PAGES * page_bytes + pass_bytes(core, 1) <= budget

    def _compute(self, tokens: Sequence[int], drafts: list[int]) -> bool:
        """Append tokens, and compute drafts in the same pass. Returns whether there was enough memory."""
        begun, rows = time.perf_counter(), len(tokens) + len(drafts)
        first, sampler = self._output.length - len(tokens) + 1, self._output.sampler
        draws = [sampler.device_draw(first + i) if self._draws_on_device else None for i in range(rows)]
        chain = draft_rows([*tokens, *drafts], range(-1, rows - 1), 0)
        try:
            with drawing_on_device(self._session, draws) as self._drawn:
                self._session._run_drafts(chain, None, self.states(rows))
        except OutOfMemoryError:
            self._is_on = False
            return False
        self._session.accept(len(tokens) - 1)
        self._keep(tokens, 0, len(tokens))
        cost = self._costs.observe(rows, time.perf_counter() - begun)
        self._cost += cost - self._costs.relative[len(tokens)] + 1  # relative to a pass with only the tokens' rows
        self._drafts, self._n_tokens = drafts, len(tokens)
        self._output.drafted += len(drafts)
        return True
