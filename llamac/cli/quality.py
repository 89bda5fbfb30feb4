"""`llamac quality`: measure what quantization costs."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamac.cli.loading import load_model, shown_progress
from llamac.cli.options import ANY_MODEL, add_kernels, add_threads, check_writable, session_settings, write_result
from llamac.cli.text import json_text, safe_line
from llamac.errors import ArgumentError
from llamac.format.strips import LAYOUTS

if TYPE_CHECKING:
    from llamac.engine.model import Model
    from llamac.export.quality.measures import Measures, Reference
    from llamac.progress import Progress

DESCRIPTION = (
    "Compare the next-token probabilities of models with those of the model that they were made from: perplexity, "
    "Kullback-Leibler divergence and the share of positions with the same most probable token, on a text, next to "
    "the bits per weight."
)
EXAMPLES = """\
  llamac quality model-q4.bin --against path/to/checkpoint
  llamac quality model-q4.bin model.gguf --against path/to/checkpoint   several models of the same base
  llamac quality model-q4.bin --against model.bin --text my.txt         on a text of your own
  llamac quality model-q4.bin --against model.bin --generate 1024       on what the base writes
  llamac quality model-q4.bin --against model.bin --tensors             which tensors cost most
  llamac quality --against model.bin --dtypes q8,q6,q4,q4s,q8_0,q4_0 --plot sizes.svg
"""
MIN_TOKENS = 2
TOKENS, COST_TOKENS = 1024, 256  # of the text, without --tokens and --cost-tokens
NAME = 10  # the width of names in the table of several models
ROW = "{:<10} {:>5} {:>8} {:>6} {:>7}"
COSTS = "{:>7} {:>7}  {}"  # columns of the tables of layers and tensors
SHOWN_TENSORS = 20  # without --json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("models", metavar="MODEL", nargs="*", help=ANY_MODEL)
    parser.add_argument(
        "--against",
        metavar="BASE",
        required=True,
        help="the model with the original weights: anything that MODEL can be, with the same vocabulary",
    )
    parser.add_argument(
        "--dtypes",
        metavar="LIST",
        help="also make BASE in these number formats, such as q8,q6,q4,q4_0, and measure each: f32, f16, bf16, q8, q6, "
        "q4, q4s, q3, q2, t2, and GGUF's q8_0, q5_1, q5_0, q4_1, q4_0",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw divergence against bits per weight, as SVG")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    text = parser.add_argument_group("text")
    source = text.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="FILE", help="the text (default: 4,000 tokens of English prose)")
    source.add_argument(
        "--generate", type=int, metavar="N", help="use N tokens that BASE generates, always the same ones"
    )
    text.add_argument(
        "--tokens", type=int, metavar="N", help=f"use at most the first N tokens of the text (default: {TOKENS})"
    )
    text.add_argument("--window", type=int, default=256, metavar="N", help="tokens that the models see at once")
    costs = parser.add_argument_group("costs of parts")
    costs.add_argument(
        "--layers", action="store_true", help="also evaluate BASE with one layer at a time in MODEL's form"
    )
    costs.add_argument(
        "--tensors",
        action="store_true",
        help="also evaluate BASE with one tensor at a time in MODEL's form; takes an evaluation for each tensor",
    )
    costs.add_argument(
        "--cost-tokens",
        type=int,
        metavar="N",
        help=f"use the first N tokens of the text for the parts (default: {COST_TOKENS})",
    )
    conversion = parser.add_argument_group("conversion")
    conversion.add_argument(
        "--cache-dir", metavar="DIR", help="store converted models here (default: see `llamac cache path`)"
    )
    conversion.add_argument("--no-cache", action="store_true", help="do not keep converted models")
    machine = parser.add_argument_group("machine")
    add_threads(machine)
    add_kernels(machine, kv_default="f32")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from llamac.export.quality.tensors import check_tensors

    variants = _checked_variants(options)
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(_load(options, options.against))
        models = [(name, stack.enter_context(_load(options, name))) for name in options.models]
        for name, model in models:
            _check_vocabulary(options.against, base, model, name)
            if options.layers or options.tensors:
                check_tensors(base, model)
        progress = stack.enter_context(shown_progress(options))
        windows = _windows(options, base, [model for _, model in models], progress)
        rows = _measured(options, base, models, variants, windows, progress)
    facts = {
        "base": {"model": options.against, **_size(base)},
        "text": {"source": _text_name(options), "tokens": sum(map(len, windows)), "windows": len(windows)},
        "models": rows,
    }
    if options.json:
        sys.stdout.write(json_text(facts))
    else:
        print("\n".join(map(safe_line, _lines(facts))))
    if options.plot:  # after the report, which took long and must not be lost if the picture cannot be drawn
        _plot(options, facts)
    return 0


def _checked_variants(options: argparse.Namespace) -> list[str]:
    """Check the options before models are loaded; return the number formats that --dtypes names."""
    from llamac.export.quality.variants import parse_variants

    for name in ("tokens", "window", "generate", "cost_tokens"):
        if getattr(options, name) is not None and getattr(options, name) < MIN_TOKENS:
            raise ArgumentError(f"{name} is {getattr(options, name)}, expected at least {MIN_TOKENS}")
    if options.cost_tokens is not None and not (options.layers or options.tensors):
        raise ArgumentError("--cost-tokens needs --layers or --tensors")
    if options.tokens is not None and options.generate is not None:
        raise ArgumentError("--tokens is for a text that is read: --generate N says how many tokens it generates")
    check_writable("--plot", options.plot)
    variants = parse_variants(options.dtypes) if options.dtypes is not None else []
    if not options.models and not variants:
        raise ArgumentError("name a MODEL, or number formats with --dtypes")
    return variants


def _measured(
    options: argparse.Namespace,
    base: Model,
    models: Sequence[tuple[str, Model]],
    variants: Sequence[str],
    windows: list[list[int]],
    progress: Progress,
) -> list[dict[str, Any]]:
    """The rows of the report: what distinguishes each model, and each variant of the base, from the base."""
    from llamac.export.quality.measures import Reference

    with contextlib.ExitStack() as stack:
        reference = stack.enter_context(Reference(base, windows, progress))
        short = None
        if options.layers or options.tensors:
            beginning = _beginning(windows, options.cost_tokens or COST_TOKENS)
            short = stack.enter_context(Reference(base, beginning, progress))

        def row(name: str, model: Model) -> dict[str, Any]:
            measured = _row(name, _series(model), model, reference.compare(model, progress))
            return measured | (_costs(options, base, model, short, progress) if short else {})

        rows = [row(name, model) for name, model in models]
        for name in variants:
            with _variant(options, base, name, progress) as model:
                rows.append(row(name, model))
        return rows


@contextlib.contextmanager
def _variant(options: argparse.Namespace, base: Model, name: str, progress: Progress) -> Iterator[Model]:
    """BASE in another number format, in a temporary file."""
    import tempfile

    from llamac.engine.hardware.machine import plan_threads
    from llamac.engine.model import Model
    from llamac.export.quality.variants import write_variant
    from llamac.format.flatfile import FlatFile
    from llamac.sources.names import resolve

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "variant.bin")
        threads = options.threads or plan_threads().threads
        write_variant(resolve(options.against, progress), path, name, threads, progress)
        with Model(FlatFile(path), base._session_defaults) as model:
            yield model


def _plot(options: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Draw the models that differ from the base."""
    from llamac.export.quality.plot import LEAST, Point, draw

    points = [
        Point(_label(row["model"]), row["series"], row["bits_per_weight"], row["kl_mean"])
        for row in facts["models"]
        if row["kl_mean"] >= LEAST
    ]
    if not points:
        raise ArgumentError("plot: no model differs from the base, and equal ones have no place on a logarithmic scale")
    title = f"{safe_line(Path(options.against).name)}: quality and size"
    write_result(options.plot, draw(points, title).encode())


