"""A draft model: a smaller model with the same vocabulary that guesses what a session's model will generate."""

from __future__ import annotations

import time
import weakref
from array import array
from typing import TYPE_CHECKING

from llamac.arguments import wrong_type
from llamac.engine.draft_plan import MEASURED
from llamac.errors import ArgumentError

if TYPE_CHECKING:
    from llamac import _core
    from llamac.engine.model import Model
    from llamac.engine.session import Session

FIRST_RATE = 0.7  # of right drafts, before any has been tried
TRIALS = 4.0  # the weight of the first rate
DECAY = 0.95  # of a trial's weight with each later draft
FORGET = 0.99  # of all trials' weight with each step without drafts: in time, drafts get another chance

_matching: weakref.WeakKeyDictionary[object, weakref.WeakSet[Model]] = weakref.WeakKeyDictionary()


def check_draft_model(model: Model, draft_model: Model) -> None:
    """Reject a draft model whose token ids have other meanings.

    Raises:
        ArgumentError: If the vocabularies differ.
    """
    from llamac.engine.model import Model

    if not isinstance(draft_model, Model):
        raise wrong_type("draft_model", draft_model, "a Model: open one with llamac.load(path)")
    known = _matching.setdefault(model, weakref.WeakSet())
    if draft_model in known:
        return
    draft_model._check_open()
    rule = "a draft model needs the vocabulary of the model that it drafts for"
    counts = draft_model.n_token_ids, model.n_token_ids
    if counts[0] != counts[1]:
        raise ArgumentError(f"the draft model has {counts[0]} tokens, but the model has {counts[1]}: {rule}")
    if model.has_tokenizer and draft_model.has_tokenizer:
        ours, theirs = model.tokenizer, draft_model.tokenizer
        if ours is not theirs and ours._data != theirs._data:
            for token in range(counts[0]):
                left, right = theirs.token_bytes(token), ours.token_bytes(token)
                if left != right:
                    raise ArgumentError(f"token {token} is {left!r} in the draft model, but {right!r} here: {rule}")
    known.add(draft_model)


def draft_model_of(session: Session) -> DraftModel | None:
    """What a session's draft model, if it has one, knows about sequence 0."""
    if session._drafting is None and session._draft_model is not None:
        session._drafting = DraftModel(session._draft_model, session)
    return session._drafting


class DraftModel:
    """The draft model's side of a generation: a session that follows the tokens, and how often drafts were right."""

    def __init__(self, draft_model: Model, session: Session) -> None:
        """Open the draft model's session.

        Args:
            draft_model: The draft model.
            session: The session that it drafts for. Its cancel scope cancels the drafts, too.
        """
        context = min(session.context, draft_model.config["context"])
        self._session = draft_model.session(context=context, threads=session.threads)
        self._session._core.follow(session._core)
        self._n_ids = session.model.n_token_ids
        self._seconds: list[float] = []  # of recent steps of the draft model
        self._right, self._trials = FIRST_RATE * TRIALS, TRIALS

    @property
    def rate(self) -> float:
        """The part of right drafts."""
        return self._right / self._trials

    @property
    def seconds(self) -> float | None:
        """Seconds that a draft takes; None if none was measured."""
        return sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else None

    def learn(self, right: int, tried: int) -> None:
        """Record that of some drafts, in order, the first ones were right and the next one, if any, was not."""
        for i in range(min(right + 1, tried)):
            self._right = DECAY * self._right + (i < right)
            self._trials = DECAY * self._trials + 1

    def rest(self) -> None:
        """Record a step without drafts."""
        self._right = FORGET * self._right + (1 - FORGET) * FIRST_RATE * TRIALS
        self._trials = FORGET * self._trials + (1 - FORGET) * TRIALS

    def draft(self, ids: array[int], n: int, sampling: _core.Sampling) -> list[int]:
        """Draw the next n tokens as the request would, from the draft model's logits: same seed, same positions.

        Where both models give the same probabilities, both draw the same token.

        Args:
            ids: The prompt and the tokens so far.
            n: How many; fewer fit if the draft model's context is short.
            sampling: The request's settings.
        """
        session = self._session
        n = min(n, session.context - len(ids))
        if n <= 0:
            return []
        session._prefill_rest(ids)
        found: list[int] = []
        while True:
            found.append(session._core.sample(sampling, self._n_ids, len(ids) + len(found)))
            if len(found) == n:
                return found
            begun = time.perf_counter()
            session.step(found[-1])
            self._seconds = [*self._seconds[1 - MEASURED :], time.perf_counter() - begun]

    def close(self) -> None:
        """Free the session."""
        self._session.close()
