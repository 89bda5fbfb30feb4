"""Sampling parameters: their limits, and the defaults for parameters that a request does not set."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from llamac import _core
from llamac.arguments import to_float, to_int, unexpected_argument, wrong_type
from llamac.engine.prompts.overflow import CONTEXT_OVERFLOWS, ContextOverflow
from llamac.errors import ArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

    from llamac.guided.guides import Guide

MAX_TEMPERATURE = 1e6
MIN_POSITIVE = 1e-37  # the core computes in f32, where smaller numbers lose precision or become 0
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_PENALTY = 1e6
MAX_CANDIDATES = 256  # the maximum number of sequences of an engine
MAX_CANDIDATE = 2**31 - 1

# Changes a row of logits, float32 (n,), in place, given the ids of the prompt and the tokens so far, int32 (m,).
LogitsProcessor: TypeAlias = Callable[[Any, Any], object]
Check: TypeAlias = Callable[[str, object], Any]  # takes an argument's name and value; returns the value's plain type
EarlyStopping: TypeAlias = bool | Literal["never"]
LogitBias: TypeAlias = Mapping[int, float] | Sequence[tuple[int, float]]


class SamplingOverrides(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream`, `chat` and `chat_stream`, an alternative to `SamplingParams`."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    min_tokens: int | None
    ignore_eos: bool | None
    stop_token_ids: Sequence[int] | None
    logit_bias: LogitBias | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_sequence_breakers: str | Sequence[str] | None
    banned_tokens: Sequence[int] | None
    banned_strings: str | Sequence[str] | None
    logits_processors: LogitsProcessor | Sequence[LogitsProcessor] | None
    typical_p: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    guide: Guide | None
    logprobs: int | None
    prompt_logprobs: int | None
    reasoning_budget: int | None
    context_overflow: ContextOverflow | None
    context_keep: int | None
    receipt: bool | None
    speculation: bool | None
    n: int | None
    best_of: int | None
    candidate: int | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: EarlyStopping | None


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. None means "not set".

    If a request does not set a value, the model's recommendation applies (`Model.sampling_defaults`). Without a
    recommendation, temperature and top_p are 1, and everything else is off.

    A step applies in this order: logit_bias, repetition_penalty, presence_penalty, frequency_penalty, DRY,
    banned_tokens, banned_strings, min_tokens, guide, logits_processors, temperature, top_k, top_p, min_p, typical_p,
    XTC, the draw.

    Attributes:
        max_tokens: Maximum number of new tokens. Not set: until a stop or the end of the context.
        temperature: Divisor of the logits, 0 to 1e6. 0 always selects the most probable token (greedy).
        top_k: Keep the k most probable tokens. 0: off.
        top_p: Keep the most probable tokens that together reach this probability, more than 0 and at most 1. 1: off.
        min_p: Keep the tokens that are at least this probable relative to the best one, 0 to 1. 0: off.
        seed: 0 to 2**64 - 1. A draw depends only on the seed and the position. Not set: a random seed, which
            `Completion.seed` reports.
        stop: A string, or several, that end the generation. The text ends before the string.
        min_tokens: Minimum number of new tokens. Until then, stop tokens are banned and stop strings are ignored.
        ignore_eos: Whether to treat the model's stop tokens like any other token.
        stop_token_ids: Further tokens that end the generation.
        logit_bias: Added to the logits of tokens: maps ids to numbers, or to -inf for tokens that must not occur.
        repetition_penalty: Divides the positive and multiplies the negative logits of all tokens of the prompt and the
            new text, more than 0 to 1e6. 1: off.
        presence_penalty: Subtracted from the logits of tokens that have been generated, -1e6 to 1e6. 0: off.
        frequency_penalty: Subtracted once for each time that the token has been generated, -1e6 to 1e6. 0: off.
        dry_multiplier: A token that would continue a repetition of the last n tokens, prompt included, loses
            dry_multiplier * dry_base ** (n - dry_allowed_length). 0: off.
        dry_base: 1 to 1e6. Not set: 1.75.
        dry_allowed_length: The shortest repetition that counts, at least 1; more than 50 tokens count as 50. Not set:
            2.
        dry_sequence_breakers: Tokens that contain one of these strings end repetitions. Not set: newline, colon, quote
            and asterisk.
        banned_tokens: Ids that must not occur.
        banned_strings: A string, or several, that the new text must not contain, regardless of how tokens divide it.
        logits_processors: A function, or several, that are called in order with the ids so far, prompt included, and
            the row of logits, and change the row in place. Both are NumPy arrays.
        typical_p: Keep the tokens whose surprise, -log p, is closest to the expected one, until they together reach
            this probability, more than 0 and at most 1. 1: off.
        xtc_probability: XTC. With this probability, a draw excludes all tokens of at least xtc_threshold except the
            least probable one of them. 0: off.
        xtc_threshold: 0 to 1. Not set: 0.1.
        mirostat_tau: Mirostat 2, instead of the filters after the temperature: keeps the surprise of the text near this
            number of bits, 0 to 1000. 0: off.
        mirostat_eta: How fast mirostat follows, 0 to 1. Not set: 0.1.
        guide: A constraint on the text: `Json`, `Regex`, `Choice` or `Grammar`.
        logprobs: Report the log probability of each new token, and of this many most probable tokens at its position.
            0: only of the new token. They refer to the model's own distribution, before the bias, penalties,
            temperature and filters.
        prompt_logprobs: The same for each token of the prompt. The whole prompt is then computed.
        reasoning_budget: Maximum number of tokens inside the model's thinking tags. Then the closing tag is inserted.
        context_overflow: What happens when the context is full. "error", the default: a prompt that does not fit raises
            ContextFullError, and a generation ends with the context. "truncate_middle": the middle of a prompt is cut
            so that it fits together with max_tokens new
            tokens. "shift": the older half of the context is dropped, and the
            generation continues; a longer prompt is cut first.
        context_keep: Number of leading tokens of the prompt that are never dropped. Not set: in a chat, all before the
            first message that is not a system message; otherwise 4 for "shift", and half of the tokens that fit for
            "truncate_middle".
        receipt: Whether the result has a receipt, from which `llamac.replay` reproduces it. The first receipt after a
            conversion from GGUF waits for the file's checksum.
        speculation: Whether to use speculative decoding where it is faster. It never changes tokens. Not set: True.
        n: Number of candidates to return, 1 to 256. Not set: 1. `Completion.choices` has all of them.
        best_of: Number of candidates to generate, at least n. The n with the highest mean log probability per token are
            returned, best first. Complete candidates precede those that a deadline or a cancellation ended. Not set: n.
        candidate: The number of the first candidate. Not set: 0. A draw depends only on the seed, the candidate's
            number and the position, so each candidate can be reproduced without the others.
        beam_width: Beam search with this many beams, 2 to 256, as in transformers: the n sequences with the best
            scores, without draws. 1: off.
        length_penalty: The score of a beam is the sum of its tokens' log probabilities divided by its length to this
            power. Not set: 1.
        early_stopping: When a beam search ends. True: when `beam_width` sequences have ended. False: when no running
            beam would score better than these if it ended now. "never": when none can score better at any length. Not
            set: False.

    Raises:
        ArgumentError: If a value is out of range; `ArgumentTypeError` if its type is wrong.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Sequence[int] | None = None
    logit_bias: LogitBias | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: str | Sequence[str] | None = None
    banned_tokens: Sequence[int] | None = None
    banned_strings: str | Sequence[str] | None = None
    logits_processors: LogitsProcessor | Sequence[LogitsProcessor] | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    guide: Guide | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    reasoning_budget: int | None = None
    context_overflow: ContextOverflow | None = None
    context_keep: int | None = None
    receipt: bool | None = None
    speculation: bool | None = None
    n: int | None = None
    best_of: int | None = None
    candidate: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check(name, value))

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name in CHECKS if (value := getattr(self, name)) is not None)
        return f"{type(self).__name__}({given})"

    def updated(self, overrides: Mapping[str, Any]) -> Self:
        """Replace parameters with those values of `overrides` that are not None.

        Raises:
            ArgumentError: If a value is out of range; `ArgumentTypeError` for an unknown name or a wrong type.
        """
        if not isinstance(overrides, Mapping):
            raise wrong_type("overrides", overrides, "a dict")
        unknown = sorted(set(overrides) - set(CHECKS))
        if unknown:
            raise unexpected_argument(unknown[0], CHECKS)
        given = {name: value for name, value in overrides.items() if value is not None}
        return replace(self, **given) if given else self


def request_params(params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
    """Combine the `SamplingParams` and the keyword arguments of a call."""
    if not isinstance(params, SamplingParams | None):
        raise wrong_type("params", params, "SamplingParams")
    return (params or SamplingParams()).updated(overrides)


@dataclass(frozen=True, kw_only=True)
class ResolvedParams:
    """The parameters of one generation: every value is set."""

    max_tokens: int | None  # None: until a stop or the end of the context
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: tuple[str, ...]
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    logit_bias: tuple[tuple[int, float], ...]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_sequence_breakers: tuple[str, ...]
    banned_tokens: tuple[int, ...]
    banned_strings: tuple[str, ...]
    logits_processors: tuple[LogitsProcessor, ...]
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    mirostat_tau: float
    mirostat_eta: float
    guide: Guide | None
    logprobs: int | None  # None: off
    prompt_logprobs: int | None
    reasoning_budget: int | None  # None: no limit
    receipt: bool
    context_overflow: ContextOverflow
    context_keep: int | None
    speculation: bool
    n: int
    best_of: int | None  # None: n
    candidate: int  # the number of the candidate with this seed
    beam_width: int
    length_penalty: float
    early_stopping: EarlyStopping

    @property
    def core_top_p(self) -> float:
        """top_p as the core takes it."""
        return max(self.top_p, MIN_POSITIVE)

    def core(self) -> _core.Sampling:
        """The filters and the seed in the core's format."""
        return _core.Sampling(
            self.temperature,
            self.top_k,
            self.core_top_p,
            self.min_p,
            self.seed,
            candidate=self.candidate,
            typical_p=max(self.typical_p, MIN_POSITIVE),
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            mirostat_tau=self.mirostat_tau,
            mirostat_eta=self.mirostat_eta,
        )


