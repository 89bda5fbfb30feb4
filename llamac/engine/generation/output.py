"""What a generation produces: its tokens, the text they make, the rules that end it, and the result it reports.

A stream over a session and the requests of an engine record their tokens here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from llamac.engine.generation.logprobs import TokenLogprobs
from llamac.engine.identity import Identity, identity_of
from llamac.engine.prompts.overflow import FittedPrompt
from llamac.engine.sampling.params import ResolvedParams
from llamac.engine.sampling.sampler import Sampler

if TYPE_CHECKING:
    from llamac.engine.receipts.receipt import Receipt
    from llamac.engine.session import Session
    from llamac.tools.message import Message

UNLIMITED = 2**31 - 1  # tokens, where shifts make room for more
FinishReason = Literal["stop", "length", "context", "cancelled", "deadline"]


@dataclass(frozen=True)
class Usage:
    """Token counts of a generation.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        completion_tokens: New tokens.
        cached_tokens: Tokens of the prompt that the session held already and did not compute again.
        truncated_tokens: Tokens that were cut from the middle of the prompt; `prompt_tokens` does not count them.
        shifted_tokens: Positions that were dropped from the context to continue the generation.
        drafted_tokens: Draft tokens that were computed ahead.
        accepted_tokens: Those of them that became tokens without being computed again.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    truncated_tokens: int = 0
    shifted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds of computation. The time that the consumer of a stream takes between pieces is not included.

    Attributes:
        prefill: From the start until the first token could be sampled.
        decode: From then on.
        queued: Seconds that an engine's request waited before its computation began.
    """

    prefill: float
    decode: float
    queued: float = 0.0


@dataclass(frozen=True)
class Completion:
    """The result of a generation.

    Attributes:
        text: The generated text, without the prompt and without the stop string. A character whose bytes are incomplete
            at the end is left out.
        tokens: The generated token ids.
        finish_reason: "stop": a stop token, a stop string, or a text that matches the guide; "length": `max_tokens`;
            "context": the context is full; "cancelled": `Stream.cancel`, `Stream.close`, `Request.cancel` or Ctrl-C;
            "deadline": a request's time was over.
        stopped_by: The stop token's id or the stop string, else None.
        seed: The seed that was used. It reproduces the result.
        usage: Token counts.
        timings: Seconds.
        logprobs: Log probabilities of the generated tokens, if the request asked for them.
        prompt_logprobs: Those of the prompt's tokens. The first one has none.
        receipt: What the result was computed from, if the request asked for it.
        candidate: The number of this candidate: with the seed, it reproduces the result.
        score: What `best_of` and beam search ranked this candidate by; None without them.
        others: The other candidates of a request with `n`, in order.
        message: The answer to a conversation, split into reasoning, content and tool calls; None without one.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stopped_by: int | str | None
    seed: int
    usage: Usage
    timings: Timings
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    receipt: Receipt | None = None
    candidate: int = 0
    score: float | None = None
    others: tuple[Completion, ...] = ()
    message: Message | None = None

    @property
    def choices(self) -> list[Completion]:
        """All candidates of the request: this one, which is the first, and the others."""
        return [self, *self.others]


class StopStrings:
    """Finds stop strings in a stream of pieces. Holds back text that could still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Add a piece; return the text that can be shown. After a stop string: the text before it."""
        text = self._held + piece
        matches = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if matches:
            place, self.found = min(matches)
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
        """The text held back, at the end of the stream."""
        text, self._held = self._held, ""
        return text