def _label(model: str) -> str:
    """A model's name in the picture."""
    return safe_line(re.sub(r"\.(bin|gguf)$", "", Path(model).name))


def _costs(
    options: argparse.Namespace, base: Model, model: Model, reference: Reference, progress: Progress
) -> dict[str, list[dict[str, Any]]]:
    """The costs of a model's layers and tensors, as the options ask."""
    from llamac.export.quality.tensors import costs, layer_part, part_of

    found = {}
    for key, part in (("layers", layer_part), ("tensors", part_of)):
        if key == "tensors" and not options.tensors:
            continue
        found[key] = [one._asdict() for one in costs(base, model, reference, part, progress)]
    return found


def _beginning(windows: list[list[int]], tokens: int) -> list[list[int]]:
    """The first windows, up to this many tokens."""
    found: list[list[int]] = []
    for ids in windows:
        if tokens >= MIN_TOKENS:
            found.append(ids[:tokens])
            tokens -= len(ids)
    return found


def _load(options: argparse.Namespace, name: str) -> Model:
    settings = session_settings(options)
    settings["kv_dtype"] = settings["kv_dtype"] or "f32"  # nothing but the weights should differ
    return load_model(argparse.Namespace(**{**vars(options), "model": name, "dtype": None}), **settings)


def _check_vocabulary(base_name: str, base: Model, model: Model, name: str) -> None:
    from llamac.engine.speculation.draft_model import check_vocabulary

    rule = "probabilities can be compared only between models with the same vocabulary"
    check_vocabulary(base, model, name, rule, base_name)


