"""What each tensor's quantization costs: the base is evaluated with one tensor in its quantized form.

The core computes with the replaced tensor in memory, so no file is written. The costs of single tensors nearly add up
to the cost of the whole file: the errors of different tensors are independent, so their squares add up.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from llamac.engine.model import Model
from llamac.errors import ArgumentError
from llamac.export.calibrate import float_model
from llamac.export.checkpoint import Checkpoint
from llamac.export.dtypes import DTYPES
from llamac.export.quality.measures import Reference
from llamac.format.flatfile import TensorRecord
from llamac.format.strips import FLOATS
from llamac.progress import Progress, silent

EMBEDDING, OUTPUT = "token_embedding.weight", "output.weight"

Stored = tuple[str, bytes]  # a tensor's dtype and its bytes in a flat file


class Cost(NamedTuple):
    """What quantizing a part of a model costs.

    Attributes:
        name: The tensor, with * for the numbers of experts, which are one part; or the layer.
        layer: The number of its layer, or None.
        dtypes: The dtypes in the quantized form.
        bytes: The size of the quantized form.
        nats: The mean divergence of the base with this part quantized from the base.
    """

    name: str
    layer: int | None
    dtypes: tuple[str, ...]
    bytes: int
    nats: float


def part_of(name: str) -> str:
    """The part of a model that a tensor belongs to: itself, or the same matrices of all experts of its layer."""
    return re.sub(r"\bexperts\.\d+\.", "experts.*.", name)


def layer_of(name: str) -> int | None:
    """The number of a tensor's layer."""
    found = re.match(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def layer_part(name: str) -> str:
    """The tensor's layer, or its own name if it belongs to none."""
    number = layer_of(name)
    return name if number is None else f"layers.{number}"


def costs(
    base: Model,
    model: Model,
    reference: Reference,
    part: Callable[[str], str] = part_of,
    progress: Progress = silent,
) -> list[Cost]:
    """Measure what the quantization of each part of a model costs.

    Args:
        base: The base.
        model: The quantized model. Tensors that are the same in both cost nothing and are left out.
        reference: What the base computes.
        part: The part that a tensor with this name belongs to: `part_of` or `layer_part`.
        progress: Called with the phase "measuring costs" and numbers of parts.

    Returns:
        The costs in the order of the tensors in the file.

    Raises:
        ArgumentError: If the models do not have the same tensors.
    """
    changed = list(_changed(base, model))
    parts: dict[str, list[TensorRecord]] = {}
    for record in changed:
        parts.setdefault(part(record.name), []).append(record)
    found = []
    for done, (name, records) in enumerate(parts.items()):
        progress("measuring costs", done, len(parts))
        changes = {record.name: (record.dtype, model.file.stored(record.name)[1]) for record in records}
        nats = cost(base, changes, reference)
        dtypes = tuple(dict.fromkeys(record.dtype for record in records))
        found.append(Cost(name, layer_of(records[0].name), dtypes, sum(record.bytes for record in records), nats))
    progress("measuring costs", len(parts), len(parts))
    return found


def cost(base: Model, changes: Mapping[str, Stored], reference: Reference) -> float:
    """Evaluate the base with other tensors.

    Args:
        base: The base. It does not change.
        changes: The tensors to replace, by name.
        reference: What the base computes.

    Returns:
        The mean divergence from the base, in nats.
    """
    file = base.file.reopened()
    try:
        for name, (dtype, data) in changes.items():
            file.core.replace(name, DTYPES[dtype], data)
            if name == EMBEDDING and file.config["tied_output"]:
                file.core.replace(OUTPUT, DTYPES[dtype], data)
        with Model(file, base._session_defaults) as model:
            return reference.compare(model).kl_mean
    finally:
        file.close()


def costliest(
    original: Checkpoint,
    model: Model,
    ids: list[int],
    count: int,
    threads: int,
    progress: Progress = silent,
) -> list[Cost]:
    """The parts of a quantized model whose quantization costs most, against the checkpoint that it was made from.

    Args:
        original: The checkpoint. Its float weights are written to a temporary file.
        model: The quantized model.
        ids: Token ids of the text.
        count: The most parts to return.
        threads: Threads of the evaluations.
        progress: As for `costs`.

    Raises:
        ArgumentError: As `costs`.
    """
    with tempfile.TemporaryDirectory() as folder, float_model(original, Path(folder), threads) as base:
        check_tensors(base, model)  # before the ids, which another vocabulary lacks
        with Reference(base, [ids]) as reference:
            found = costs(base, model, reference, progress=progress)
    return most((one for one in found if not set(one.dtypes) <= set(FLOATS)), count)


def most(found: Iterable[Cost], count: int) -> list[Cost]:
    """The `count` largest costs, largest first; of equal ones the first."""
    return sorted(found, key=lambda one: -one.nats)[:count]


def check_tensors(base: Model, model: Model) -> None:
    """Check that a model can have been made from the base.

    Raises:
        ArgumentError: If the models do not have the same tensors.
    """
    ours = {record.name: record.shape for record in base.file.tensors}
    theirs = {record.name: record.shape for record in model.file.tensors}
    if ours.keys() != theirs.keys():
        name = min(ours.keys() ^ theirs.keys())
        owner = "the base" if name in ours else "the model"
        raise ArgumentError(f"only {owner} has a tensor {name}: costs need a model that was made from the base")
    for name, shape in theirs.items():
        if shape != ours[name]:
            raise ArgumentError(
                f"{name} is {ours[name]} in the base, but {shape} in the model: costs need a model that was made from "
                "the base"
            )


def _changed(base: Model, model: Model) -> Iterator[TensorRecord]:
    """The records of the model's tensors whose bytes or dtype differ from the base's."""
    check_tensors(base, model)
    dtypes = {record.name: record.dtype for record in base.file.tensors}
    for record in model.file.tensors:
        name = record.name
        if record.dtype != dtypes[name] or base.file.stored(name)[1] != model.file.stored(name)[1]:
            yield record
