"""`llamac check --against`: compares the engine with transformers, or with a stored capture, stage by stage."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llamac.cli.loading import load_model, shown_progress
from llamac.cli.options import Group, session_settings
from llamac.cli.text import json_text, safe_line
from llamac.errors import ArgumentError, LlamacError, UnsupportedError
from llamac.exit_codes import ERROR, OK
from llamac.format.flatfile import without_logits
from llamac.format.strips import FLOATS

if TYPE_CHECKING:
    from llamac.engine.model import Model
    from llamac.export.checkpoint import Checkpoint
    from llamac.export.parity.capture import Capture, Question
    from llamac.export.parity.causes import Verdict
    from llamac.export.parity.report import Report, RungResult
    from llamac.export.quality.tensors import Cost

COSTS = 5  # tensors that cost most, of a quantized model
COLUMNS = "{:>2}  {:<20} {:>9} {:>9} {:>10}  {:<9} {}"


def add_comparison(group: Group) -> None:
    """Add the options of a comparison."""
    group.add_argument(
        "--against",
        metavar="DIR",
        help="compare each stage of the computation with transformers on this Hugging Face directory, from which MODEL "
        "was converted, instead of replaying probes; needs the extra `parity`",
    )
    group.add_argument(
        "--reference",
        metavar="FILE",
        help="compare with what --capture has stored; needs no other packages",
    )
    group.add_argument(
        "--capture", metavar="FILE", help="store what transformers computes in a new file, for --reference"
    )
    group.add_argument(
        "--witness",
        choices=("transformers", "tinygrad"),
        help="with --against: the library that computes the reference (default: transformers); tinygrad supports GPT-2 "
        "and LLaMA",
    )
    group.add_argument("--prompt", metavar="TEXT", help="with --against: compare on this text (default: a short text)")
    group.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="with --against: the length of the prompt (default: 40, or enough to exceed windows of up to 128)",
    )
    group.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="the largest relative error that counts as equal (default: by the number formats; see docs/check.md)",
    )
    group.add_argument(
        "--costs",
        type=int,
        metavar="N",
        help="with --against and a quantized MODEL: name the N tensors whose quantization costs most; 0 skips the "
        f"measurement (default: {COSTS})",
    )
    group.add_argument("--json", action="store_true", help="print the comparison as one JSON object")


def compares(options: argparse.Namespace) -> bool:
    """Whether the options ask for a comparison.

    Raises:
        ArgumentError: If they contradict each other.
    """
    if options.against is not None and options.reference is not None:
        raise ArgumentError("--against and --reference are both given: a comparison has one reference")
    if options.against is None:
        for name in ("capture", "witness", "prompt", "tokens", "costs"):
            if getattr(options, name) is not None:
                raise ArgumentError(f"--{name} needs --against")
    if options.against is None and options.reference is None and (options.json or options.tolerance is not None):
        raise ArgumentError(f"--{'json' if options.json else 'tolerance'} needs --against or --reference")
    for name in ("tolerance", "costs"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < math.inf:
            raise ArgumentError(f"--{name} is {value:g}, expected a finite number that is 0 or more")
    if options.against is not None:
        _check_directory(Path(options.against))
    return options.against is not None or options.reference is not None


def _check_directory(path: Path) -> None:
    """Check that --against is a directory that transformers can load."""
    if path.is_file():
        raise ArgumentError(
            f"--against is the file {path}, expected the Hugging Face directory that MODEL was converted from; `llamac "
            "quality MODEL --against FILE` compares the probabilities of two model files"
        )
    if not (path / "config.json").is_file():
        raise ArgumentError(f"{path} is not a Hugging Face directory: it has no config.json")


def run_comparison(options: argparse.Namespace) -> int:
    """Compare, and print the result; return the exit code."""
    from llamac.export.parity.report import check_parity
    from llamac.export.targets import check_new

    if options.capture is not None:
        check_new(Path(options.capture))  # before minutes of computing
    settings = session_settings(options)
    settings["kv_dtype"] = settings["kv_dtype"] or "f32"  # nothing but the order of sums should differ
    with load_model(options, **settings) as model:
        kind = without_logits(model.config)
        if kind is not None and not model.config["two_sided"]:
            raise UnsupportedError(
                f"the model is {kind}: --against and --reference support only encoders and models that predict a next "
                "token; compare what `Model.rerank` returns"
            )
        if kind is not None and options.costs:
            raise UnsupportedError(f"--costs measures the probabilities of next tokens, which {kind} does not have")
        original = None
        if options.against is not None:
            from llamac.export.hf.model import read

            original = read(Path(options.against), [])  # before minutes of computing: a file can be missing
        capture = _capture(options, model)
        report, costs = check_parity(model, capture, original, tolerance=options.tolerance), []
        try:
            costs = [] if original is None else _costs(options, original, model, report)
        except LlamacError as error:  # tensors that differ have no costs, and the report says how they differ
            report = replace(report, notes=(*report.notes, f"costs not measured: {error}"))
    if options.json:
        print(json_text({**report.facts(), "costs": [one._asdict() for one in costs]}), end="")
    else:
        for line in [*_lines(report, options.against or options.reference), *_cost_lines(costs)]:
            print(safe_line(line))
    return OK if report.is_within else ERROR


def _costs(options: argparse.Namespace, original: Checkpoint, model: Model, report: Report) -> list[Cost]:
    """The tensors of a quantized model that cost most; none of a model in floats, which can be damaged instead.

    None of an encoder, either: it has no probabilities of next tokens.
    """
    from llamac.export.quality.tensors import costliest

    count = COSTS if options.costs is None else options.costs
    if count < 1 or set(report.dtypes) <= set(FLOATS) or model.config["two_sided"]:
        return []
    with shown_progress(options) as progress:
        return costliest(original, model, list(report.question.ids), count, options.threads or 1, progress)


def _capture(options: argparse.Namespace, model: Model) -> Capture:
    """The capture to compare with."""
    from llamac.export.parity.capture import read_capture, write_capture

    if options.against is None:
        return read_capture(Path(options.reference))
    from llamac.export.parity.question import make_question

    folder = Path(options.against)
    capture = _run_witness(options.witness, folder, make_question(model, options.prompt, options.tokens))
    if options.capture is not None:
        write_capture(Path(options.capture), capture)
    return capture


def _run_witness(name: str | None, folder: Path, question: Question) -> Capture:
    """What another implementation computes."""
    if name == "tinygrad":
        from llamac.export.parity.tinygrad_run import run_tinygrad

        return run_tinygrad(folder, question)
    if question.is_for_encoder:
        from llamac.export.parity.encoder_run import run_encoder

        return run_encoder(folder, question)
    from llamac.export.parity.transformers_run import run_transformers

    return run_transformers(folder, question)


# ---- the table


def _lines(report: Report, place: str) -> list[str]:
    question = report.question
    why = "inputs are rounded" if set(report.dtypes) <= set(FLOATS) else "weights are quantized"
    numerics = "" if report.numerics == "exact" else f"; {report.numerics} numerics"
    typical = f", for the median position: {why}" if report.tolerance.of_median else ""
    lines = [
        f"engine     {report.engine}: weights in {', '.join(report.dtypes)}; KV cache in {report.kv_dtype}{numerics}",
        f"reference  {report.reference}: {place}",
        _prompt_line(question),
        f"tolerance  {report.tolerance.limit:g} of the largest number at the same position{typical}",
        "",
        COLUMNS.format("", "rung", "max error", "relative", "cosine", "result", "worst"),
    ]
    lines += [table_row(result) for result in report.rungs]
    lines += [f"   {problem}" for result in report.rungs for problem in result.problems]
    lines += ["", *_explanation(report)] if not report.is_within else []
    return lines + [f"note: {note}" for note in report.notes]


def _prompt_line(question: Question) -> str:
    n = len(question.ids)
    if not question.is_for_encoder:
        return f"prompt     {n} tokens, the last {question.steps} one by one; then {question.new_tokens} more"
    types = f", the last {sum(question.types)} of type 1" if question.types else ""
    return f"text       {n} tokens at once{types}"


def _cost_lines(costs: list[Cost]) -> list[str]:
    """A table of the tensors that cost most."""
    if not costs:
        return []
    lines = ["", "tensors that cost most: KL divergence on the prompt if only this tensor is quantized, in nats"]
    return lines + [f"   {one.nats:>9.1e}  {'/'.join(one.dtypes):<5} {one.name}" for one in costs]


def table_row(result: RungResult) -> str:
    """A rung's line of the table."""
    verdict = "ok" if result.is_within else "DIFFERENT"
    number, title, found = result.rung.number, result.rung.title, result.worst
    if found is not None:
        where = f"{found.stage}" + (f" of layer {found.layer}" if result.rung.every_layer or found.layer else "")
        figures = (f"{result.max_error:.1e}", f"{found.relative:.1e}", f"{result.cosine:.6f}")
        return COLUMNS.format(number, title, *figures, verdict, where)
    where = ""
    if result.rung.stages:
        verdict, where = "-", result.rung.absent
    if (tokens := result.tokens) is not None:
        where = f"{tokens.n_equal} of {tokens.n_tokens} tokens are equal"
        if tokens.n_equal < tokens.n_tokens and not tokens.is_clear:
            verdict, where = "close", f"{where}; the next one is too close to call"
    return COLUMNS.format(number, title, "", "", "", verdict, where).rstrip()