# The parameters that a model file can recommend.
RECOMMENDABLE = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("repetition_penalty", "xtc_probability", "xtc_threshold"),
)

# The defaults for values that neither the request nor the model sets.
LIBRARY_DEFAULTS: dict[str, Any] = {
    "max_tokens": None,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "stop": (),
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": (),
    "logit_bias": (),
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_sequence_breakers": ("\n", ":", '"', "*"),
    "banned_tokens": (),
    "banned_strings": (),
    "logits_processors": (),
    "typical_p": 1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "mirostat_tau": 0.0,
    "mirostat_eta": 0.1,
    "guide": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "reasoning_budget": None,
    "context_overflow": "error",
    "context_keep": None,
    "receipt": False,
    "speculation": True,
    "n": 1,
    "best_of": None,
    "candidate": 0,
    "beam_width": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
}


def resolve(request: SamplingParams, recommended: SamplingParams) -> ResolvedParams:
    """Complete a request's parameters.

    All APIs use this rule for defaults: the request's value, then the model's recommendation, then `LIBRARY_DEFAULTS`.
    A missing seed is random.

    Args:
        request: The request's parameters.
        recommended: The model's parameters.
    """
    values: dict[str, Any] = {**LIBRARY_DEFAULTS, **_given(recommended), **_given(request)}
    if "seed" not in values:
        values["seed"] = random_seed()
    return ResolvedParams(**values)


