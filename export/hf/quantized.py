"""Quantized weights that any family can have: the kinds of `quantization_config`, and the tensors they describe.

The rows of families do not mention them: `dequantized` replaces the tensors that a checkpoint stores, before anything
else reads them, and each is dequantized as its rows are read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from llamac.errors import ExportError, UnsupportedError
from llamac.export.hf import bitsandbytes, compressed, fp8, gptq, named_scales
from llamac.export.hf.family import Family
from llamac.export.hf.quantized_keys import unsupported
from llamac.export.stored import StoredTensor
from llamac.format.strict_json import read_object

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
    **dict.fromkeys((named_scales.FBGEMM, named_scales.MODELOPT), named_scales.parse),
    bitsandbytes.METHOD: bitsandbytes.parse,
}
# Those whose matrices can be stored as (inputs, outputs).
OF_TRANSPOSED = (fp8.METHOD, compressed.METHOD, named_scales.FBGEMM, named_scales.MODELOPT)
NAMES = ", ".join(METHODS)


def with_config(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The values of config.json with the quantization_config that earlier versions of modelopt wrote beside it."""
    path = folder / named_scales.HF_QUANT_CONFIG
    if values.get("quantization_config") is not None or not path.is_file():
        return values
    found = read_object(path).get("quantization")
    if not isinstance(found, dict):
        raise ExportError(f"{path}: quantization is {found!r:.80}, expected an object")
    return {**values, "quantization_config": {"quant_method": named_scales.MODELOPT, **found}}


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