def _windows(options: argparse.Namespace, base: Model, models: list[Model], progress: Progress) -> list[list[int]]:
    """The token ids to compare the models on."""
    from llamac.export.options import read_text
    from llamac.export.texts import built_in_text, generated, windows

    length = min(options.window, *(model.config["context"] for model in (base, *models)))
    if options.generate is not None:
        length = min(length, options.generate)
        sequences = generated(base, base.special.bos_id, -(-options.generate // length), length, progress)
        return _beginning(sequences, options.generate)
    text = built_in_text() if options.text is None else read_text(options.text, "text", "text")
    found = windows(
        lambda part: base.tokenize(part, add_special=False, parse_special=False),
        base.tokenize(""),
        text,
        options.tokens or TOKENS,
        length,
    )
    if not found:
        raise ArgumentError(f"text: {options.text} has fewer than {MIN_TOKENS} tokens")
    return found


def _text_name(options: argparse.Namespace) -> str:
    if options.generate is not None:
        return "generated"
    return "built-in" if options.text is None else str(options.text)


# ---- the result


def _size(model: Model) -> dict[str, Any]:
    return {
        "bytes": model.weight_bytes,
        "bits_per_weight": round(8 * model.weight_bytes / model.n_parameters, 4),
    }


def _row(name: str, series: str, model: Model, measures: Measures) -> dict[str, Any]:
    """A model's figures. Numbers that are not finite are null in JSON."""
    numbers = {key: value if math.isfinite(value) else None for key, value in vars(measures).items()}
    return {"model": name, "series": series, **_size(model), **numbers}


def _series(model: Model) -> str:
    """Whose number formats most of a model's weights have."""
    sizes = {"llamac": 0, "GGUF": 0}
    for record in model.file.tensors:
        sizes["GGUF" if record.dtype in LAYOUTS else "llamac"] += record.bytes
    return max(sizes, key=lambda series: sizes[series])


def _lines(facts: dict[str, Any]) -> list[str]:
    """The result for a terminal of at least 40 columns."""
    text, base = facts["text"], facts["base"]
    lines = [f"base        {base['model']}", f"            {base['bits_per_weight']:.2f} bits per weight"]
    windows = f"{text['windows']} window{'' if text['windows'] == 1 else 's'}"
    lines += [f"text        {text['source']}", f"            {text['tokens']} tokens in {windows}"]
    rows = facts["models"]
    if len(rows) == 1:
        return [*lines, "", *_model_lines(rows[0]), *_cost_lines(rows[0])]
    lines += [f"            perplexity {_number(rows[0]['base_perplexity'])}", ""]
    lines.append(ROW.format("model", "bits", "nats", "top", "perpl."))
    for row in rows:
        lines += _table_lines(row)
        lines += [*costs, ""] if (costs := _cost_lines(row)) else []
    return lines


def _table_lines(row: dict[str, Any]) -> list[str]:
    """A model in the table of several. A long name has a line of its own."""
    name = row["model"]
    figures = (f"{row['bits_per_weight']:.2f}", f"{row['kl_mean']:.6f}", f"{row['same_top']:.1%}")
    line = ROW.format(name if len(name) <= NAME else "", *figures, _number(row["perplexity"]))
    return [line] if len(name) <= NAME else [name, line]


def _model_lines(row: dict[str, Any]) -> list[str]:
    return [
        f"model       {row['model']}",
        f"size        {row['bits_per_weight']:.2f} bits per weight",
        f"perplexity  {_number(row['perplexity'])}, base {_number(row['base_perplexity'])}",
        f"divergence  mean {row['kl_mean']:.6f} nats",
        f"            99%  {row['kl_high']:.6f} nats",
        f"            max  {row['kl_max']:.6f} nats",
        f"best token  the same in {row['same_top']:.1%}",
    ]


def _cost_lines(row: dict[str, Any]) -> list[str]:
    """Tables of the layers and of the tensors that cost most."""
    lines = []
    if layers := row.get("layers"):
        lines += ["", COSTS.format("nats", "MB", "layer in MODEL's form")]
        lines += [_cost_line(one) for one in layers]
    if tensors := row.get("tensors"):
        shown = sorted(tensors, key=lambda one: -one["nats"])[:SHOWN_TENSORS]
        lines += ["", COSTS.format("nats", "MB", "tensor in MODEL's form")]
        lines += [_cost_line(one) for one in shown]
        if len(tensors) > len(shown):
            lines.append(COSTS.format("", "", f"{len(tensors) - len(shown)} more cost less"))
    return lines


def _cost_line(one: dict[str, Any]) -> str:
    return COSTS.format(f"{one['nats']:.1e}", f"{one['bytes'] / 1e6:.2f}", one["name"].removesuffix(".weight"))


def _number(value: float | None) -> str:
    return "inf" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.0f}"
