"""Generating text: the loop of sampling and stepping, where it ends, and what it reports."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llamac import _core
from llamac.arguments import whole_number, wrong_type
from llamac.errors import ArgumentError, ArgumentTypeError, BusyError, ClosedError, ContextFullError
from llamac.session import as_ids

if TYPE_CHECKING:
    from llamac.model import Model
    from llamac.session import Session


@dataclass(frozen=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timings:
    """Seconds that a request was computed. The first token comes after `prefill`; `decode` is the time from then on,
    without what the consumer of a stream spent between its pieces."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    text: what was generated, without the prompt and without the stop. tokens: the generated ids that the text comes
    from. finish_reason: "stop" (a stop token or string; `stopped_by` says which), "length" (max_tokens) or "context"
    (the context is full). seed: what repeats the result.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stopped_by: int | str | None
    seed: int
    usage: Usage
    timings: Timings


@dataclass(frozen=True)
class Settings:
    """What a generation shall do; checked when it is made. Meanings are those of `Model.generate`."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    sampling: _core.Sampling = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_tokens is not None and whole_number(self.max_tokens, "max_tokens") < 1:
            raise ArgumentError(f"max_tokens is {self.max_tokens}, expected at least 1")
        if not isinstance(self.stop, Iterable):
            raise wrong_type("stop", self.stop, "a text or a list of texts")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) for text in stop):
            raise ArgumentTypeError(f"stop is {self.stop!r}, expected a text or a list of texts")
        if "" in stop:
            raise ArgumentError(f"stop is {self.stop!r}, expected a text or a list of texts, none of them empty")
        seed = int.from_bytes(os.urandom(4), "little") if self.seed is None else whole_number(self.seed, "seed")
        if not 0 <= seed < 1 << 64:
            raise ArgumentError(f"seed is {seed}, expected 0 to 2**64 - 1")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "seed", seed)
        sampling = _core.Sampling(self.temperature, self.top_k, self.top_p, self.min_p, seed)
        object.__setattr__(self, "sampling", sampling)


class StopStrings:
    """Finds stop strings in a stream of pieces and holds back what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """What of the text so far can be shown. After a stop string was found: what stood before it."""
        text = self._held + piece
        places = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if places:
            place, self.found = min(places)
            self._held = ""
            return text[:place]
        keep = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(text)), keep, -1):
                if text.endswith(stop[:n]):
                    keep = n
                    break
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, now that nothing more comes."""
        text, self._held = self._held, ""
        return text


class Stream(Iterator[str]):
    """Pieces of text as they are generated; whole characters, none of them empty.

    `completion` is there when it has ended. Closing it (or leaving its `with` block) ends the generation early and
    frees its memory.
    """

    def __init__(self, model: Model, session: Session, prompt: array[int], settings: Settings) -> None:
        self._session = session
        self._completion: Completion | None = None
        self._failure: Exception | None = None
        self._lock = threading.Lock()  # held by who computes or closes
        self._pieces = _generate(model, session, prompt, settings)

    def __next__(self) -> str:
        self._take()
        try:
            if self._failure is not None:
                raise self._failure
            return next(self._pieces)
        except StopIteration as end:
            if end.value is not None:
                self._completion = end.value
            raise StopIteration from None
        except Exception as failure:
            self._failure = failure
            raise
        except BaseException as interruption:
            self._failure = ClosedError(f"the stream has ended: {type(interruption).__name__} interrupted it")
            raise
        finally:
            self._lock.release()

    def _take(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BusyError("the stream is in use by another thread")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the generation; the rest is not computed. BusyError while another thread waits for the next piece."""
        self._take()
        try:
            self._pieces.close()
            self._session.close()
        finally:
            self._lock.release()

    @property
    def completion(self) -> Completion:
        """The whole result. ArgumentError while the stream has not ended, and the error that broke it if one did."""
        if self._failure is not None:
            raise self._failure
        if self._completion is None:
            raise ArgumentError("the stream has not ended: iterate over it first")
        return self._completion


