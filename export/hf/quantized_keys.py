"""Checks the keys of a quantization_config, with one error for all problems."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

ADVICE = "export from the original model or another quantization (docs/families.md)"


def wrong_keys(
    values: Mapping[str, Any], where: str, keys: Mapping[str, tuple[Any, ...]], harmless: Collection[str] | None = None
) -> Iterator[str]:
    """What is wrong with the keys of an object.

    Args:
        values: The object.
        where: Precedes the names of its keys.
        keys: The keys that must have one of some values.
        harmless: All other keys that it can have; None: any.
    """
    for key, value in values.items():
        if harmless is not None and key not in keys and key not in harmless and value is not None:
            yield f"{where}{key} is {value!r:.80}"
    for key, accepted in keys.items():
        value = values.get(key)
        if not any(type(value) is type(one) and value == one for one in accepted):
            names = " or ".join(repr(one) for one in accepted if one not in (None, {}))
            yield f"{where}{key} is {value!r:.80}" + (f", expected {names}" if names else "")


def unsupported(method: str, problems: Iterable[str]) -> str:
    """The message for a quantization_config that cannot be read."""
    return f"config.json: quantization_config of {method} is not supported: {', '.join(problems)}; {ADVICE}"
