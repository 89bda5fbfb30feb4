"""A draft model: a smaller model with the same vocabulary that predicts the tokens of a session's model."""

from __future__ import annotations

import time
import weakref
from array import array
from typing import TYPE_CHECKING

from llamac.arguments import wrong_type
from llamac.engine.cache.recurrent import has_recurrent_layers, is_recurrent
from llamac.engine.rows import appended_rows, as_id
from llamac.engine.sampling.device_draws import drawing_on_device
from llamac.engine.speculation.drafter import Drafter
from llamac.errors import ArgumentError, ClosedError, OutOfMemoryError, UnsupportedError
from llamac.format.flatfile import without_logits

if TYPE_CHECKING:
    from llamac.engine.model import Model
    from llamac.engine.sampling.sampler import Sampler
    from llamac.engine.session import Session

_matching: weakref.WeakKeyDictionary[object, weakref.WeakSet[Model]] = weakref.WeakKeyDictionary()


def draft_model_of(model: Model, given: Model | None, default: Model | None) -> Model | None:
    """Return the draft model of a session, checked: the given one, or the model's default unless it has been closed.

    Raises:
        ClosedError: If the given one has been closed.
        ArgumentError: If the vocabularies differ.
        UnsupportedError: If the draft model is an encoder or a reranker.
    """
    if given is None:
        given = None if default is None or default.closed else default
    if given is not None:
        check_draft_model(model, given)
    return given


def check_draft_model(model: Model, draft_model: Model) -> None:
    """Check that a draft model generates text with the same vocabulary as a model, which can use drafts.

    Raises:
        ClosedError: If it has been closed.
        ArgumentError: If the vocabularies differ.
        UnsupportedError: If the draft model is an encoder or a reranker.
    """
    from llamac.engine.model import Model

    if not isinstance(draft_model, Model):
        raise wrong_type("draft_model", draft_model, "a Model: open one with llamac.load(path)")
    if draft_model.closed:
        raise ClosedError("the draft model is closed")
    known = _matching.setdefault(model, weakref.WeakSet())
    if draft_model in known:
        return
    if draft_model.config["drafter"] != "none":
        return  # the core checks that the two belong together
    if kind := without_logits(draft_model.config):
        raise UnsupportedError(f"the draft model is {kind}, which generates no text")
    check_vocabulary(
        model, draft_model, "the draft model", "a draft model needs the vocabulary of the model that it drafts for"
    )
    known.add(draft_model)


def check_vocabulary(model: Model, other: Model, name: str, rule: str, model_name: str = "the model") -> None:
    """Check that another model has the same vocabulary as a model.

    Args:
        model: The model.
        other: The other model.
        name: What errors call the other model.
        rule: Why the vocabularies must be equal, for errors.
        model_name: What errors call the model.

    Raises:
        ArgumentError: If the vocabularies differ.
    """
    counts = other.n_token_ids, model.n_token_ids
    if counts[0] != counts[1]:
        raise ArgumentError(f"{name} has {counts[0]} tokens, but {model_name} has {counts[1]}: {rule}")
    if model.has_tokenizer and other.has_tokenizer:
        ours, theirs = model.tokenizer, other.tokenizer
        if ours is not theirs and ours._data != theirs._data:
            for token in range(counts[0]):
                left, right = theirs.token_bytes(token), ours.token_bytes(token)
                if left != right:
                    raise ArgumentError(f"token {token} is {left!r} in {name}, but {right!r} in {model_name}: {rule}")


def sequences_per_text(draft_model: Model) -> int:
    """Return the number of a draft model's sequences for a text.

    Wrong drafts are cut off a sequence. One with recurrent layers could then compute up to 256 tokens again, so it
    makes its drafts in a fork of the text.
    """
    return 2 if has_recurrent_layers(draft_model) else 1


def open_drafting(draft_model: Model, session: Session, sequences: int) -> Session:
    """Open a session of a draft model for drafts of another session. They share a cancel scope.

    Raises:
        OutOfMemoryError: If there is no memory.
    """
    context = min(session._draft_context, draft_model.config["context"])
    if not context:
        raise OutOfMemoryError("max_memory leaves no room for the draft model")
    n = sequences * sequences_per_text(draft_model)
    drafting = draft_model.session(context=context, threads=session.threads, sequences=n)
    drafting._core.follow(session._core)
    return drafting


class DraftModel(Drafter):
    """A draft model in one generation: its sequence, and statistics of its drafts."""

    def __init__(self, session: Session, n_ids: int, sequence: int = 0) -> None:
        """Use a sequence of a draft model's session.

        Args:
            session: A session of the draft model.
            n_ids: The number of token ids of the main model.
            sequence: The sequence for the generation's text.
        """
        super().__init__()
        n_texts = session._n_sequences // sequences_per_text(session.model)
        self._drafting = sequence + n_texts if is_recurrent(session._core) else sequence  # the sequence with drafts
        self._session = session
        self._sequence = sequence
        self._n_ids = n_ids

    def catch_up(self, ids: array[int], max_tokens: int) -> bool:
        """As the base class. If the whole text has been computed, its logits are not needed."""
        return self._session._core.common_prefix(ids, self._sequence) == len(ids) or self.read(ids, max_tokens)

    def read(self, ids: array[int], max_tokens: int) -> bool:
        """Compute at most `max_tokens` new tokens of a text, and store the logits of the last one.

        Returns whether the whole text has been computed. A text that does not fit the draft model's context is skipped.
        """
        session, sequence = self._session, self._sequence
        if len(ids) > session.context:
            return True
        core = session._core
        reused = core.cut_length(sequence, min(core.common_prefix(ids, sequence), len(ids) - 1))
        end = min(len(ids), reused + max_tokens)
        if reused < core.length(sequence):
            core.truncate(reused, sequence)
        session._run(appended_rows(ids[reused:end], sequence, reused, "last"))
        return end == len(ids)

    def draft(self, ids: array[int], n: int, sampler: Sampler) -> list[int]:
        """Sample the next n tokens from the draft model's logits, with the request's seed and positions.

        Where both models have the same probabilities, both sample the same token.

        Args:
            ids: The prompt and the tokens so far.
            n: The number of drafts; fewer if the draft model's context is too short.
            sampler: The request's sampler.
        """
        session = self._session
        n = min(n, session.context - len(ids))
        if n <= 0:
            return []
        with drawing_on_device(session, [sampler.device_draw(len(ids))]) as drawn:
            self.read(ids, len(ids))  # at least the last token
        found: list[int] = []
        while True:
            position, token = len(ids) + len(found), drawn[0]
            found.append(session._core.sample(sampler.settings, self._n_ids, position) if token is None else token)
            if len(found) == n:
                return found
            begun = time.perf_counter()
            if len(found) == 1 and self._drafting != self._sequence:
                session.copy_sequence(self._sequence, self._drafting)
            with drawing_on_device(session, [sampler.device_draw(position + 1)]) as drawn:
                session._run(appended_rows(as_id(found[-1]), self._drafting, position, "last"))
            self.observe(time.perf_counter() - begun)

    def close(self) -> None:
        """Free the session."""
        self._session.close()
