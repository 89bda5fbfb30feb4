"""The options of an export, checked before anything is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llamac.arguments import AUTO, Adapter, StrPath, adapters, file_path, to_float, to_int, wrong_type
from llamac.errors import ArgumentError, ArgumentTypeError, ExportError
from llamac.format.strips import FLOATS, QUANTIZED

TARGETS = ("llamac", "hf", "llama2c", "gguf")
GGUF_DTYPES = ("q8_0", "q4_0")  # beside FLOATS
MAX_TEXT_CHARACTERS = 1 << 20  # the rest of a longer text is not read


@dataclass(frozen=True)
class ExportOptions:
    """The keyword arguments of `llamac.export.export`, which documents them.

    Attributes:
        bits: The budget of dtype_map="auto", which `dtype_map` then does not have yet.
        sync: Whether to wait until the disk has the file.
        hashed: Whether to wait for the hashes of a flat file's tensors.

    Raises:
        ArgumentError: If an option is wrong, or has no effect with this `to`.
    """

    to: str = "llamac"
    dtype: str | None = None
    tokenizer: StrPath | Literal[False] | None = None
    name: str | None = None
    pure: bool = False
    dtype_map: tuple[tuple[str, str], ...] = ()
    bits: float | None = None
    bits_text: StrPath | None = None
    calibrate: StrPath | None = None
    lora: tuple[tuple[Path, float], ...] = ()
    threads: int | None = None
    probe_source: str | None = "auto"
    overwrite: bool = False
    partial: Path | None = None
    sync: bool = True
    hashed: bool = True

    @classmethod
    def parse(
        cls, *, dtype_map: Iterable[tuple[str, str]] | str, lora: Adapter | Iterable[Adapter], **options: Any
    ) -> ExportOptions:
        """Check the arguments' types and collect them."""
        _check_bits(dtype_map, options)
        for label in ("to", "dtype", "name", "probe_source"):
            if not isinstance(options[label], str | None):
                raise wrong_type(label, options[label], "a string")
        pairs = () if _is_auto(dtype_map) else _pairs(dtype_map)
        found = cls(dtype_map=pairs, lora=tuple(adapters(lora)), **options)
        if found.to != "gguf" and found.dtype in GGUF_DTYPES:
            raise ArgumentError(f"dtype {found.dtype!r} is for to='gguf' only")
        return found

    def __post_init__(self) -> None:
        if self.to not in TARGETS:
            raise ArgumentError(f"to is {self.to!r}, expected one of {', '.join(TARGETS)}")
        if self.threads is not None and to_int(self.threads, "threads") < 1:
            raise ArgumentError(f"threads is {self.threads}, expected at least 1")
        if self.to not in ("llamac", "gguf") and self.name is not None:
            raise ArgumentError(f"name is stored in flat files and GGUF files only, not with to={self.to!r}")
        if self.to != "llamac":
            self._check_flat_only()
        if self.to == "hf" and self.overwrite:
            raise ArgumentError(
                "overwrite (--force) replaces files only: to='hf' needs a directory that is new or empty"
            )
        if self.to == "llama2c" and self.dtype not in (None, "f32"):
            raise ArgumentError(f"dtype is {self.dtype!r}, but llama2.c's checkpoint of version 0 is always f32")
        if self.lora and self.probe_source == "transformers":
            raise ArgumentError(
                "probe_source='transformers' computes the source directory's logits, without the adapters in lora"
            )

    def _check_flat_only(self) -> None:
        if self.probe_source != "auto":
            raise ArgumentError(f"probe_source is for flat files only: to={self.to!r} writes no probes")
        if self.dtype == "auto" and self.to != "gguf":
            raise ArgumentError(f"dtype 'auto' is for flat files and GGUF files only, not with to={self.to!r}")
        if self.dtype in QUANTIZED:
            accepted = (*FLOATS, *(GGUF_DTYPES if self.to == "gguf" else ()))
            raise ArgumentError(
                f"dtype {self.dtype!r} is for flat files only: to={self.to!r} takes {', '.join(accepted)}"
            )
        quantizing = ("bits", "pure", "dtype_map", "calibrate", "threads")
        if given := [name for name in quantizing if getattr(self, name) not in (None, False, ())]:
            raise ArgumentError(f"{given[0]} is for flat files only, not with to={self.to!r}")

    def calibration_text(self) -> str | None:
        """The text to calibrate on; "" for text that the model generates, None for no calibration.

        Raises:
            ExportError: If the file cannot be read, or is empty.
        """
        if self.calibrate is None or self.calibrate == "self":
            return None if self.calibrate is None else ""
        return _text(self.calibrate, "calibrate", "calibration text")

    def budget_text(self) -> str:
        """The text to measure costs on for dtype_map="auto".

        Raises:
            ExportError: If the file cannot be read, or is empty.
        """
        from llamac.export.texts import built_in_text

        return built_in_text() if self.bits_text is None else _text(self.bits_text, "bits_text", "text")


def read_text(path: StrPath, name: str, what: str) -> str:
    """The beginning of a text file.

    Raises:
        ExportError: If it cannot be read. The message says what it is.
    """
    try:
        with open(file_path(path, name), encoding="utf-8") as file:
            return file.read(MAX_TEXT_CHARACTERS)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ExportError(f"the {what} {path} is not UTF-8: it has the byte 0x{byte:02x}") from None
    except OSError as error:
        raise ExportError(f"the {what} {path} cannot be read: {error.strerror}") from None


def _text(path: StrPath, name: str, what: str) -> str:
    """The beginning of a text file that must not be empty."""
    text = read_text(path, name, what)
    if not text:
        raise ExportError(f"the {what} {path} is empty")
    return text


def _is_auto(dtype_map: object) -> bool:
    return isinstance(dtype_map, str) and dtype_map == AUTO


def _check_bits(dtype_map: object, options: dict[str, Any]) -> None:
    """Check the options of dtype_map="auto", which chooses all dtypes itself."""
    is_auto = _is_auto(dtype_map)
    if options["bits"] is not None:
        options["bits"] = to_float(options["bits"], "bits")
        if not is_auto:
            raise ArgumentError("bits is for dtype_map='auto', which chooses number formats for this many bits")
    elif is_auto:
        raise ArgumentError("dtype_map 'auto' needs bits=B, the most bits per weight of the file")
    elif options["bits_text"] is not None:
        raise ArgumentError("bits_text is for dtype_map='auto'")
    if is_auto:
        for name in ("dtype", "pure"):
            if options[name]:
                raise ArgumentError(f"{name} has no effect with dtype_map 'auto', which chooses all number formats")


def _pairs(dtype_map: Iterable[tuple[str, str]] | str) -> tuple[tuple[str, str], ...]:
    pairs: list[Any] = list(dtype_map) if isinstance(dtype_map, Iterable) and not isinstance(dtype_map, str) else [None]
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise ArgumentTypeError(f"dtype_map is {dtype_map!r}, expected 'auto' or pairs (pattern of names, dtype)")
    return tuple((pattern, dtype) for pattern, dtype in pairs)
