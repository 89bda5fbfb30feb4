"""Quantized weights that any family can have: the kinds of `quantization_config`, and the tensors they describe.

Families do not know of them: `dequantized` replaces the tensors that a checkpoint stores, before anything else reads
them, and each is dequantized as its rows are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from llamac.errors import UnsupportedError
from llamac.export.hf import compressed, fp8, gptq
from llamac.export.hf.family import Family
from llamac.export.hf.quantized_keys import unsupported
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
    **dict.fromkeys((gptq.GPTQ, gptq.AWQ, gptq.AUTO_ROUND, gptq.OLD_AUTO_ROUND), gptq.parse),
}
# Those whose matrices can be stored as (inputs, outputs).
OF_TRANSPOSED = (fp8.METHOD, compressed.METHOD)
NAMES = ", ".join(METHODS)


def is_read(values: Any) -> bool:
    """Whether a quantization_config is of a kind that is read for all families."""
    method = values.get("quant_method") if isinstance(values, dict) else None
    return isinstance(method, str) and method in METHODS


def parse(values: dict[str, Any], family: Family, warnings: list[str]) -> Quantization:
    """Parse a quantization_config of such a kind. UnsupportedError if it describes other weights."""
    method = values["quant_method"]
    if method not in OF_TRANSPOSED and any(module.transposed for module in family.modules):
        problem = f"the matrices of the family {family.model_type} are (inputs, outputs)"
        raise UnsupportedError(unsupported(method, [problem]))
    return METHODS[method](values, warnings)
