"""The output of a generation: its tokens and their text, the rules that end it, and the result.

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

UNLIMITED = 2**31 - 1  # token limit of generations that shift the context
FinishReason = Literal["stop", "length", "context", "cancelled", "deadline"]


@dataclass(frozen=True)
class Usage:
    """Token counts of a generation.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        completion_tokens: New tokens.
        cached_tokens: Prompt tokens that were already in the KV cache.
        truncated_tokens: Tokens that were cut from the middle of the prompt. `prompt_tokens` does not include them.
        shifted_tokens: Positions that were dropped from the context to continue the generation.
        drafted_tokens: Draft tokens computed.
        accepted_tokens: Draft tokens that became tokens of the result.
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
    """Times in seconds. The time that the consumer of a stream takes between pieces is not included.

    Attributes:
        prefill: From the start until the first token could be sampled.
        decode: From then until the end.
        queued: The time that an engine's request waited before its computation began.
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
            "deadline": a request's deadline passed.
        stopped_by: The stop token's id or the stop string, else None.
        seed: The seed, which reproduces the result.
        usage: Token counts.
        timings: Times in seconds.
        logprobs: Log probabilities of the generated tokens, if requested.
        prompt_logprobs: Log probabilities of the prompt's tokens, if requested. The first token has None.
        receipt: The receipt of the result, if requested.
        candidate: The number of this candidate, which reproduces the result together with the seed.
        score: The score by which `best_of` or beam search ranked this candidate, or None.
        others: The other candidates of a request with `n`, in order.
        message: The answer to a conversation, split into reasoning, content and tool calls; None without a
            conversation.
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
        """All candidates of the request, this one first."""
        return [self, *self.others]


class StopStrings:
    """Finds stop strings in a stream of pieces. Buffers text that could be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Add a piece. Return the text that can be delivered; after a stop string, the text before it."""
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
        """Return the buffered text at the end of the stream."""
        text, self._held = self._held, ""
        return text


class Output:
    """The tokens of one generation and their text.

    The token list is the only record of the generation, and `completion` derives the text from it. The list is
    therefore consistent even if Ctrl-C interrupts at any instruction.
    """

    def __init__(self, session: Session, prompt: FittedPrompt, params: ResolvedParams) -> None:
        """Start a generation.

        Args:
            session: The session that computes it.
            prompt: The prompt, with at least one token.
            params: The request's parameters.
        """
        model = session.model
        self.prompt = prompt.ids
        self.keep = prompt.keep  # number of leading tokens that a shift keeps
        self.shifts = params.context_overflow == "shift"  # whether a full context is shifted
        self.params = params
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None  # None: the generation has not ended
        self.stopped_by: int | str | None = None
        self.drafted = self.accepted = 0  # numbers of computed drafts and of accepted ones
        self.cached = 0  # number of prompt tokens that were already in the KV cache
        self.logprobs: list[TokenLogprobs] = []  # at least one for each token, if requested
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.truncated = prompt.truncated
        self.reading = prompt.reading
        self.rank = 0  # the rank among the sequences of a beam search, which share a candidate number
        self.shifted = 0  # number of positions that shifts have dropped
        self.context = session.context
        self._kv_dtype, self._numerics = session.kv_dtype, session.numerics
        self._model = model
        # computed here, in the caller's thread, because hashing takes time
        self._identity = identity_of(model) if params.receipt else None
        self.sampler = Sampler(model, params, self.prompt)
        self.tokenizer = model.tokenizer if model.has_tokenizer else None
        # Drop a leading space if only BOS precedes the text, except with a guide, which determines every space.
        self.starts_text = tuple(self.prompt) == model.special.front and params.guide is None
        self._decoder = self.tokenizer.decoder(start=self.starts_text) if self.tokenizer else None
        self._search = StopStrings(params.stop)

    @property
    def length(self) -> int:
        """The number of prompt tokens and new tokens."""
        return len(self.prompt) + len(self.tokens)

    def accept(self, token: int, describe: Callable[[int, int], TokenLogprobs] | None = None) -> str:
        """Record a sampled token and the tokens forced after it, or end. Return the text that can be delivered.

        Args:
            token: The token.
            describe: Maps a token and the number of most probable tokens to add to their log probabilities. Called only
                if the request has `logprobs`; forced tokens are then sampled one by one as well.

        Raises:
            LlamacError: If the guide's grammar becomes too complex.
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
        """The number of tokens that can still be generated. The last one needs no position."""
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
        """End the generation and return the buffered text."""
        self.stopped_by, self.finish_reason = stopped_by, reason
        return self._search.flush()

    @property
    def limit(self) -> tuple[int, FinishReason]:
        """The number of tokens that can still be generated, and the finish reason after them."""
        return self.left, "length" if self.left + len(self.tokens) == self.params.max_tokens else "context"

    def stop_in(self, tokens: Sequence[int]) -> str | None:
        """Return the stop string in the text of new tokens, or None."""
        return self._text_of(tokens)[1] if self.params.stop else None

    def _text_of(self, tokens: Sequence[int]) -> tuple[str, str | None]:
        """Return the text of new tokens up to the first stop string, and that string or None."""
        if self.tokenizer is None:
            return "", None
        decoder = self.tokenizer.decoder(start=self.starts_text)
        pieces = list(map(decoder.push, tokens))  # without flush, which drops an incomplete character at the end
        text = "".join(pieces)
        searched = len("".join(pieces[: self.params.min_tokens]))
        ends = [(place, stop) for stop in self.params.stop if (place := text.find(stop, searched)) >= 0]
        if not ends:
            return text, None
        place, found = min(ends)
        return text[:place], found

    def completion(self, timings: Timings) -> Completion:
        """Return the result so far. An unfinished generation counts as cancelled.

        Another thread may record tokens at the same time; the result has the tokens at the time of the call.
        """
        finish_reason = self.finish_reason  # before the tokens: a token that comes later is not the end of this result
        stopped_by = None if finish_reason is None else self.stopped_by
        tokens = list(self.tokens)
        text = self._text_of(tokens)[0]
        result = tokens, text, finish_reason or "cancelled", stopped_by
        return Completion(
            text=text,
            tokens=tokens,
            finish_reason=finish_reason or "cancelled",
            stopped_by=stopped_by,
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
            receipt=None if self._identity is None else self._receipt(self._identity, result),
            candidate=self.params.candidate,
        )

    def _message(self, tokens: Sequence[int]) -> Message | None:
        """Parse tokens that answer a conversation as a message."""
        if self.reading is None or self.tokenizer is None:
            return None
        from llamac.engine.generation.reading import message_of

        return message_of(self, self.reading, self.tokenizer, tokens)

    def receipt(self, completion: Completion) -> Receipt:
        """Return the receipt of a result of this output, even if the request did not ask for one."""
        if completion.receipt is not None:
            return completion.receipt
        result = completion.tokens, completion.text, completion.finish_reason, completion.stopped_by
        return self._receipt(identity_of(self._model), result)

    def _receipt(self, identity: Identity, result: tuple[list[int], str, FinishReason, int | str | None]) -> Receipt:
        from llamac.engine.receipts.receipt import chat_of, make_receipt

        params = self.params
        if params.context_overflow != "error":  # what the prompt's messages decided
            params = replace(params, context_keep=self.keep)
        receipt = make_receipt(identity, params, self.prompt, self.context, self._kv_dtype, self._numerics, result)
        chat = None if self.reading is None else chat_of(self.reading.chat)
        return replace(receipt, rank=self.rank, chat=chat)
