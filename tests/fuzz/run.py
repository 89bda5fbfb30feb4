"""Fuzz a reader with atheris until it fails or its time is up: python tests/fuzz/run.py TARGET [--seconds N]

With --executions N the inputs are the same in every run, however fast the machine is.
`all` runs every target in turn, each in its own process. Then it compares the encoders of the built-in models with the
library's on some texts (encoders.py). It exits with 1 if anything failed. Inputs that reach new code go to
--work/TARGET. Failing inputs go there as well (crash-..., timeout-..., oom-...); copy them to corpus/TARGET as
found-DESCRIPTION.

--blind mutates the samples and the inputs so far without measuring what they reach. Nothing is instrumented, so it
tries many times more inputs in the same time. It needs no atheris. It also runs with a sanitized build of the core
(LLAMAC_SANITIZE in setup.py), which then has no limit of memory, because AddressSanitizer reserves terabytes.

--keep does not fuzz. It selects the smallest of these inputs that together reach every line that all of them reach, and
writes them to corpus/TARGET as accepted-... and rejected-....
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import os
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from fuzz.target import Target

TIMEOUT = 5  # seconds after which an input counts as hanging
LONGEST = 60  # seconds of an input without atheris
MEMORY_MB = 1536
MAX_BYTES = 7_000  # of an input in the corpus
TEXTS = 1_000  # for the encoder of each built-in model
SMALL_BYTES = 1_000  # of an input whose only merit is a new step between two lines that other inputs also reach
CORPUS = Path(__file__).parent / "corpus"


def instrumented() -> Any:
    """Import this library with atheris's instrumentation; return the module atheris."""
    import atheris

    with atheris.instrument_imports(include=["llamac"]):
        import fuzz.targets  # noqa: F401
    return atheris


def limits(seconds: int, executions: int | None) -> list[str]:
    """libFuzzer's options for a time or, if given, a number of executions; the latter allow for slow machines."""
    if executions is None:
        return [f"-max_total_time={seconds}", f"-timeout={TIMEOUT}"]
    return [f"-runs={executions}", "-seed=1", f"-timeout={20 * TIMEOUT}"]


def fuzz_in_child(name: str, limits: list[str], work: Path) -> tuple[int, list[str]]:
    """Fuzz one target in a forked process, which shares this one's imports; return its exit code and output lines."""
    work.mkdir(parents=True, exist_ok=True)
    log = work / f"{name}.log"
    child = os.fork()
    if child == 0:
        with open(log, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            fuzz(name, limits, work)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), log.read_text(errors="replace").splitlines()


def fuzz(name: str, limits: list[str], work: Path) -> None:
    """Fuzz one target in this process, which then exits."""
    atheris = instrumented()
    from fuzz.formats import mutated_parts
    from fuzz.mutate import pack, unpack
    from fuzz.targets import TARGETS
    from llamac.errors import LlamacError

    target = TARGETS[name]
    count = len(target.names)
    warnings.simplefilter("error")
    seeds = work / "seeds" / name
    inputs = work / name
    for folder in (seeds, inputs, CORPUS / name):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for number, parts in enumerate(target.samples(Path(scratch))):
            (seeds / f"{number}").write_bytes(pack(parts))
    files = Path(tempfile.mkdtemp(prefix="llamac-fuzz-"))

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.8:
            data = pack(mutated_parts(target.names, unpack(data, count), rng))
        else:
            data = atheris.Mutate(data, len(data))
        return pack(target.finish(unpack(data, count)))[:max_bytes]

    def execute(data: bytes) -> None:
        try:
            target.run(unpack(data, count), files)
        except LlamacError:
            pass
        except BaseException as error:  # panics of Rust libraries do not derive from Exception
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error

    options = [
        *limits,
        f"-rss_limit_mb={MEMORY_MB}",
        "-max_len=262144",
        f"-artifact_prefix={inputs}/",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(inputs), str(seeds), str(CORPUS / name)], execute, custom_mutator=mutate)
    atheris.Fuzz()


# ---- without instrumentation


def fuzz_blindly(name: str, seconds: float, executions: int | None, seed: int, work: Path) -> tuple[int, int]:
    """Try random mutations of a target's samples and inputs; return the numbers of executions and of failures.

    A failing input is written to work/TARGET.
    """
    from fuzz.formats import mutated_parts
    from fuzz.mutate import pack
    from fuzz.targets import TARGETS
    from llamac.errors import LlamacError

    target, rng = TARGETS[name], random.Random(seed)
    inputs = work / name
    inputs.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("error")
    if not hasattr(ctypes.CDLL(None), "__asan_init"):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MB << 20, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with tempfile.TemporaryDirectory() as scratch:
        valid = list(target.samples(Path(scratch)))
    valid += [target.stored(path) for folder in (CORPUS / name, inputs) for path in sorted(folder.glob("*"))]
    end, done, failures = time.monotonic() + seconds, 0, 0
    with tempfile.TemporaryDirectory(prefix="llamac-fuzz-") as files:
        while done < executions if executions is not None else time.monotonic() < end:
            parts = target.finish(mutated_parts(target.names, rng.choice(valid), rng))
            try:
                with _time_limit():
                    target.run(parts, Path(files))
            except LlamacError:
                pass
            except BaseException as error:  # panics of Rust libraries do not derive from Exception
                if isinstance(error, KeyboardInterrupt):
                    raise
                data = pack(parts)
                path = inputs / f"crash-{hashlib.sha1(data).hexdigest()}"
                path.write_bytes(data)
                print(f"{name}: {type(error).__name__}: {error}: {path}", flush=True)
                failures += 1
            done += 1
    return done, failures