def random_seed() -> int:
    """A seed for a request without one."""
    return int.from_bytes(os.urandom(4), "little")


def _given(params: SamplingParams) -> dict[str, Any]:
    """Return the values that are set."""
    return {name: value for name in CHECKS if (value := getattr(params, name)) is not None}


def recommended_params(metadata: Mapping[str, Any], warn: Callable[[str], object]) -> SamplingParams:
    """Read the sampling parameters that a model file recommends.

    Args:
        metadata: The file's metadata, with the parameters in its entry "generation".
        warn: Called with a message about each value that is out of range and therefore ignored.
    """
    entries = metadata.get("generation", {})
    if not isinstance(entries, dict):
        warn(f"generation settings ignored: expected an object, found {type(entries).__name__}")
        return SamplingParams()
    params = SamplingParams()
    for name in RECOMMENDABLE:
        try:
            params = params.updated({name: entries.get(name)})
        except ArgumentError as error:
            warn(f"generation setting ignored: {error}")
    return params


# ---- checks: each returns the value as a plain type


@dataclass(frozen=True)
class Integer:
    """Checks an integer in a range. `off` describes the meaning of the minimum."""

    least: int
    most: int | None = None
    off: str = ""

    def __call__(self, name: str, value: object) -> int:
        """Return the number, or raise an error that names the argument."""
        number = to_int(value, name)
        if number < self.least or (self.most is not None and number > self.most):
            limit = f"at least {self.least}" if self.most is None else f"{self.least}{self.off} to {self.most}"
            raise ArgumentError(f"{name} is {number}, expected {limit}")
        return number


