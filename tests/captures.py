"""Captures without transformers: the float64 forward pass computes them. Plants faults in exported files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import llamac
from builders import write_model
from golden.cases import Case
from golden.make_captures import encoder_question
from llamac.export import equations, pooling, reference
from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.flat.model import model_config
from llamac.export.parity import draws
from llamac.export.parity.capture import WAYS, Capture, Chosen, Question
from llamac.export.parity.report import Report, check_parity
from llamac.export.parity.stages import OF_A_LAYER, OUTSIDE, Key, Rung, keys_in_order

Floats = NDArray[np.float32]
Fault = Callable[[Checkpoint], Checkpoint]
SEED = 7


def numpy_capture(checkpoint: Checkpoint, case: Case, n_tokens: int = 20, new_tokens: int = 2) -> Capture:
    """What the float64 forward pass computes, as a capture of a family whose RoPE pairs are halves."""
    config = checkpoint.config
    question = Question(tuple(case.ids[:n_tokens]), 3, new_tokens, SEED, config.vocab_size)
    stages = _observed(checkpoint, question)
    chosen = {}
    for way in WAYS:
        ids, rows = list(question.ids), []
        for _ in range(new_tokens):
            rows.append(reference.forward(checkpoint, [ids], context=question.context)[0][-1].astype(np.float32))
            ids.append(draws.choose(way, rows[-1], SEED, len(ids)))
        chosen[way] = Chosen(tuple(ids[n_tokens:]), np.stack(rows))
    return Capture("numpy", question, stages, chosen, case.config)


def _observed(checkpoint: Checkpoint, question: Question) -> dict[Key, Floats]:
    """The stages that the float64 forward pass computes."""
    stages: dict[Key, Floats] = {}

    def observe(stage: str, layer: int, values: reference.Array) -> None:
        if stage == "scores":
            sinks = checkpoint.tensors.get(f"layers.{layer}.attn_sinks.weight")
            values = equations.attention_weights(values, None if sinks is None else sinks.array().astype(np.float64))
            stages["weights", layer] = values.astype(np.float32)
        elif stage in (*OF_A_LAYER, *OUTSIDE):
            stages[stage, layer] = values.reshape(len(values), -1).astype(np.float32)

    reference.forward(checkpoint, [question.ids], context=question.context, observe=observe, types=question.types)
    return stages


def check_stored(path: Path, capture: Capture, ladder: Sequence[Rung]) -> Report:
    """Check that a file climbs the whole ladder against a stored capture, well within the tolerances."""
    assert capture.source.startswith("transformers ")
    with llamac.load(path, kv_dtype="f32", threads=1) as model:
        report = check_parity(model, capture)
        assert set(capture.stages) == set(keys_in_order(model_config(model.file)))
    assert report.is_within
    assert [result.rung for result in report.rungs] == list(ladder)
    worst = [result.worst for result in report.rungs if result.worst]
    assert max(one.relative / one.tolerance.limit for one in worst) < 0.5
    assert min(one.cosine for one in worst) > 1 - 1e-6
    return report


def climb(path: Path, capture: Capture, checkpoint: Checkpoint, **options: Any) -> Report:
    """Write a checkpoint to a file, and compare the engine on it with a capture."""
    write_model(path, checkpoint, **checkpoint.metadata)
    with llamac.load(path, kv_dtype="f32", threads=1) as model:
        return check_parity(model, capture, **options)


def encoder_capture(checkpoint: Checkpoint, case: Case, n_tokens: int = 20) -> Capture:
    """What the float64 forward pass computes of an encoder, as a capture."""
    config, question = checkpoint.config, encoder_question(case.name, n_tokens)
    stages = _observed(checkpoint, question)
    stages["pooled", 0] = stages["score", 0] = pooling.pool(
        checkpoint, stages["output_norm", 0].astype(np.float64)
    ).astype(np.float32)
    kept = {key: stages[key] for key in keys_in_order(config)}
    return Capture("numpy", question, kept, {}, case.config)


# ---- faults


@dataclass(frozen=True)
class Planted:
    """A fault, where it shows first, and how each cause that the ladder names must begin, also of what shows later."""

    case: str
    fault: Fault
    stage: Key
    cause: str
    further: tuple[str, ...] = ()


def assert_named_alone(path: Path, given: tuple[Checkpoint, Capture], planted: Planted) -> None:
    """Assert that the ladder names a fault, and nothing else, from a capture without the model's config.json."""
    checkpoint, capture = given
    report = climb(path, replace(capture, config={}), planted.fault(checkpoint))
    assert report.first is not None
    assert (report.first.stage, report.first.layer) == planted.stage
    assert report.verdict is not None
    assert report.verdict.fault == "file"
    assert report.verdict.causes
    for cause in report.verdict.causes:
        assert cause.sentence.startswith(planted.cause)
        assert cause.left <= report.first.tolerance.limit
    found = [[cause.sentence for cause in verdict.causes] for _, verdict in report.further]
    assert len(found) == len(planted.further)
    for sentences, start in zip(found, planted.further, strict=True):
        assert all(sentence.startswith(start) for sentence in sentences)


def to_neighbors(head_dim: int) -> Callable[[Floats], Floats]:
    """The rows of each head with pairs that are neighbors instead of halves."""
    order = np.arange(head_dim).reshape(2, -1).T.reshape(-1)
    return lambda rows: rows.reshape(-1, head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)


def misread(rows: Floats) -> Floats:
    """A matrix (out, in) read from the bytes of (in, out)."""
    return np.ascontiguousarray(rows.T).reshape(rows.shape)


def changed(name: str, change: Callable[[Floats], Floats]) -> Fault:
    """Change a tensor."""

    def plant(checkpoint: Checkpoint) -> Checkpoint:
        numbers = np.ascontiguousarray(change(checkpoint.tensors[name].array()), np.float32)
        return replace(checkpoint, tensors=checkpoint.tensors | {name: LazyTensor.of(numbers)})

    return plant


def configured(**values: Any) -> Fault:
    """Change the config."""
    return lambda checkpoint: replace(checkpoint, config=replace(checkpoint.config, **values))


def recorded(layer: int, **values: Any) -> Fault:
    """Change a layer's record."""

    def plant(checkpoint: Checkpoint) -> Checkpoint:
        layers = list(checkpoint.config.layers)
        layers[layer] = replace(layers[layer], **values)
        return replace(checkpoint, config=replace(checkpoint.config, layers=tuple(layers)))

    return plant


def exchanged(one: str, other: str) -> Fault:
    """Exchange two tensors."""

    def plant(checkpoint: Checkpoint) -> Checkpoint:
        tensors = checkpoint.tensors
        return replace(checkpoint, tensors=tensors | {one: tensors[other], other: tensors[one]})

    return plant


def both(*faults: Fault) -> Fault:
    """Plant several faults."""

    def plant(checkpoint: Checkpoint) -> Checkpoint:
        for fault in faults:
            checkpoint = fault(checkpoint)
        return checkpoint

    return plant
