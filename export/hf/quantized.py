"""Quantized weights that any family can have: the kinds of `quantization_config`, and the tensors they describe.

Families do not know of them: `dequantized` replaces the tensors that a checkpoint stores, before anything else reads
them, and each is dequantized as its rows are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from llamac.export.hf import compressed, fp8
from llamac.export.stored import StoredTensor

Stored = dict[str, StoredTensor]


class Quantization(Protocol):
    """A parsed quantization_config."""

    def dequantized(self, stored: Stored, is_ignored: Callable[[str], bool]) -> Stored:
        """The tensors of a checkpoint, with numbers in place of codes and factors. `is_ignored` names other tensors."""
        ...


METHODS: dict[str, Callable[[dict[str, Any], list[str]], Quantization]] = {
    fp8.METHOD: fp8.parse,
    compressed.METHOD: compressed.parse,
}
NAMES = " and ".join(METHODS)


def is_read(values: Any) -> bool:
    """Whether a quantization_config is of a kind that is read for all families."""
    method = values.get("quant_method") if isinstance(values, dict) else None
    return isinstance(method, str) and method in METHODS


def parse(values: dict[str, Any], warnings: list[str]) -> Quantization:
    """Parse a quantization_config of such a kind. UnsupportedError if it describes other weights."""
    return METHODS[values["quant_method"]](values, warnings)