@dataclass(frozen=True)
class Real:
    """Checks a number in a range. With `above`, the range excludes its minimum."""

    least: float
    most: float
    expected: str
    above: bool = False

    def __call__(self, name: str, value: object) -> float:
        """The number, else an error that names the argument."""
        number = to_float(value, name)
        if not self.least <= number <= self.most or (self.above and number == self.least):
            raise ArgumentError(f"{name} is {number:g}, expected {self.expected}")
        return number


def _temperature(name: str, value: object) -> float:
    number = to_float(value, name)
    if number != 0 and not MIN_POSITIVE <= number <= MAX_TEMPERATURE:
        raise ArgumentError(f"{name} is {number:g}, expected 0 (greedy) or {MIN_POSITIVE:g} to {MAX_TEMPERATURE:g}")
    return number


def _seed(name: str, value: object) -> int:
    number = to_int(value, name)
    if not 0 <= number <= MAX_SEED:
        raise ArgumentError(f"{name} is {number}, expected 0 to 2**64 - 1")
    return number


def _flag(name: str, value: object) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):  # NumPy's type is called bool or bool_
        raise wrong_type(name, value, "True or False")
    return bool(value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise wrong_type(name, value, "a str or a sequence of str")
    strings = (value,) if isinstance(value, str) else tuple(value)
    for text in strings:
        if not isinstance(text, str):
            raise wrong_type(f"each string of {name}", text, "a str")
        if not text:
            raise ArgumentError(f"{name} is {value!r}, expected strings that are not empty")
    return strings


def _encodable(name: str, value: object) -> tuple[str, ...]:
    strings = _strings(name, value)
    for text in strings:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ArgumentError(f"{name} contains {text!r}, which is not valid Unicode text") from None
    return strings


def _token_id(name: str, value: object) -> int:
    number = to_int(value, f"each token id of {name}")
    if not 0 <= number < 2**31:
        raise ArgumentError(f"{name} has the token id {number}, expected 0 or more")
    return number


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise wrong_type(name, value, "a sequence of token ids")
    return tuple(_token_id(name, token) for token in value)


def _logit_bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """Convert to pairs in ascending order of ids, which compare and hash by value."""
    pairs: Any = value.items() if isinstance(value, Mapping) else value
    if not isinstance(pairs, Iterable) or isinstance(pairs, str | bytes):
        raise wrong_type(name, value, "a dict from token ids to numbers")
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str | bytes) or len(pair) != 2:
            raise wrong_type(name, value, "a dict from token ids to numbers")
        token, bias = _token_id(name, pair[0]), to_float(pair[1], f"each bias of {name}")
        if not -3e38 < bias < 3e38 and bias != -math.inf:
            raise ArgumentError(f"{name} is {bias:g} for token {token}, expected -3e38 to 3e38, or -inf for a ban")
        found[token] = bias
    return tuple(sorted(found.items()))


