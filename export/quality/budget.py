"""`--dtype-map auto`: spends a budget of bits where quantization costs most.

The cost of each matrix is measured in the number formats of up to 4 bits: the divergence of the float model with this
matrix quantized. For small errors the divergence grows with their square, so the cost in a wider format is the last
measured one times the ratio of the squared errors of the weights. Every matrix begins in the coarsest format, and the
budget buys wider ones in the order of the divergence that a byte saves.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llamac import _core
from llamac.engine.model import Model
from llamac.errors import ArgumentError, ExportError
from llamac.export.calibrate import float_model
from llamac.export.checkpoint import Checkpoint
from llamac.export.dtypes import DTYPES
from llamac.export.flat.packing import checked_chunks
from llamac.export.flat.plan import Plan, make_plan, matching_tensors
from llamac.export.quality.measures import Reference
from llamac.export.quality.tensors import Stored, cost, part_of
from llamac.export.quantize import Quantizer
from llamac.export.texts import windows
from llamac.format.strips import FLOATS, unpack_tensor
from llamac.progress import Progress, silent
from llamac.text.tokenizer import Tokenizer

MEASURED = ("q2", "q3", "q4s")
LADDER = (*MEASURED, "q4", "q6", "q8")  # the coarsest first
TOKENS, WINDOW = 256, 128  # of the text
DIGITS = 3  # of a cost; the last digits of sums in NumPy depend on the processor

DtypeMap = list[tuple[str, str]]


class Choice(NamedTuple):
    """A number format for a part.

    Attributes:
        dtype: The format.
        bytes: The size of the part in it.
        nats: What it costs.
    """

    dtype: str
    bytes: int
    nats: float


class Budget:
    """The number formats that the matrices of a checkpoint can have, and their sizes.

    A part is a matrix, or the same matrices of all experts of a layer. Its formats are those of `LADDER`. If export can
    keep the source's own format, a float or one of GGUF's, the part has this format, too, which costs nothing, and none
    that is wider.

    Args:
        checkpoint: The model.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.tensors = matching_tensors(checkpoint)
        self.parts: dict[str, list[str]] = {}
        for name, tensor in self.tensors.items():
            if len(tensor.shape) == 2:
                self.parts.setdefault(part_of(name), []).append(name)
        self.dtypes = {part: self._dtypes(names) for part, names in self.parts.items()}

    def _dtypes(self, names: Sequence[str]) -> list[str]:
        """The formats that a part can have, the smallest first."""
        tensors = [self.tensors[name] for name in names]
        own = {tensor.dtype if tensor.blocks or tensor.dtype in FLOATS else "" for tensor in tensors}
        kept = own.pop() if len(own) == 1 else ""
        formats = [*LADDER, kept] if kept else list(LADDER)
        # narrow matrices can take the same space in several formats: the last one is the best of them
        sizes = {self.size(names, dtype): dtype for dtype in formats}
        return [dtype for size, dtype in sorted(sizes.items()) if size <= self.size(names, formats[-1])]

    def size(self, names: Sequence[str], dtype: str) -> int:
        """The size of matrices in a format."""
        return sum(_core.matrix_bytes(DTYPES[dtype], *self.tensors[name].shape) for name in names)

    def plan(self, chosen: Mapping[str, str]) -> Plan:
        """The layout of the file in which each part has its chosen format."""
        dtypes = dict.fromkeys(self.tensors, "f32")
        dtypes |= {name: chosen[part] for part, names in self.parts.items() for name in names}
        return make_plan(self.checkpoint, "f32", None, dtypes)

    def check(self, bits: float) -> int:
        """Check a budget of bits per weight, of all tensors together.

        Returns:
            The bytes that it leaves for more than the coarsest formats.

        Raises:
            ArgumentError: If no choice of formats fits, or every choice does.
        """
        least = self.plan({part: dtypes[0] for part, dtypes in self.dtypes.items()})
        most = self.plan({part: dtypes[-1] for part, dtypes in self.dtypes.items()})
        if not least.bits_per_weight <= bits <= most.bits_per_weight:
            raise ArgumentError(
                f"bits is {bits:g}, but files of this model have {_up(least.bits_per_weight)} to "
                f"{np.floor(most.bits_per_weight * 100) / 100:.2f} bits per weight"
            )
        parameters = 8 * least.data_bytes / least.bits_per_weight
        return int(bits * parameters / 8) - least.data_bytes

    # ---- measuring

    def measure(self, text: str, folder: Path, threads: int, progress: Progress = silent) -> dict[str, list[Choice]]:
        """Measure what the formats of each part cost.

        Args:
            text: The text to measure on.
            folder: Where to write the float model, which is deleted in the end.
            threads: Threads that compute.
            progress: Called with the phases "evaluating the base" and "measuring costs".

        Raises:
            ExportError: If the text is too short, or there is no tokenizer.
        """
        sequences = self._windows(text)
        found = {}
        with (
            float_model(self.checkpoint, folder, threads) as base,
            Reference(base, sequences, progress) as reference,
            Quantizer(threads) as quantizer,
        ):
            for done, part in enumerate(self.parts):
                progress("measuring costs", done, len(self.parts))
                found[part] = self._choices(part, base, reference, quantizer)
            progress("measuring costs", len(self.parts), len(self.parts))
        return found

    def _windows(self, text: str) -> list[list[int]]:
        if self.checkpoint.tokenizer is None:
            raise ExportError("dtype_map 'auto' measures costs on a text, which needs a tokenizer")
        data, special, _ = self.checkpoint.tokenizer
        tokenizer = Tokenizer.from_json(data, replace(special, add_eos=False))
        found = windows(
            lambda part: tokenizer.encode(part, add_special=False),
            tokenizer.encode("", add_special=True),
            text,
            TOKENS,
            min(WINDOW, self.checkpoint.config.context),
        )
        if not found:
            raise ExportError("the text to measure costs on has fewer than 2 tokens")
        return found

    def _choices(self, part: str, base: Model, reference: Reference, quantizer: Quantizer) -> list[Choice]:
        names, dtypes = self.parts[part], self.dtypes[part]
        errors = dict.fromkeys(dtypes, 0.0)
        changes: dict[str, dict[str, Stored]] = {dtype: {} for dtype in self._measured(dtypes)}
        for name in names:
            pieces: dict[str, list[bytes]] = {dtype: [] for dtype in changes}
            for dtype, data, squares in self._quantized(name, dtypes, quantizer):
                errors[dtype] += squares
                if dtype in pieces:
                    pieces[dtype].append(data)
            for dtype, strips in pieces.items():
                changes[dtype][name] = dtype, b"".join(strips)
        found, nats, squares_of_nats = [], 0.0, 0.0
        for dtype in dtypes:
            if dtype in changes and errors[dtype]:
                nats, squares_of_nats = cost(base, changes[dtype], reference), errors[dtype]
            estimate = nats * errors[dtype] / squares_of_nats if squares_of_nats else 0.0
            found.append(Choice(dtype, self.size(names, dtype), _rounded(estimate)))
        return found

    @staticmethod
    def _measured(dtypes: Sequence[str]) -> list[str]:
        """The formats whose costs are measured: at least the coarsest."""
        return [dtype for dtype in dtypes if dtype in MEASURED] or list(dtypes[:1])

    def _quantized(self, name: str, dtypes: Sequence[str], quantizer: Quantizer) -> Iterator[tuple[str, bytes, float]]:
        """Some rows of a matrix after the other in each format of `LADDER`: (dtype, strips, sum of squared errors)."""
        tensor = self.tensors[name]
        for rows in checked_chunks(name, tensor, dtypes[0]):
            for dtype in dtypes:
                if dtype in LADDER:
                    data = quantizer.pack(rows, dtype)
                    error = unpack_tensor(data, dtype, rows.shape) - rows
                    yield dtype, data, float(np.einsum("ij,ij->", error, error, dtype=np.float64))


