"""Batch files on a Ray cluster: `python -m llamac.integrations.ray_batch IN OUT`.

The files are those of `llamac batch`. OUT is the checkpoint: only this process writes it, each result once, and
the results in it are not computed again. The machines therefore need no shared folder, and each of the two commands can
continue an OUT of the other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from llamac import models
from llamac.arguments import DEFAULT_SEQUENCES, KV_DTYPES, KVDtype, Numerics
from llamac.engine.batching.engine import Engine
from llamac.engine.sampling.params import SamplingParams
from llamac.errors import ArgumentError, LlamacError, ModelError, UnsupportedError
from llamac.exit_codes import ERROR, INTERRUPTED, OK, USAGE
from llamac.integrations.ray_serve import HOW_TO_INSTALL, check_device, fewest_cpus
from llamac.openai.batch_files import STANDARD, Input, Line, Output, parse_line
from llamac.openai.batch_lines import Answering
from llamac.progress import Progress, bars, silent
from llamac.sources.loading import load

AT_A_TIME = 3  # blocks that a worker has: while the longest answers of one end, it computes the next
MAX_BLOCKS = 4096


@dataclass(frozen=True)
class Summary:
    """What OUT has after a run.

    Attributes:
        lines: Lines of the input.
        done: Results, those of earlier runs included.
        errors: How many of these are errors.
    """

    lines: int
    done: int
    errors: int


def answer_file(
    source: str,
    output: str,
    *,
    model: str = models.CHAT,
    workers: int | None = None,
    threads: int | None = None,
    max_sequences: int = DEFAULT_SEQUENCES,
    context: int | None = None,
    kv_dtype: KVDtype | None = None,
    numerics: Numerics = "exact",
    kv_tokens: int | None = None,
    device: str = "cpu",
    progress: Progress = silent,
) -> Summary:
    """Answer the lines of a batch file that have no result yet, on the cluster to which Ray is connected.

    Args:
        source: The file of requests.
        output: The file to which results are appended.
        model: Whatever `llamac.load` opens, on each machine.
        workers: Processes that compute; None: as many as the cluster has CPUs for.
        threads: Threads of a worker, which reserves as many CPUs; None: the CPUs of the machine that has fewest.
        max_sequences: Requests that a worker computes at a time.
        context: Positions per request; None: the model's.
        kv_dtype: Number format of the KV cache; None: llamac's own.
        numerics: How products round their inputs: "exact" or "fast".
        kv_tokens: Positions for which the KV cache of a worker has memory; None: as many as requests need.
        device: What computes: only "cpu" is possible.
        progress: Called with (phase, done, total).

    Raises:
        ArgumentError: If a number is not positive, a file is refused, or the cluster has too few CPUs.
        UnsupportedError: If Ray is missing, or the device is not the CPU.
        LlamacError: If the model cannot be opened.
        OSError: If a file cannot be read or written.
        ray.exceptions.RayError: If a worker fails otherwise. The same call continues.
    """
    check_device(device)
    if find_spec("ray") is None:
        raise UnsupportedError(HOW_TO_INSTALL)
    for name, value in (("workers", workers), ("threads", threads), ("max_sequences", max_sequences)):
        if value is not None and value < 1:
            raise ArgumentError(f"{name} is {value}, expected at least 1")
    if STANDARD in (source, output):
        raise ArgumentError("a batch on a cluster reads and writes files: expected paths, not -")
    import ray

    if not ray.is_initialized():
        ray.init()
    cpus = threads or fewest_cpus()
    counts = [int(node["Resources"].get("CPU", 0)) // cpus for node in ray.nodes() if node["Alive"]]
    if not sum(counts):
        raise ArgumentError(f"threads is {cpus}, but no machine of the cluster has as many CPUs")
    settings = {"model": model, "context": context, "kv_dtype": kv_dtype, "kv_tokens": kv_tokens}
    settings["numerics"] = numerics
    settings |= {"threads": cpus, "max_sequences": max_sequences}
    with Input(source) as lines:
        try:
            fingerprint: str = ray.get(ray.remote(num_cpus=cpus)(_fingerprint).remote(settings))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None  # the worker's own error describes what is wrong with the model
        with Output(output, lines, fingerprint) as results:
            left = [line for line in lines.lines if line.id not in results.done]
            done, errors = set(results.done), results.errors
            progress("answering", 0, len(left))
            rows = _rows(lines, left)
            for result, is_error in _computed(rows, settings, fingerprint, workers or sum(counts)) if left else ():
                if result["id"] in done:  # Ray has recomputed a block
                    continue
                results.append(result)
                done.add(result["id"])
                errors += is_error
                progress("answering", len(done) - len(results.done), len(left))
    return Summary(len(lines.lines), len(done), errors)


def _rows(source: Input, lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [{"line": json.dumps([line.number, line.id, line.custom_id]), "text": source.text(line)} for line in lines]


def _computed(
    rows: list[dict[str, Any]], settings: dict[str, Any], fingerprint: str, workers: int
) -> Iterator[tuple[dict[str, Any], bool]]:
    """The results in the order in which blocks of them end, each with whether it is an error."""
    import ray

    # if its worker dies, the whole block is recomputed
    size = max(settings["max_sequences"], -(-len(rows) // MAX_BLOCKS))
    blocks = -(-len(rows) // size)
    ray.data.DataContext.get_current().enable_progress_bars = False
    pool = ray.data.ActorPoolStrategy(
        size=min(workers, blocks),
        max_tasks_in_flight_per_actor=AT_A_TIME,
        max_concurrent_calls_per_actor=AT_A_TIME,
        enable_true_multi_threading=True,
    )
    found = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
        Worker,
        fn_constructor_args=(settings, fingerprint),
        batch_size=None,
        batch_format="pyarrow",
        compute=pool,
        num_cpus=settings["threads"],
    )
    for table in found.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        for text, is_error in zip(table["result"].to_pylist(), table["is_error"].to_pylist(), strict=True):
            yield json.loads(text), is_error


def _opened(settings: dict[str, Any]) -> Engine:
    model = load(
        settings["model"],
        context=settings["context"],
        kv_dtype=settings["kv_dtype"],
        numerics=settings["numerics"],
        threads=settings["threads"],
        progress=False,
    )
    return Engine(model, max_sequences=settings["max_sequences"], kv_tokens=settings["kv_tokens"])


def _fingerprint(settings: dict[str, Any]) -> str:
    """The `system_fingerprint` of the model on a machine of the cluster."""
    with _opened(settings) as engine, engine.model:
        return Answering(engine, SamplingParams()).fingerprint


class Worker:
    """Computes lines, in a process that Ray starts."""

    def __init__(self, settings: dict[str, Any], fingerprint: str) -> None:
        """Open the model.

        Raises:
            ModelError: If this machine has another model than the one that has begun the batch.
        """
        self._engine = _opened(settings)
        self._answering = Answering(self._engine, SamplingParams())
        if self._answering.fingerprint != fingerprint:
            raise ModelError(
                f"{settings['model']} is another model, or llamac another version, than on the machine that was asked "
                f"first: {self._answering.fingerprint}, expected {fingerprint}"
            )

    def __call__(self, table: Any) -> Any:
        """Answer a block of lines: an Arrow table with a line in each row, to one with a result in each row."""
        import pyarrow

        answers = []
        for line, text in zip(table["line"].to_pylist(), table["text"].to_pylist(), strict=True):
            number, line_id, custom_id = json.loads(line)
            answers.append(self._answering.submit(line_id, custom_id, _parser(text, number)))
        found = [answer.result() for answer in answers]
        texts = [json.dumps(result) for result, _ in found]
        return pyarrow.table({"result": texts, "is_error": [is_error for _, is_error in found]})


def _parser(text: bytes, number: int) -> Callable[[], dict[str, Any]]:
    return lambda: parse_line(text, number)


def _answer(options: dict[str, Any]) -> Summary:
    """Connect to the cluster and answer the file.

    Raises:
        LlamacError: If a worker fails; or as `answer_file`.
        OSError: As `answer_file`.
    """
    check_device(options["device"])
    if find_spec("ray") is None:
        raise UnsupportedError(HOW_TO_INSTALL)
    import ray

    try:
        ray.init(options.pop("address"), log_to_driver=False, logging_level="ERROR")
        with bars() as progress:
            return answer_file(options.pop("source"), options.pop("output"), progress=progress, **options)
    except ray.exceptions.RayError as error:
        lines = str(error).split("\n")  # the worker's traceback, which ends with its error
        raise LlamacError(next((line for line in reversed(lines) if line), "RayError")) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m llamac.integrations.ray_batch",
        description="Answer a batch file on a Ray cluster. The same command again continues an interrupted batch.",
    )
    parser.add_argument("source", metavar="IN", help="the requests, one JSON object per line")
    parser.add_argument("output", metavar="OUT", help="the file to which results are appended")
    parser.add_argument("-m", "--model", default=models.CHAT, help="on every machine (default: %(default)s)")
    parser.add_argument("--address", help="of the cluster (default: RAY_ADDRESS, else one that runs here)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that compute (default: what CPUs allow)")
    parser.add_argument("--threads", type=int, metavar="N", help="of a worker (default: CPUs of the smallest machine)")
    parser.add_argument("--max-sequences", type=int, metavar="N", default=DEFAULT_SEQUENCES, help="requests at a time")
    parser.add_argument("--context", type=int, metavar="N", help="positions per request (default: the model's)")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help="number format of the KV cache")
    parser.add_argument("--kv-tokens", type=int, metavar="N", help="positions in the KV cache of a worker")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="the device to compute on: only cpu")
    options = vars(parser.parse_args(arguments))
    try:
        summary = _answer(options)
    except KeyboardInterrupt:
        sys.stderr.write("llamac: stopped; run the command again to continue\n")
        return INTERRUPTED
    except (LlamacError, OSError) as error:
        shown = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        sys.stderr.write(f"llamac: error: {shown}\n")
        return USAGE if isinstance(error, ArgumentError) else ERROR
    sys.stderr.write(f"llamac: {summary.done} of {summary.lines} lines, {summary.errors} with errors\n")
    return ERROR if summary.errors else OK


if __name__ == "__main__":
    raise SystemExit(main())