def _overflow(name: str, value: object) -> ContextOverflow:
    if not isinstance(value, str):
        raise wrong_type(name, value, "a str")
    for known in CONTEXT_OVERFLOWS:
        if value == known:
            return known
    expected = ", ".join(map(repr, CONTEXT_OVERFLOWS))
    raise ArgumentError(f"{name} is {value!r}, expected one of {expected}")


def _processors(name: str, value: object) -> tuple[LogitsProcessor, ...]:
    found: Any = (value,) if callable(value) else value
    if not isinstance(found, Iterable) or isinstance(found, str | bytes | Mapping):
        raise wrong_type(name, value, "a function or a sequence of functions")
    functions = tuple(found)
    for function in functions:
        if not callable(function):
            raise wrong_type(f"each of {name}", function, "a function")
    return functions


def _early_stopping(name: str, value: object) -> EarlyStopping:
    if isinstance(value, str):
        if value != "never":
            raise ArgumentError(f"{name} is {value!r}, expected True, False or 'never'")
        return "never"
    return _flag(name, value)


def _guide(name: str, value: object) -> Guide:
    from llamac.guided.guides import Guide  # few requests have one

    if not isinstance(value, Guide):
        raise wrong_type(name, value, "a Json, Regex, Choice or Grammar")
    return value


CHECKS: dict[str, Check] = {
    "max_tokens": Integer(1),
    "temperature": _temperature,
    "top_k": Integer(0, MAX_TOP_K, " (off)"),
    "top_p": Real(0, 1, "more than 0 and at most 1 (off)", above=True),
    "min_p": Real(0, 1, "0 (off) to 1"),
    "seed": _seed,
    "stop": _strings,
    "min_tokens": Integer(0),
    "ignore_eos": _flag,
    "stop_token_ids": _token_ids,
    "logit_bias": _logit_bias,
    "repetition_penalty": Real(MIN_POSITIVE, MAX_PENALTY, "more than 0 and at most 1e6"),
    "presence_penalty": Real(-MAX_PENALTY, MAX_PENALTY, "-1e6 to 1e6"),
    "frequency_penalty": Real(-MAX_PENALTY, MAX_PENALTY, "-1e6 to 1e6"),
    "dry_multiplier": Real(0, MAX_PENALTY, "0 (off) to 1e6"),
    "dry_base": Real(1, MAX_PENALTY, "1 to 1e6"),
    "dry_allowed_length": Integer(1, MAX_TOP_K),
    "dry_sequence_breakers": _encodable,
    "banned_tokens": _token_ids,
    "banned_strings": _encodable,
    "logits_processors": _processors,
    "typical_p": Real(0, 1, "more than 0 and at most 1 (off)", above=True),
    "xtc_probability": Real(0, 1, "0 (off) to 1"),
    "xtc_threshold": Real(0, 1, "0 to 1"),
    "mirostat_tau": Real(0, 1000, "0 (off) to 1000"),
    "mirostat_eta": Real(0, 1, "0 to 1"),
    "guide": _guide,
    "logprobs": Integer(0, MAX_TOP_K),
    "prompt_logprobs": Integer(0, MAX_TOP_K),
    "reasoning_budget": Integer(0),
    "context_overflow": _overflow,
    "context_keep": Integer(0),
    "receipt": _flag,
    "speculation": _flag,
    "n": Integer(1, MAX_CANDIDATES),
    "best_of": Integer(1, MAX_CANDIDATES),
    "candidate": Integer(0, MAX_CANDIDATE),
    "beam_width": Integer(1, MAX_CANDIDATES),
    "length_penalty": Real(-100, 100, "-100 to 100"),
    "early_stopping": _early_stopping,
}
