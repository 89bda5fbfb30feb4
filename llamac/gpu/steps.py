"""Prepares a plan's steps for all passes: which steps share a launch, and which of them pack inputs of products."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from llamac import plan_records
from llamac.gpu import launches
from llamac.gpu.launches import BLOCK_COLUMNS, MOST_PARTS, Form
from llamac.gpu.layer_launches import AttentionKind, HeadShape


class Products(NamedTuple):
    """Up to MOST_PARTS products of the same inputs: PRODUCT steps, or EXPERT_PRODUCT steps.

    They are one launch if their matrices have one dtype. PRODUCT steps can have two dtypes, those of each dtype side by
    side. They are one launch if the pass has one row (launches.can_mix).
    """

    steps: tuple[Any, ...]
    layer: int

    @property
    def output(self) -> str:
        """The first buffer that is written."""
        return str(self.steps[0].output)

    @property
    def by_dtype(self) -> list[tuple[Any, ...]]:
        """The PRODUCT steps of each dtype."""
        return [tuple(steps) for _, steps in itertools.groupby(self.steps, lambda step: step.linear.dtype)]


class AddAndNorm(NamedTuple):
    """Two steps in one launch: a branch is added to x, and then x is normed."""

    add: plan_records.Add
    norm: plan_records.Norm
    layer: int


def head_shape(step: plan_records.Heads | plan_records.Attend) -> HeadShape:
    """The heads of a layer."""
    return HeadShape(step.n_heads, step.n_kv_heads, step.head_dim, step.value_dim)


def attention_kind(step: plan_records.Attend) -> AttentionKind:
    """The properties of a layer that determine how its attention is divided.

    Only kernels of two-sided rows add biases. Rows of causal models see up to their own position with them, too.
    """
    return AttentionKind(head_shape(step), step.window, step.two_sided or step.biases is not None)


def joined(steps: Sequence[Any], *, fast: bool) -> list[Any]:
    """The steps, with each ADD and the NORM after it as one, and so with products of the same inputs side by side."""
    found: list[Any] = []
    for step in steps:
        last = found[-1] if found else None
        # the norm of the output reads chosen rows only
        if (
            isinstance(step, plan_records.Norm)
            and isinstance(last, plan_records.Add)
            and (last.to, last.source, step.input, step.output) == ("x", "branch", "x", "normed")
        ):
            found[-1] = AddAndNorm(last, step, step.layer)
        elif isinstance(step, plan_records.Product | plan_records.ExpertProduct):
            if (
                isinstance(last, Products)
                and len(last.steps) < MOST_PARTS
                and _share_a_launch(last.steps[0], last.steps[-1], step, fast=fast)
            ):
                found[-1] = Products((*last.steps, step), step.layer)
            else:
                found.append(Products((step,), step.layer))
        else:
            found.append(step)
    return found


def _share_a_launch(first: Any, last: Any, step: Any, *, fast: bool) -> bool:
    """Whether a product has the inputs and columns of others, and a dtype that goes with the first and last of theirs.

    Nothing but a bias may happen to the outputs.
    """
    if type(first) is not type(step) or first.input != step.input or first.layer != step.layer:
        return False
    of_first, of_last, of_step = map(_plain_kind, (first, last, step))
    if of_first is None or of_last is None or of_step is None:
        return False
    if of_last == of_step:
        return True
    mixes = isinstance(step, plan_records.Product) and of_first == of_last and of_first[1:] == of_step[1:]
    return mixes and not of_step[2] and launches.can_mix(of_first[0], of_step[0], fast=fast)


def _plain_kind(step: Any) -> tuple[int, int, bool] | None:
    """The dtype and inputs of a product; None if experts differ in them, or if more than a bias follows."""
    if step.accumulate:
        return None
    if isinstance(step, plan_records.Product) and (step.scale != 1 or step.by_shared_weight or step.stage >= 0):
        return None
    kinds = {(linear.dtype, linear.columns, linear.rounds_inputs) for linear in linears_of(step)}
    return kinds.pop() if len(kinds) == 1 else None


def linears_of(step: Any) -> list[plan_records.Linear]:
    """The matrices of a product, or those that experts have; none of other steps."""
    if isinstance(step, plan_records.Product):
        return [step.linear]
    return [linear for linear in getattr(step, "linears", ()) if linear]


def packed_forms(steps: Sequence[Any], *, fast: bool) -> dict[int, tuple[Form, ...]]:
    """The forms in which products first read what a step that can pack writes, by the step's id. None is of floats.

    A norm packs two forms, all other steps one.
    """
    found: dict[int, tuple[Form, ...]] = {}
    writers: dict[str, Any] = {}  # of buffers: the last such step
    for step in steps:
        for linear in linears_of(step):
            form, writer = launches.form_of(linear.dtype, fast=fast), writers.get(step.input)
            if form.is_float or linear.rounds_inputs or writer is None:
                continue
            forms = found.get(id(writer), ())
            if form not in forms and len(forms) < (2 if isinstance(writer, plan_records.Norm) else 1):
                found[id(writer)] = (*forms, form)
        buffer, packs = _written_by(step)
        if packs:
            writers[buffer] = step
        else:
            writers.pop(buffer, None)
    return found


def _written_by(step: Any) -> tuple[str, bool]:
    """The buffer that a step writes, or ""; and whether the step can also pack it."""
    if isinstance(step, plan_records.Attend):
        return "mix", step.value_dim % BLOCK_COLUMNS == 0
    if isinstance(step, plan_records.DeltaRule | plan_records.Scan):
        return "mix", False
    if isinstance(step, plan_records.Scale | plan_records.Gate):
        return step.buffer, False
    packs = isinstance(step, plan_records.Activate) or (
        isinstance(step, plan_records.Norm) and step.to_stride == step.width
    )
    return getattr(step, "output", ""), packs