def _cause_lines(verdict: Verdict) -> list[str]:
    from llamac.export.parity.tensor_differences import listed

    lines = [f"cause: {cause.sentence} (corrected, the error is {cause.left:.1e})" for cause in verdict.causes]
    if verdict.layers:
        where = "every layer" if verdict.is_everywhere else f"layers {listed(verdict.layers)}"
        lines.append(f"the same in {where}")
    return lines


def _explanation(report: Report) -> list[str]:
    """What is known about the first difference."""
    first, verdict = report.first, report.verdict
    if first is None:
        return ["All stages agree, but the tokens or the loaded tensors do not."]
    if first.problem:
        return [f"The models cannot be compared: {first.stage} of layer {first.layer}: {first.problem}"]
    head = "" if first.head is None else f", head {first.head}"
    lines = [
        f"first difference: {first.stage} of layer {first.layer} at position {first.position}{head}, index "
        f"{first.index}: relative error {first.relative:.2g}, tolerance {first.tolerance.limit:g}"
    ]
    assert verdict is not None
    if verdict.extent:
        lines.append(verdict.extent)
    if verdict.fault == "engine":
        exact = "" if report.numerics == "exact" else "--numerics exact, "
        advice = f"try {exact}--isa scalar, --threads 1, --kv-dtype f32 and --device cpu"
        lines.append(
            "the file is right, the engine's arithmetic is not: a float64 pass over the same weights and inputs gives "
            f"something else ({verdict.error:.1e}): {advice}"
        )
        return lines
    if verdict.fault == "rounding":
        lines.append("neither the file nor the engine's arithmetic is wrong here: differences of earlier stages add up")
        return lines
    lines += _cause_lines(verdict)
    for difference, found in report.further:
        lines.append(
            f"another difference: {difference.stage} of layer {difference.layer}: relative error "
            f"{difference.relative:.2g}, computed with the reference's inputs"
        )
        lines += _cause_lines(found)
    if not verdict.causes:
        lines.append(
            f"the file is wrong: its weights, computed with float64, differ from the reference in the same stage "
            f"({verdict.error:.1e}); no known correction explains it, and no pair of them"
        )
    if verdict.not_searched:
        lines.append(f"not searched to the end, since it takes too long: {', '.join(verdict.not_searched)}")
    return lines
