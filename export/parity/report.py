"""Climbs the ladder: compares the engine with a capture, rung by rung, and explains the first difference."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from llamac.engine.model import Model
from llamac.errors import ArgumentError
from llamac.export.checkpoint import Checkpoint, ModelConfig
from llamac.export.flat.model import model_config
from llamac.export.parity.capture import Capture, Question
from llamac.export.parity.causes import Verdict, find_causes, find_small_fault
from llamac.export.parity.compare import (
    Difference,
    TokenDifference,
    Tolerance,
    compare_stages,
    compare_tokens,
    in_engine_form,
    tolerance_of,
)
from llamac.export.parity.engine_run import run_engine
from llamac.export.parity.further import find_further
from llamac.export.parity.question import windows_of
from llamac.export.parity.replay import checkpoint_of
from llamac.export.parity.stages import GREEDY, LOAD, SAMPLED, Rung, ladder_of
from llamac.export.parity.tensor_differences import other_weights

# The dtypes that round the numbers of an original, by the name that config.json gives its dtype.
ROUNDS = {"float32": {"f16", "bf16"}, "float16": {"bf16"}, "bfloat16": {"f16"}}


@dataclass(frozen=True)
class RungResult:
    """The result of a rung.

    Attributes:
        rung: The rung.
        is_within: Whether everything that it compares is within tolerance.
        worst: The stage with the largest relative error, compared with its tolerance; None for rungs without stages.
        max_error: The largest absolute error of its stages.
        cosine: The smallest cosine of its stages.
        tokens: For rungs of tokens, how they differ.
        problems: For the first rung, what is wrong.
    """

    rung: Rung
    is_within: bool
    worst: Difference | None = None
    max_error: float = 0.0
    cosine: float = 1.0
    tokens: TokenDifference | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The result of a comparison.

    Attributes:
        engine: The engine's version.
        reference: The other implementation and its version.
        question: What both computed.
        tolerance: What may differ, in most stages.
        dtypes: The number formats of the engine's tensors.
        kv_dtype: The number format of its KV cache.
        numerics: How its products round their inputs.
        rungs: The results.
        first: The first stage that is out of tolerance, or None.
        verdict: The explanation of `first`, or None.
        notes: What the comparison cannot see.
        further: Differences in other parts of the model, which have causes of their own.
    """

    engine: str
    reference: str
    question: Question
    tolerance: Tolerance
    dtypes: tuple[str, ...]
    kv_dtype: str
    numerics: str
    rungs: tuple[RungResult, ...]
    first: Difference | None
    verdict: Verdict | None
    notes: tuple[str, ...]
    further: tuple[tuple[Difference, Verdict], ...] = ()

    @property
    def is_within(self) -> bool:
        """Whether everything is within tolerance."""
        return all(result.is_within for result in self.rungs)

    def facts(self) -> dict[str, Any]:
        """Everything as JSON. Numbers that are not finite are null."""
        rungs = [{**asdict(result), "rung": result.rung.number, "title": result.rung.title} for result in self.rungs]
        facts: dict[str, Any] = _finite({"is_within": self.is_within, **asdict(self), "rungs": rungs})
        return facts


def check_parity(
    model: Model, capture: Capture, original: Checkpoint | None = None, *, tolerance: float | None = None
) -> Report:
    """Compare the engine with a capture.

    Args:
        model: The model, opened with the settings to test.
        capture: What another implementation computed.
        original: The checkpoint that the model was exported from, if it is here; its tensors may explain a difference.
        tolerance: The largest relative error at any position. Default: by the model's number formats.

    Raises:
        ArgumentError: If the model cannot compute the capture's question.
    """
    checkpoint = checkpoint_of(model)
    config = model_config(model.file)
    if capture.question.is_for_encoder != bool(config.two_sided):
        kinds = ("a language model", "an encoder")
        raise ArgumentError(
            f"the capture is of {kinds[capture.question.is_for_encoder]}, and the model is "
            f"{kinds[bool(config.two_sided)]}: compare with a capture of the model's own directory"
        )
    _check_question(capture.question, config)
    reference = in_engine_form(capture, config)
    with model.session(context=1) as session:
        kv_dtype, numerics = session.kv_dtype, session.numerics
    dtypes = {record.dtype for record in model.file.tensors}
    allowed = tolerance_of(dtypes, kv_dtype, numerics) if tolerance is None else Tolerance(tolerance)
    engine = run_engine(model, capture.question)
    differences = compare_stages(engine, reference, config, allowed)
    first = next((found for found in differences if not found.is_within), None)
    verdict: Verdict | None = None
    further: tuple[tuple[Difference, Verdict], ...] = ()
    if first is not None and not first.problem:
        explained = find_causes(checkpoint, engine, reference, first, original)
        if explained.verdict.fault == "rounding":
            explained = find_small_fault(checkpoint, reference, first, original) or explained
        first = explained.difference
        verdict, further = find_further(checkpoint, reference, explained, original)
    problems = [*capture.problems, *_size_problems(reference, differences, len(config.layers))]
    tokens = {found.way: found for found in compare_tokens(engine, reference, allowed.limit)}
    return Report(
        engine=engine.source,
        reference=capture.source,
        question=capture.question,
        tolerance=allowed,
        dtypes=tuple(sorted(dtypes)),
        kv_dtype=kv_dtype,
        numerics=numerics,
        rungs=tuple(_result(rung, differences, tokens, tuple(problems)) for rung in ladder_of(config)),
        first=first,
        verdict=verdict,
        notes=(*_notes(model, capture), *_other_weights(checkpoint, original), *_tied(checkpoint, capture, first)),
        further=further,
    )