# ---- the corpus


def keep(name: str, work: Path) -> str:
    """Rebuild the corpus of one target, except found-...; return a line of statistics."""
    from fuzz.mutate import pack
    from fuzz.targets import TARGETS

    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as scratch:
        samples = {pack(parts) for parts in target.samples(Path(scratch))}
    stored = [path for path in (CORPUS / name).glob("*") if not path.name.startswith("found-")]
    new = [path for path in (work / name).glob("*") if "-" not in path.name]  # not crash-..., timeout-..., oom-...
    inputs = {path.read_bytes() for path in (*stored, *new)} - samples  # samples are made, not stored
    small = sorted((data for data in inputs if len(data) <= MAX_BYTES), key=lambda data: (len(data), data))
    for path in stored:
        path.unlink()
    reached: set[Any] = set()
    count = 0
    with tempfile.TemporaryDirectory() as scratch:
        for data in samples:
            reached |= _reached(target, data, Path(scratch))[1]
        reached -= {("accepted", 0), ("rejected", 0)}
        for data in small:
            outcome, steps = _reached(target, data, Path(scratch))
            gained = steps - reached
            if not gained or (len(data) > SMALL_BYTES and not any(len(step) == 2 for step in gained)):
                continue
            reached |= steps
            count += 1
            (CORPUS / name / f"{outcome}-{hashlib.sha256(data).hexdigest()[:8]}").write_bytes(data)
    return f"{name}: {count} of {len(inputs)} inputs kept, {len(reached)} lines and steps reached"


def _reached(target: Target, data: bytes, folder: Path) -> tuple[str, set[Any]]:
    """Run one input.

    Returns:
        The outcome, "accepted" or "rejected", and what was reached: (path, line) of each line of the package, and
        (path, line, line) of each step between two lines. It also contains (outcome, 0).
    """
    from fuzz.mutate import unpack
    from llamac.errors import LlamacError

    reached: set[Any] = set()

    def trace(frame: FrameType, _: str, __: object) -> Any:
        path = frame.f_code.co_filename
        if "/llamac/" not in path and "/export/" not in path:
            return None
        before = 0

        def line(frame: FrameType, event: str, _: object) -> Any:
            nonlocal before
            if event == "line":
                reached.add((path, frame.f_lineno))
                reached.add((path, before, frame.f_lineno))
                before = frame.f_lineno
            return line

        return line

    outcome = "accepted"
    with _time_limit():
        sys.settrace(trace)
        try:
            target.run(unpack(data, len(target.names)), folder)
        except LlamacError:
            outcome = "rejected"
        finally:
            sys.settrace(None)
    reached.add((outcome, 0))
    return outcome, reached


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def expire(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"not done after {LONGEST} seconds")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("target", help="a key of targets.TARGETS, or all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: %(default)s)")
    parser.add_argument("--executions", type=int, metavar="N", help="stop each target after N executions instead")
    parser.add_argument(
        "--work", type=Path, default=Path("fuzz-work"), help="folder of inputs and logs (default: %(default)s)"
    )
    parser.add_argument("--blind", action="store_true", help="do not instrument: faster, but without guidance")
    parser.add_argument("--seed", type=int, default=1, help="with --blind: of the mutations (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="rebuild the corpus instead")
    options = parser.parse_args()
    if options.blind:
        from fuzz.targets import TARGETS

        total = 0
        for name in TARGETS if options.target == "all" else (options.target,):
            done, failures = fuzz_blindly(name, options.seconds, options.executions, options.seed, options.work)
            print(f"{name}: {done} executions, {failures} failures", flush=True)
            total += failures
        return 1 if total else 0
    if options.target != "all":
        if options.keep:
            print(keep(options.target, options.work))
        else:
            fuzz(options.target, limits(options.seconds, options.executions), options.work)
        return 0
    if not options.keep:
        instrumented()
    from fuzz.encoders import compare_all
    from fuzz.targets import TARGETS
    from llamac.models import NAMES

    failed = []
    for name in TARGETS:
        if options.keep:
            print(keep(name, options.work), flush=True)
            continue
        code, lines = fuzz_in_child(name, limits(options.seconds, options.executions), options.work)
        runs = next((line.split()[-1] for line in lines if "number_of_executed_units" in line), "?")
        covered = next((line.split("cov: ")[1].split()[0] for line in reversed(lines) if "cov: " in line), "?")
        print(f"{name}: {runs} executions, {covered} edges" + (", FAILED" if code else ""), flush=True)
        if code:
            failed.append(name)
            print("\n".join(lines[-40:]))
    if not options.keep and compare_all(NAMES, TEXTS):
        failed.append("encoders")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
