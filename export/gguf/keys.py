"""Typed, range-checked access to the metadata keys of a GGUF architecture, with one error for all problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamac import _core
from llamac.errors import ExportError
from llamac.export.gguf.families import HARMLESS_KEYS, NEUTRAL_KEYS, REQUIRED, key_name
from llamac.format.gguf_metadata import Value

LIMITS = {name: high for record, name, *_, high, _ in _core.fields() if record in ("config", "layer")}


class Keys:
    """Typed, range-checked access to the keys of one architecture; collects problems. known: keys with defaults."""

    def __init__(self, values: Mapping[str, Value], prefix: str, known: Mapping[str, object]) -> None:
        self._architecture = prefix
        self._known = known
        start = f"{prefix}."
        self._values = {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}
        for key in known:
            if key_name(prefix, key) == key:
                self._values.pop(key, None)
                self._values |= {key: values[key]} if key in values else {}
        self.problems = [
            f"{key_name(prefix, key)} is missing"
            for key, default in known.items()
            if default is REQUIRED and key not in self._values
        ]

    def wrong(self, key: str, expected: str) -> None:
        """Record that a key has a wrong value."""
        self.problems.append(f"{self._shown(key)}, expected {expected}")

    def unknown(self, key: str) -> None:
        """Record that llamac does not know a key."""
        what = "llamac does not know this key, which could change what the model computes"
        self.problems.append(f"{self._shown(key)}: {what}")

    def _shown(self, key: str) -> str:
        """A key and its value for a message."""
        value = repr(self._values.get(key))
        shown = value if len(value) <= 80 else value[:77] + "..."
        return f"{key_name(self._architecture, key)} is {shown}"

    def value(self, key: str) -> Any:
        """The value, or its default."""
        default = self._known[key]
        return self._values.get(key, None if default is REQUIRED else default)

    def size(self, key: str, default: int = 1, least: int = 1) -> int:
        """An integer, or the common value of a list with one per layer. Returns `least` for a wrong value."""
        value = self.value(key)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if value is None:
            return default
        if type(value) is not int or not least <= value <= LIMITS["vocab_size"]:
            self.wrong(key, f"an integer from {least} to {LIMITS['vocab_size']}, the same for all layers")
            return least
        return value

    def sizes(self, key: str, n_layers: int, least: int = 1) -> tuple[int, ...]:
        """An integer per layer. A list may also have those of layers that predict further tokens."""
        value = self.value(key)
        if value is None:
            self.problems.append(f"{key_name(self._architecture, key)} is missing")
            return ()
        found = value if isinstance(value, list) else [value] * n_layers
        is_whole = len(found) in (n_layers, self.value("block_count"))
        if not is_whole or not all(type(one) is int and least <= one <= LIMITS["ffn_dim"] for one in found):
            self.wrong(key, f"an integer from {least} to {LIMITS['ffn_dim']}, or one for each of {n_layers} layers")
            return ()
        return tuple(found[:n_layers])

    def number(self, key: str, most: float = 3.4e38) -> float | None:
        """A number from 0 to `most`, or None if missing."""
        value = self.value(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 <= value <= most:
            self.wrong(key, f"a number from 0 to {most:g}")
            return 0.0
        return float(value)

    def flag(self, key: str) -> bool | None:
        """A boolean, or None if missing."""
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            self.wrong(key, "true or false")
        return value if isinstance(value, bool) else None

    def text(self, key: str) -> str | None:
        """A string, or None if missing."""
        value = self.value(key)
        if value is not None and not isinstance(value, str):
            self.wrong(key, "a string")
        return value if isinstance(value, str) else None

    def finish(self) -> None:
        """Check that all keys are known and all values valid.

        Raises:
            ExportError: If there are problems. The message lists all of them.
        """
        for key, value in self._values.items():
            if key in self._known or key in HARMLESS_KEYS:
                continue
            if key not in NEUTRAL_KEYS:
                self.unknown(key)
            elif value not in NEUTRAL_KEYS[key]:
                allowed = " or ".join(map(str, NEUTRAL_KEYS[key]))
                self.wrong(key, f"{allowed}: other values are not supported for this architecture")
        if self.problems:
            problems = "\n  ".join(self.problems)
            raise ExportError(f"the GGUF metadata cannot be converted:\n  {problems}")