def _check_question(question: Question, config: ModelConfig) -> None:
    """Check that a model can compute a capture's question.

    Raises:
        ArgumentError: If the capture is of a model with more ids or positions.
    """
    largest = max(question.ids)
    if largest >= config.vocab_size:
        problem = f"its prompt has the token id {largest}, and the model's ids end at {config.vocab_size - 1}"
    elif question.context > config.context:
        problem = f"it has {question.context} positions, and the model {config.context}"
    else:
        return
    raise ArgumentError(
        f"the capture is of another model: {problem}; compare with a capture of the model's own directory"
    )


def _finite(value: Any) -> Any:
    """A JSON value with null in place of infinite numbers."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _size_problems(reference: Capture, differences: list[Difference], n_layers: int) -> list[str]:
    """Why models that do not even have the same sizes cannot be compared."""
    found = [
        f"{problem.stage} of layer {problem.layer}: {problem.problem}" for problem in differences if problem.problem
    ]
    if reference.n_layers != n_layers:
        found.insert(0, f"the engine has {n_layers} layers, the reference {reference.n_layers}")
    return found[:4]


def _result(
    rung: Rung, differences: list[Difference], tokens: dict[str, TokenDifference], problems: tuple[str, ...]
) -> RungResult:
    if rung == LOAD:
        return RungResult(rung, not problems, problems=problems)
    if rung in (GREEDY, SAMPLED):
        found = tokens["greedy" if rung == GREEDY else "sampled"]
        return RungResult(rung, found.is_within, tokens=found)
    mine = [one for one in differences if one.stage in rung.stages]
    if not rung.every_layer:
        firsts = {one.stage: one.layer for one in reversed(mine)}
        mine = [one for one in mine if one.layer == firsts[one.stage]]
    if not mine:
        return RungResult(rung, is_within=True)
    worst = max(mine, key=_excess)
    return RungResult(
        rung,
        is_within=worst.is_within,
        worst=worst,
        max_error=max(one.max_error for one in mine),
        cosine=min(one.cosine for one in mine),
    )


def _excess(one: Difference) -> float:
    """The relative error as a multiple of the tolerance, which can be 0."""
    if one.tolerance.limit:
        return one.relative / one.tolerance.limit
    return math.inf if one.relative else 0.0


def _other_weights(checkpoint: Checkpoint, original: Checkpoint | None) -> tuple[str, ...]:
    """What is wrong if the original is another model's, which no correction of the file is."""
    found = "" if original is None else other_weights(checkpoint.tensors, original.tensors)
    return (found,) if found else ()


def _tied(checkpoint: Checkpoint, capture: Capture, first: Difference | None) -> tuple[str, ...]:
    """What config.json says about a matrix that the file lacks: no correction of the file can prove it."""
    is_wrong = capture.config.get("tie_word_embeddings") is False and checkpoint.config.tied_output
    if first is None or first.stage != "logits" or not is_wrong:
        return ()
    text = "the file computes logits with the embedding's matrix; config.json says that they have one of their own "
    return (f"{text}(tie_word_embeddings is false)",)


def _notes(model: Model, capture: Capture) -> tuple[str, ...]:
    """What the comparison cannot see."""
    n = len(capture.question.ids)
    longer = [window for window in windows_of(model) if window >= n]
    notes = [
        f"the prompt of {n} tokens does not exceed the window of {window}: compare more tokens than that to test it"
        for window in longer
    ]
    stored = str(capture.config.get("dtype", capture.config.get("torch_dtype")))
    rounded = {"f16", "bf16"} & {record.dtype for record in model.file.tensors}
    if ROUNDS.get(stored, set()) & rounded:
        notes.append(
            f"the file has weights in {' and '.join(sorted(rounded))}, the original in {stored}: rounding alone can "
            "exceed the tolerance"
        )
    return tuple(notes)