def _generate(
    model: Model, session: Session, prompt: array[int], settings: Settings
) -> Generator[str, None, Completion]:
    """The loop: yields pieces of text, returns the result, closes the session."""
    n_ids = model.n_token_ids
    stop_ids = frozenset(model.special.stop_ids)
    tokenizer = model.tokenizer if model.has_tokenizer else None
    decoder = tokenizer.decoder(start=_starts_text(model, prompt)) if tokenizer else None
    stops = StopStrings(settings.stop)
    context = session.context
    position = len(prompt)
    limit = settings.max_tokens
    tokens: list[int] = []
    texts: list[str] = []
    reason = "length"
    stopped_by: int | str | None = None
    try:
        started = time.perf_counter()
        session.prefill(prompt)
        resumed = time.perf_counter()
        prefill, decode = resumed - started, 0.0
        while True:
            token = session.sample(settings.sampling, n_ids)
            if token in stop_ids:
                reason, stopped_by = "stop", token
                break
            tokens.append(token)
            if decoder is not None:
                piece = decoder.push(token)
                if settings.stop:
                    piece = stops.push(piece)
                if piece:
                    texts.append(piece)
                    decode += time.perf_counter() - resumed
                    yield piece
                    resumed = time.perf_counter()
                if stops.found is not None:
                    reason, stopped_by = "stop", stops.found
                    break
            if len(tokens) == limit:
                break
            if position == context:
                reason = "context"
                break
            session.step(token)
            position += 1
        if decoder is not None and stops.found is None:
            rest = decoder.flush()
            rest = stops.push(rest) + ("" if stops.found is not None else stops.flush())
            if stops.found is not None:
                reason, stopped_by = "stop", stops.found
            if rest:
                texts.append(rest)
                decode += time.perf_counter() - resumed
                yield rest
                resumed = time.perf_counter()
        decode += time.perf_counter() - resumed
    finally:
        session.close()
    assert settings.seed is not None
    return Completion(
        "".join(texts),
        tokens,
        reason,
        stopped_by,
        settings.seed,
        Usage(len(prompt), len(tokens)),
        Timings(prefill, decode),
    )


def _starts_text(model: Model, prompt: array[int]) -> bool:
    """Whether what follows the prompt is the start of a text (nothing but BOS came before it)."""
    return len(prompt) == 1 and prompt[0] == model.special.bos_id


def prompt_ids(model: Model, prompt: str | Sequence[int]) -> array[int]:
    """Ids of a prompt. A text gets BOS by the model's rule, ids are taken as they are, nothing at all becomes BOS."""
    if not isinstance(prompt, str | Iterable):
        raise wrong_type("prompt", prompt, "a text or token ids")
    ids = as_ids(model.tokenize(prompt) if isinstance(prompt, str) else prompt)
    size = model.config["vocab_size"]
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise ArgumentError(f"the prompt holds the token id {wrong}, expected 0 to {size - 1}")
    if not ids:
        bos = model.special.bos_id
        if bos is None:
            raise ArgumentError("the prompt is empty, and the model has no BOS token to begin with")
        ids = array("i", [bos])
    return ids


def start(model: Model, prompt: str | Sequence[int], settings: Settings, context: int | None) -> Stream:
    """A stream that has not computed anything yet; what can be wrong with the request is found here."""
    ids = prompt_ids(model, prompt)
    if settings.stop and not model.has_tokenizer:
        raise ArgumentError("stop needs a tokenizer, and this model has none")
    limit: int = model.config["context"] if settings.max_tokens is None else settings.max_tokens
    session = model._session_for(len(ids) + limit - 1, context)  # the last token is not computed
    if len(ids) > session.context:
        message = f"the prompt has {len(ids)} tokens, but the context holds {session.context}: shorten it"
        session.close()
        raise ContextFullError(message)
    return Stream(model, session, ids, settings)
