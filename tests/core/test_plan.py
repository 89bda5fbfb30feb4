"""The plan of a model: in every family, each tensor of the file is the operand of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import llamac
from golden.family_cases import FAMILY_CASES
from golden.image_cases import IMAGE_CASES
from golden.make_families import family_checkpoint
from llamac import _core, plan_records
from llamac.errors import ArgumentError, ClosedError
from llamac.export.convert import export
from llamac.export.distances import BIASES
from llamac.format.flatfile import FlatFile

# those with the graphs of other families
OTHERS = {*IMAGE_CASES}
BASES = [case.name for case in FAMILY_CASES.values() if not case.base and case.name not in OTHERS]


def operands(value: object) -> Iterator[plan_records.Operand]:
    if isinstance(value, plan_records.Operand):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from operands(item)


@pytest.mark.parametrize("family", BASES)
def test_every_tensor_is_the_operand_of_one_step(tmp_path: Path, family: str) -> None:
    path = tmp_path / "model.bin"
    export(family_checkpoint(tmp_path / "checkpoint", FAMILY_CASES[family]), path, dtype="q8", probe_source=None)
    with closing(FlatFile(path)) as file:
        plan = _core.plan(file.core)
        tensors, config, n_layers = file.tensors, file.config, len(file.layers)
    expected = Counter((tensor.offset, tensor.bytes) for tensor in tensors)
    if config["tied_output"]:
        expected[tensors[0].offset, tensors[0].bytes] += 1
    for tensor in tensors:
        if tensor.name == BIASES:  # all layers share it
            expected[tensor.offset, tensor.bytes] = n_layers
    steps = [step for step in plan.steps if getattr(step, "output", "") != "hidden"]  # it has the norm of the logits
    assert Counter((operand.offset, operand.bytes) for operand in operands(steps)) == expected
    stages = {step.stage for step in plan.steps if isinstance(step, plan_records.Observe | plan_records.Product)}
    assert stages - {-1} == set(range(len(_core.stages())))
    assert (plan.widths["x"], plan.widths["logits"]) == (config["dim"], config["vocab_size"])


def test_a_closed_model_has_no_plan() -> None:
    with llamac.load("stories") as model:
        core = model._file.core
        with pytest.raises(ArgumentError, match="more than one of mtp, trunk and state_layers is given"):
            _core.plan(core, mtp=True, trunk=core)
    with pytest.raises(ClosedError):
        _core.plan(core)