# ---- spending


def allocate(parts: Mapping[str, Sequence[Choice]], spare: int) -> dict[str, str]:
    """Choose the format of each part.

    A larger budget never gives any part a smaller format, because it takes the same steps and then more. So the steps
    end with the first one that does not fit, although a smaller one might.

    Args:
        parts: The formats of each part, the smallest first.
        spare: The bytes to spend above the smallest formats.
    """
    steps: list[tuple[float, int, str, Choice]] = []
    for part, choices in parts.items():
        kept = _worthwhile(choices)
        for smaller, wider in itertools.pairwise(kept):
            more = wider.bytes - smaller.bytes
            steps.append(((smaller.nats - wider.nats) / more, more, part, wider))
    steps.sort(key=lambda step: -step[0])  # stable: equal ones stay in the order of the file
    chosen = {part: choices[0].dtype for part, choices in parts.items()}
    for _, more, part, wider in steps:
        if more > spare:
            break
        spare -= more
        chosen[part] = wider.dtype
    return chosen


def _worthwhile(choices: Sequence[Choice]) -> list[Choice]:
    """The choices on the convex hull: each step to a wider one saves less per byte than the step before."""
    kept = [choices[0]]
    for choice in choices[1:]:
        while len(kept) > 1 and _saving(kept[-2], kept[-1]) <= _saving(kept[-2], choice):
            kept.pop()
        if choice.nats < kept[-1].nats:
            kept.append(choice)
    return kept


def _saving(smaller: Choice, wider: Choice) -> float:
    return (smaller.nats - wider.nats) / (wider.bytes - smaller.bytes)


# ---- the map


def dtype_map(budget: Budget, chosen: Mapping[str, str]) -> DtypeMap:
    """Write a choice as (pattern, dtype) pairs that name every matrix.

    Most layers share a pattern such as layers.*.attn_q.weight; the others precede it.
    """
    kinds: dict[str, list[str]] = {}
    for part in chosen:
        kinds.setdefault(re.sub(r"^layers\.\d+\.", "layers.*.", part), []).append(part)
    exceptions, common = [], []
    for kind, parts in kinds.items():
        dtypes = [chosen[part] for part in parts]
        most = max(dict.fromkeys(dtypes), key=dtypes.count)
        common.append((kind, most))
        exceptions += [(part, chosen[part]) for part in parts if chosen[part] != most]
    # the matrices of experts also match the pattern of a layer's own, which is shorter
    pairs = [*exceptions, *sorted(common, key=lambda pair: -len(pair[0]))]
    matched = {
        name: next(dtype for pattern, dtype in pairs if fnmatch.fnmatchcase(name, pattern))
        for names in budget.parts.values()
        for name in names
    }
    exact = {name: chosen[part] for part, names in budget.parts.items() for name in names}
    return pairs if matched == exact else list(exact.items())


def most_common(budget: Budget, chosen: Mapping[str, str]) -> str:
    """The format of most parameters."""
    counts: dict[str, int] = {}
    for part, names in budget.parts.items():
        for name in names:
            rows, columns = budget.tensors[name].shape
            counts[chosen[part]] = counts.get(chosen[part], 0) + rows * columns
    return max(counts, key=lambda dtype: counts[dtype])


def _rounded(nats: float) -> float:
    return float(f"{nats:.{DIGITS}g}")


def _up(bits: float) -> str:
    """Bits per weight, rounded up so that the number itself is a budget."""
    return f"{np.ceil(bits * 100) / 100:.2f}"