class Output:
    """The tokens of one generation and the text that they make.

    The token list is the only record of what has been generated. An interruption between any two instructions leaves it
    whole, and `completion` derives the text from it.
    """

    def __init__(self, session: Session, prompt: FittedPrompt, params: ResolvedParams) -> None:
        """Begin a generation.

        Args:
            session: The session that computes it.
            prompt: The prompt, with at least one token.
            params: The request's parameters.
        """
        model = session.model
        self.prompt = prompt.ids
        self.keep = prompt.keep  # tokens at the beginning that a shift keeps
        self.shifts = params.context_overflow == "shift"  # whether a full context is shifted
        self.params = params
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None  # None: the generation has not ended
        self.stopped_by: int | str | None = None
        self.drafted = self.accepted = 0  # drafts computed, and those of them that became tokens
        self.cached = 0  # tokens of the prompt that were not computed again
        self.logprobs: list[TokenLogprobs] = []  # at least one for each token, if the request asks for them
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.truncated = prompt.truncated
        self.reading = prompt.reading
        self.rank = 0  # among the sequences of a beam search, which have the same candidate's number
        self.shifted = 0  # positions that shifts have dropped
        self.context = session.context
        self._kv_dtype, self._numerics = session.kv_dtype, session.numerics
        self._model = model
        # hashing takes time: here, in the caller's thread
        self._identity = identity_of(model) if params.receipt else None
        self.sampler = Sampler(model, params, self.prompt)
        self.tokenizer = model.tokenizer if model.has_tokenizer else None
        # Nothing but BOS comes before. A guide's text has every space that the guide asked for.
        self.starts_text = list(self.prompt) == [model.special.bos_id] and params.guide is None
        self._decoder = self.tokenizer.decoder(start=self.starts_text) if self.tokenizer else None
        self._search = StopStrings(params.stop)

    @property
    def length(self) -> int:
        """Tokens of the prompt and new ones."""
        return len(self.prompt) + len(self.tokens)

    def accept(self, token: int, describe: Callable[[int, int], TokenLogprobs] | None = None) -> str:
        """Record a drawn token and those that are forced after it, or end; return the text that can be shown.

        Args:
            token: The token.
            describe: Returns the log probabilities of the token that is recorded, given it and how many of the most
                probable tokens to add. Called if the request asks for them. Forced tokens must then be drawn, too.

        Raises:
            LlamacError: If the guide's grammar is too complex here.
        """
        token = self.sampler.within(token, self.left)
        if self.params.logprobs is not None and describe is not None and token not in self.sampler.stop_ids:
            self.logprobs[len(self.tokens) :] = [describe(token, self.params.logprobs)]
        piece = self._record(token)
        if self.params.logprobs is not None:
            return piece
        while self.finish_reason is None and (forced := self.sampler.forced()) is not None:
            piece += self._record(forced)
        return piece

    @property
    def left(self) -> int:
        """Tokens that can still be generated. The last one needs no position."""
        left = UNLIMITED if self.shifts else self.context + 1 - len(self.prompt)
        return min(left, self.params.max_tokens or left) - len(self.tokens)

    def _record(self, token: int) -> str:
        if token in self.sampler.stop_ids:
            return self.end("stop", token)
        self.tokens.append(token)
        self.sampler.accept(token)
        piece = self._decoder.push(token) if self._decoder is not None else ""
        if self.params.stop and len(self.tokens) > self.params.min_tokens:
            piece = self._search.push(piece)
            if self._search.found is not None:
                return piece + self.end("stop", self._search.found)
        if self.sampler.is_complete or (self.left == 0 and self.sampler.is_accepting):
            return piece + self.end("stop")
        if len(self.tokens) == self.params.max_tokens:
            return piece + self.end("length")
        return piece + self.end("context") if self.left == 0 else piece

    def end(self, reason: FinishReason, stopped_by: int | str | None = None) -> str:
        """End the generation; return the text held back."""
        self.stopped_by, self.finish_reason = stopped_by, reason
        return self._search.flush()

    @property
    def limit(self) -> tuple[int, FinishReason]:
        """How many tokens can still be generated, and why the generation ends after them."""
        return self.left, "length" if self.left + len(self.tokens) == self.params.max_tokens else "context"

    def stop_in(self, tokens: Sequence[int]) -> str | None:
        """The stop string in the text of new tokens."""
        return self._text_of(tokens)[1] if self.params.stop else None

    def _text_of(self, tokens: Sequence[int]) -> tuple[str, str | None]:
        """The text of new tokens up to the first stop string, and that string."""
        if self.tokenizer is None:
            return "", None
        decoder = self.tokenizer.decoder(start=self.starts_text)
        pieces = list(map(decoder.push, tokens))  # without flush: an incomplete character is left out
        text = "".join(pieces)
        searched = len("".join(pieces[: self.params.min_tokens]))
        ends = [(place, stop) for stop in self.params.stop if (place := text.find(stop, searched)) >= 0]
        if not ends:
            return text, None
        place, found = min(ends)
        return text[:place], found

    def completion(self, timings: Timings) -> Completion:
        """The result so far. A generation that has not ended counts as cancelled.

        Another thread may record tokens meanwhile: the result has those that there are now.
        """
        tokens, finish_reason = list(self.tokens), self.finish_reason or "cancelled"
        text = self._text_of(tokens)[0]
        return Completion(
            text=text,
            tokens=tokens,
            finish_reason=finish_reason,
            stopped_by=self.stopped_by,
            seed=self.params.seed,
            usage=Usage(
                len(self.prompt),
                len(tokens),
                self.cached,
                self.truncated,
                self.shifted,
                self.drafted,
                self.accepted,
            ),
            timings=timings,
            logprobs=None if self.params.logprobs is None else self.logprobs[: len(tokens)],
            prompt_logprobs=None if self.params.prompt_logprobs is None else list(self.prompt_logprobs),
            message=self._message(tokens),
            receipt=None if self._identity is None else self._receipt(self._identity, tokens, text, finish_reason),
            candidate=self.params.candidate,
        )

    def _message(self, tokens: Sequence[int]) -> Message | None:
        """The message of tokens that answer a conversation."""
        if self.reading is None or self.tokenizer is None:
            return None
        from llamac.engine.generation.reading import message_of

        return message_of(self, self.reading, self.tokenizer, tokens)

    def receipt(self, completion: Completion) -> Receipt:
        """The receipt of a result of this output, whether or not the request asked for it."""
        if completion.receipt is not None:
            return completion.receipt
        return self._receipt(identity_of(self._model), completion.tokens, completion.text, completion.finish_reason)

    def _receipt(self, identity: Identity, tokens: list[int], text: str, finish_reason: FinishReason) -> Receipt:
        from llamac.engine.receipts.receipt import chat_of, make_receipt

        result = (tokens, text, finish_reason, self.stopped_by)
        params = self.params
        if params.context_overflow != "error":  # what the prompt's messages decided
            params = replace(params, context_keep=self.keep)
        receipt = make_receipt(identity, params, self.prompt, self.context, self._kv_dtype, self._numerics, result)
        chat = None if self.reading is None else chat_of(self.reading.chat)
        return replace(receipt, rank=self.rank, chat=chat)
