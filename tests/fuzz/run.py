"""Fuzzes a reader with atheris until it fails or its time is over: python tests/fuzz/run.py TARGET [--seconds N]

`all` runs every target in turn, in a process of its own, and ends with 1 if any of them failed. New inputs that reach
other code are kept in --work/TARGET; what fails is written there, too, and belongs into
corpus/TARGET.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SLOW = 10  # seconds after which an input has hung
CORPUS = Path(__file__).parent / "corpus"


def fuzz(name: str, seconds: int, work: Path) -> None:
    """Fuzzes one target in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["llamac"]):
        from fuzz.mutate import mutated_parts, pack, unpack
        from fuzz.targets import TARGETS
        from llamac.errors import LlamacError
    target = TARGETS[name]
    count = len(target.names)
    warnings.simplefilter("error")
    seeds = work / "seeds" / name
    kept = work / name
    for folder in (seeds, kept, CORPUS / name):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for number, parts in enumerate(target.samples(Path(scratch))):
            (seeds / f"{number}").write_bytes(pack(parts))
    files = Path(tempfile.mkdtemp(prefix="llamac-fuzz-"))

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            data = pack(mutated_parts(target.names, unpack(data, count), rng))
        else:
            data = atheris.Mutate(data, len(data))
        return pack(target.finish(unpack(data, count)))[:max_bytes]

    def one(data: bytes) -> None:
        try:
            target.run(unpack(data, count), files)
        except LlamacError:
            pass
        except BaseException as error:  # a panic of a library is no Exception
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error

    options = [f"-max_total_time={seconds}", f"-timeout={SLOW}", "-rss_limit_mb=1536", "-max_len=262144"]
    options += [f"-artifact_prefix={kept}/", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, str(kept), str(seeds), str(CORPUS / name)], one, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a name of targets.TARGETS, or all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("fuzz-work"), help="what is kept (default: %(default)s)")
    options = parser.parse_args()
    if options.target != "all":
        fuzz(options.target, options.seconds, options.work)
        return 0
    from fuzz.targets import TARGETS

    failed = []
    for name in TARGETS:
        command = [sys.executable, __file__, name, "--seconds", str(options.seconds), "--work", str(options.work)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        lines = done.stdout.splitlines()
        runs = next((line.split()[-1] for line in lines if "number_of_executed_units" in line), "?")
        covered = next((line.split("cov: ")[1].split()[0] for line in reversed(lines) if "cov: " in line), "?")
        print(f"{name}: {runs} executions, {covered} edges" + (", FAILED" if done.returncode else ""), flush=True)
        if done.returncode:
            failed.append(name)
            print("\n".join(lines[-40:]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
