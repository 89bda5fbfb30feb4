"""What the graph knows of a plan's steps before any pass: which of them are one launch, and what is packed where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llamac import _core
from llamac.gpu import launches
from llamac.gpu.launches import Form
from llamac.gpu.layer_launches import HeadShape


class AddAndNorm(NamedTuple):
    """Two steps in one launch: a branch is added to x, and then x is normed."""

    add: _core.Add
    norm: _core.Norm
    layer: int


def attention_kind(step: _core.Attend) -> tuple[HeadShape, int]:
    """What layers must have in common for their attention to be divided alike: heads and window."""
    return HeadShape(step.n_heads, step.n_kv_heads, step.head_dim), step.window


def joined(steps: Sequence[Any]) -> list[Any]:
    """The steps, with each ADD and the NORM after it as one."""
    found: list[Any] = []
    for step in steps:
        last = found[-1] if found else None
        # the norm of the output reads chosen rows only
        if (
            isinstance(step, _core.Norm)
            and isinstance(last, _core.Add)
            and (step.input, step.output) == ("x", "normed")
        ):
            found[-1] = AddAndNorm(last, step, step.layer)
        else:
            found.append(step)
    return found


def first_forms(steps: Sequence[Any], *, fast: bool) -> dict[int, Form]:
    """The form in which a product first reads what a NORM or ACTIVATE step writes, by the step's id. Not Form.F32."""
    found: dict[int, Form] = {}
    writers: dict[str, int] = {}  # of buffers: such a step's id
    for step in steps:
        linears = [step.linear] if isinstance(step, _core.Product) else getattr(step, "linears", ())
        for linear in filter(None, linears):
            form = launches.form_of(linear.dtype, fast=fast)
            if form is not Form.F32 and step.input in writers:
                found[writers.pop(step.input)] = form
        if isinstance(step, _core.Norm):
            writers[step.output] = id(step)
        elif isinstance(step, _core.Activate):
            writers[step.up] = id(step)
    return found
