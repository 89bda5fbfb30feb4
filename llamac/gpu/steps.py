"""What the graph derives from a plan's steps before any pass: which are one launch, and what is packed where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llamac import _core
from llamac.gpu import launches
from llamac.gpu.launches import BLOCK_COLUMNS, MOST_PARTS, Form
from llamac.gpu.layer_launches import AttentionKind, HeadShape


class Products(NamedTuple):
    """Up to MOST_PARTS products of the same inputs in one launch: PRODUCT steps, or EXPERT_PRODUCT steps."""

    steps: tuple[Any, ...]
    layer: int

    @property
    def output(self) -> str:
        """The first buffer that is written."""
        return str(self.steps[0].output)


class AddAndNorm(NamedTuple):
    """Two steps in one launch: a branch is added to x, and then x is normed."""

    add: _core.Add
    norm: _core.Norm
    layer: int


def head_shape(step: _core.Heads | _core.Attend) -> HeadShape:
    """The heads of a layer."""
    return HeadShape(step.n_heads, step.n_kv_heads, step.head_dim, step.value_dim)


def attention_kind(step: _core.Attend) -> AttentionKind:
    """The properties of a layer that determine how its attention is divided."""
    return AttentionKind(head_shape(step), step.window, step.two_sided)


def joined(steps: Sequence[Any]) -> list[Any]:
    """The steps, with each ADD and the NORM after it as one, and so with products of the same inputs side by side."""
    found: list[Any] = []
    for step in steps:
        last = found[-1] if found else None
        # the norm of the output reads chosen rows only
        if (
            isinstance(step, _core.Norm)
            and isinstance(last, _core.Add)
            and (last.to, last.source, step.input, step.output) == ("x", "branch", "x", "normed")
        ):
            found[-1] = AddAndNorm(last, step, step.layer)
        elif isinstance(step, _core.Product | _core.ExpertProduct):
            if isinstance(last, Products) and len(last.steps) < MOST_PARTS and _share_a_launch(last.steps[0], step):
                found[-1] = Products((*last.steps, step), step.layer)
            else:
                found.append(Products((step,), step.layer))
        else:
            found.append(step)
    return found


def _share_a_launch(first: Any, second: Any) -> bool:
    """Whether two products have the same inputs, dtype and columns, and nothing but a bias happens to the outputs."""
    if type(first) is not type(second) or first.input != second.input or first.layer != second.layer:
        return False
    return _plain_kind(first) is not None and _plain_kind(first) == _plain_kind(second)


def _plain_kind(step: Any) -> tuple[int, int, bool] | None:
    """The dtype and inputs of a product; None if experts differ in them, or if more than a bias follows."""
    if step.accumulate:
        return None
    if isinstance(step, _core.Product) and (step.scale != 1 or step.by_shared_weight or step.stage >= 0):
        return None
    kinds = {(linear.dtype, linear.columns, linear.rounds_inputs) for linear in linears_of(step)}
    return kinds.pop() if len(kinds) == 1 else None


def linears_of(step: Any) -> list[_core.Linear]:
    """The matrices of a product, or those that experts have; none of other steps."""
    if isinstance(step, _core.Product):
        return [step.linear]
    return [linear for linear in getattr(step, "linears", ()) if linear]


def first_forms(steps: Sequence[Any], *, fast: bool) -> dict[int, Form]:
    """The form in which a product first reads what a step that can pack writes, by the step's id. Not Form.F32."""
    found: dict[int, Form] = {}
    writers: dict[str, int] = {}  # of buffers: such a step's id
    for step in steps:
        for linear in linears_of(step):
            form = launches.form_of(linear.dtype, fast=fast)
            if form is not Form.F32 and not linear.rounds_inputs and step.input in writers:
                found[writers.pop(step.input)] = form
        buffer, packs = _written_by(step)
        if packs:
            writers[buffer] = id(step)
        else:
            writers.pop(buffer, None)
    return found


def _written_by(step: Any) -> tuple[str, bool]:
    """The buffer that a step writes, or ""; and whether the step can pack it meanwhile."""
    if isinstance(step, _core.Attend):
        return "mix", step.value_dim % BLOCK_COLUMNS == 0
    if isinstance(step, _core.DeltaRule | _core.Scan):
        return "mix", False
    if isinstance(step, _core.Scale | _core.Gate):
        return step.buffer, False
    packs = isinstance(step, _core.Activate) or (isinstance(step, _core.Norm) and step.to_stride == step.width)
    return getattr(step, "output", ""), packs
