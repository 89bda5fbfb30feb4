"""`llamac check`: verify a model file's integrity, and that this machine reproduces its reference outputs."""

from __future__ import annotations

import argparse

from llamac.cli.check_against import add_comparison, compares, run_comparison
from llamac.cli.loading import load_model
from llamac.cli.options import add_conversion, add_device, add_kernels, add_model, add_threads, session_settings
from llamac.cli.text import safe_line
from llamac.engine.model import Model
from llamac.errors import ArgumentError
from llamac.exit_codes import ERROR, OK
from llamac.format.flatfile import SECTIONS, without_logits
from llamac.format.strips import FLOATS
from llamac.progress import bars

DESCRIPTION = (
    "Verify a file's structure and checksums, and replay its probes (prompts with stored logits) on this machine. The "
    "command reports each probe as 'identical', as 'within tolerance', or with its error. With --against or "
    "--reference, compare every stage of the computation with transformers instead, and find the cause of the first "
    "difference. Exit code 1 means a difference."
)
EXAMPLES = """\
  llamac check                    the built-in model
  llamac check model.bin --data   every checksum too
  llamac check model.bin --against path/to/checkpoint                     each stage against transformers
  llamac check model.bin --against path/to/checkpoint --capture ref.bin   and keep what transformers computed
  llamac check model.bin --reference ref.bin                              the same without transformers
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_model(parser)
    parser.add_argument("--data", action="store_true", help="also verify the checksum of every tensor")
    add_comparison(parser.add_argument_group("comparison with another implementation"))
    add_conversion(parser.add_argument_group("conversion"))
    machine = parser.add_argument_group("machine")
    add_threads(machine)
    add_kernels(machine, "f32 with --against or --reference, else f32 for models in f32 and f16 for others")
    add_device(machine)


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    if compares(options):
        return run_comparison(options)
    if options.kv_dtype == "q8":
        raise ArgumentError("--kv-dtype q8 needs --against or --reference: the probes have no reference for it")
    with load_model(options, **session_settings(options)) as model:
        print(f"structure  ok: {len(model.file.tensors)} tensors, {model.file.header['file_bytes']} bytes")
        for name in SECTIONS[:-1]:
            model.file.section(name)  # raises if its checksum does not match
        print("texts      ok: the SHA-256 of every section matches")
        has_probes = model.file.sections["probes"].bytes > 0
        same_data = _check_data(model) if options.data or not has_probes else True
        same_logits = _check_probes(model)
        return OK if same_data and same_logits else ERROR


def _check_data(model: Model) -> bool:
    """Verify the checksum of every tensor."""
    if not model.file.is_hashed:
        print("data       none: the checksums of this new conversion are not known yet; `llamac export` stores them")
        return True
    with bars() as progress:
        problems = [(record.name, problem) for record, problem in model.file.verify_data(progress) if problem]
    for name, problem in problems:
        print(f"data       DAMAGED: tensor {name}: {problem}")
    if not problems:
        print("data       ok: the SHA-256 of every tensor matches")
    return not problems


def _check_probes(model: Model) -> bool:
    """Replay the file's probes and compare their logits."""
    if not model.file.sections["probes"].bytes:
        kind = without_logits(model.config)
        missing = "the file has no reference outputs; `llamac export` stores them"
        print(f"probes     none: {f'{kind} has no logits to compare' if kind else missing}")
        return True
    from llamac.engine.inspection.probe_replay import replay_probes
    from llamac.format.probes import source_of

    source = safe_line(source_of(model.file.section("probes")))
    with bars() as progress:
        results = replay_probes(model, progress)
    different = [result for result in results if result.status == "different"]
    for result in different:
        prompt = repr(result.prompt) if result.prompt is not None else f"ids {list(result.ids)}"
        print(
            f"probes     DIFFERENT: probe {result.index} ({prompt}): "
            f"error {result.error:.3g}, expected at most {result.tolerance:.3g}, reference by {source}"
        )
    if not different:
        worst = max(result.error for result in results)
        figures = f"{len(results)} probes, largest error {worst:.3g} of the largest logit"
        print(f"probes     {results[0].status}: {figures}, reference by {source}")
    if any(tensor.dtype not in FLOATS for tensor in model.file.tensors):
        mean = sum(result.divergence for result in results) / len(results)
        print(f"           quantized: {mean:.3g} nats (KL divergence) from the original weights' probabilities")
        print("           `llamac quality MODEL --against SOURCE --tensors` shows which tensors cost most")
    return not different
