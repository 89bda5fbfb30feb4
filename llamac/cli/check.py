"""`llamac check`: is a model file whole, and does this machine compute with it what it should?"""

from __future__ import annotations

import argparse

from llamac.cli import EXIT_ERROR
from llamac.cli.loading import load_model
from llamac.cli.progress import progress_bars
from llamac.cli.text import safe_line
from llamac.flatfile import SECTIONS
from llamac.model import Model
from llamac.strips import QUANTIZED


def check(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    with load_model(options, probes=True, kv=options.kv, threads=options.threads, isa=options.isa) as model:
        print(f"structure  ok: {len(model.file.tensors)} tensors, {model.file.header['file_bytes']} bytes")
        for name in SECTIONS[:-1]:
            model.file.section(name)
        print("texts      ok: every section has its SHA-256")
        good = _check_data(model) if options.data else True
        return 0 if _check_probes(model) and good else EXIT_ERROR


def _check_data(model: Model) -> bool:
    problems = []
    with progress_bars() as progress:
        for record, problem in model.file.verify_data(progress):
            if problem:
                problems.append(f"data       DAMAGED: tensor {record.name}: {problem}")
    print("\n".join(problems) or "data       ok: every tensor has its SHA-256")
    return not problems


def _check_probes(model: Model) -> bool:
    if not model.file.sections["probes"].bytes:
        print("probes     none: the file was exported without them")
        return True
    from llamac.probes import replay, source_of

    source = safe_line(source_of(model.file.section("probes")))
    with progress_bars() as progress:
        results = replay(model, progress)
    different = [result for result in results if result.status == "different"]
    for result in different:
        shown = repr(result.prompt) if result.prompt is not None else f"ids {list(result.ids)}"
        print(
            f"probes     DIFFERENT: probe {result.index} ({shown}): "
            f"error {result.error:.3g}, expected at most {result.tolerance:.3g}, reference by {source}"
        )
    if not different:
        worst = max(result.error for result in results)
        figures = f"{len(results)} probes, largest error {worst:.3g} of the largest logit"
        print(f"probes     {results[0].status}: {figures}, reference by {source}")
    if any(tensor.dtype in QUANTIZED for tensor in model.file.tensors):
        mean = sum(result.divergence for result in results) / len(results)
        print(
            f"           quantized: {mean:.3g} nats (KL divergence) from the probabilities of the weights as they were"
        )
    return not different
