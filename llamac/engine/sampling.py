"""Sampling parameters: their limits, and the rule for parameters that a request does not set."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from llamac import _core
from llamac.arguments import real_number, whole_number, wrong_type
from llamac.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_TEMPERATURE = 1e6
MIN_POSITIVE = 1e-37  # the core computes in f32, where smaller numbers lose precision or become 0
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**64 - 1


class SamplingOverrides(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream`, `chat` and `chat_stream`, an alternative to `SamplingParams`."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. None means "not set".

    If a request does not set a value, the model's recommendation applies (`Model.sampling_defaults`). Without a
    recommendation, temperature and top_p are 1, and top_k and min_p are off. The filters apply in the order of the
    attributes.

    Attributes:
        max_tokens: Largest number of new tokens. Not set: until a stop or the end of the context.
        temperature: Divisor of the logits, 0 to 1e6. 0 always takes the most probable token (greedy).
        top_k: Keep the k most probable tokens. 0: off.
        top_p: Keep the most probable tokens that together reach this probability, more than 0 and at most 1. 1: off.
        min_p: Keep the tokens that are at least this probable relative to the best one, 0 to 1. 0: off.
        seed: 0 to 2**64 - 1. A draw depends on the seed and the position alone. Not set: a random seed, which
            `Completion.seed` reports.
        stop: A string, or several, that end the generation. The text ends before the string.

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

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check(name, value))

    def updated(self, overrides: Mapping[str, Any]) -> Self:
        """Replace parameters with those values of `overrides` that are not None.

        Raises:
            ArgumentError: If a value is out of range; `ArgumentTypeError` for an unknown name or a wrong type.
        """
        unknown = sorted(set(overrides) - set(_CHECKS))
        if unknown:
            raise ArgumentTypeError(f"unexpected argument {unknown[0]!r}: expected one of {', '.join(_CHECKS)}")
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

    @functools.cached_property
    def core(self) -> _core.Sampling:
        """These parameters in the core's form."""
        return _core.Sampling(self.temperature, self.top_k, max(self.top_p, MIN_POSITIVE), self.min_p, self.seed)


# The values that neither the request nor the model sets.
LIBRARY_DEFAULTS = {"max_tokens": None, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "stop": ()}


def resolve(request: SamplingParams, recommended: SamplingParams) -> ResolvedParams:
    """Complete a request's parameters.

    This is the only rule for defaults, in every API: the request, else the model's recommendation, else
    `LIBRARY_DEFAULTS`. A missing seed is random.

    Args:
        request: The request's parameters.
        recommended: The model's parameters.
    """
    values: dict[str, Any] = {**LIBRARY_DEFAULTS, **_given(recommended), **_given(request)}
    if "seed" not in values:
        values["seed"] = int.from_bytes(os.urandom(4), "little")
    return ResolvedParams(**values)


def _given(params: SamplingParams) -> dict[str, Any]:
    """The values that are set."""
    return {name: value for name in _CHECKS if (value := getattr(params, name)) is not None}


def recommended_params(metadata: Mapping[str, Any], warn: Callable[[str], object]) -> SamplingParams:
    """Read the sampling parameters that a model file recommends.

    Args:
        metadata: The file's metadata, whose entry "generation" has them.
        warn: Called with a message about each value that is out of range and therefore ignored.
    """
    entries = metadata.get("generation", {})
    if not isinstance(entries, dict):
        warn(f"generation settings ignored: expected an object, found {type(entries).__name__}")
        return SamplingParams()
    params = SamplingParams()
    for name in ("temperature", "top_k", "top_p", "min_p"):
        try:
            params = params.updated({name: entries.get(name)})
        except ArgumentError as error:
            warn(f"generation setting ignored: {error}")
    return params


# ---- checks: each returns the value in its plain type


def _max_tokens(name: str, value: object) -> int:
    number = whole_number(value, name)
    if number < 1:
        raise ArgumentError(f"{name} is {number}, expected at least 1")
    return number


def _temperature(name: str, value: object) -> float:
    number = real_number(value, name)
    if number != 0 and not MIN_POSITIVE <= number <= MAX_TEMPERATURE:
        raise ArgumentError(f"{name} is {number:g}, expected 0 (greedy) or {MIN_POSITIVE:g} to {MAX_TEMPERATURE:g}")
    return number


def _top_k(name: str, value: object) -> int:
    number = whole_number(value, name)
    if not 0 <= number <= MAX_TOP_K:
        raise ArgumentError(f"{name} is {number}, expected 0 (off) to {MAX_TOP_K}")
    return number


def _top_p(name: str, value: object) -> float:
    number = real_number(value, name)
    if not 0 < number <= 1:
        raise ArgumentError(f"{name} is {number:g}, expected more than 0 and at most 1 (off)")
    return number


def _min_p(name: str, value: object) -> float:
    number = real_number(value, name)
    if not 0 <= number <= 1:
        raise ArgumentError(f"{name} is {number:g}, expected 0 (off) to 1")
    return number


def _seed(name: str, value: object) -> int:
    number = whole_number(value, name)
    if not 0 <= number <= MAX_SEED:
        raise ArgumentError(f"{name} is {number}, expected 0 to 2**64 - 1")
    return number


def _stop(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise wrong_type(name, value, "a str or a sequence of str")
    stops = (value,) if isinstance(value, str) else tuple(value)
    for stop in stops:
        if not isinstance(stop, str):
            raise wrong_type(f"each string of {name}", stop, "a str")
        if not stop:
            raise ArgumentError(f"{name} is {value!r}, expected strings that are not empty")
    return stops


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "max_tokens": _max_tokens,
    "temperature": _temperature,
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": _min_p,
    "seed": _seed,
    "stop": _stop,
}
