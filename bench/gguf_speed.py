"""Compare llamac with llama.cpp and ik_llama.cpp on the same GGUF files, as ratios, for each type of GGUF.

    python -m bench.gguf_speed --library NAME=LIBRARY[:HEADERS...] [--library ...] [--types Q4_0,Q4_K]
                               [--shape tinyllama-1.1b] [--layers N] [--dtype q4] [--threads 1,2] [--prompt 256]
                               [--decode 32] [--rounds 5] [--folder FOLDER] [--result NAME]

For each type, the benchmark creates a file with random weights, whose matrices all have that type, measures it, and
removes it. The files are in the folder (by default a temporary one). llamac imports a file with its own numbers;
--dtype converts it to one of llamac's formats instead. A library exports llama.h (bench.llama_library). With folders of
headers, it is ik_llama.cpp, which then repacks the matrices when it loads them.

The engines alternate: A B C A B C. A ratio is llamac's speed over the peer's, as the median over rounds. On a busy
machine, --clock cpu compares the least CPU time of all rounds instead, with one thread. LLAMAC_ISA selects llamac's
kernels, for comparisons with builds for the same instruction set.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.family_shapes import FAMILY_SHAPES
from bench.make_gguf import make_family_gguf, make_gguf
from bench.peer_models import Entry
from bench.peers import compare, numbers
from bench.shapes import SHAPES
from bench.stamp import save
from llamac.export.convert import export

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")


def measure(kind: str, libraries: dict[str, str], options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The results of all engines on a file of this type."""
    path = folder / f"{options.shape}-{kind}.gguf"
    os.environ["LLAMAC_CACHE"] = str(folder / "cache")
    os.environ["BENCH_CLOCK"] = options.clock
    if options.shape in FAMILY_SHAPES:
        make_family_gguf(options.shape, kind, path, options.layers)
    else:
        shape = SHAPES[options.shape]
        make_gguf(options.shape, kind, path, pure=True, shape=replace(shape, layers=options.layers or shape.layers))
    ours = path
    if options.dtype:
        ours = export(path, path.with_suffix(".bin"), dtype=options.dtype, probe_source=None).path
    entries = {Entry("llamac", kind): ours, **{Entry("library", library): path for library in libraries.values()}}
    names = {library: name for name, library in libraries.items()}
    tasks = [("decode", options.decode), *(("prefill", n) for n in options.prompt)]
    results = []
    try:
        for threads in options.threads:
            for series in compare(entries, threads, tasks, options.rounds):
                for result in series.results():
                    engine = names.get(result.pop("kind"), "llamac")
                    results.append({"type": kind, **result, "engine": engine})
    finally:
        path.unlink()
        path.with_suffix(".bin").unlink(missing_ok=True)
        shutil.rmtree(folder / "cache", ignore_errors=True)
    return results


def show(results: list[dict[str, Any]], ratio: str) -> None:
    """Print one line per type, number of threads and task: llamac's speed (median), and the ratios."""
    peers = list(dict.fromkeys(r["engine"] for r in results if r["engine"] != "llamac"))
    print(f"| type | threads | task | llamac tokens/s | {' | '.join(f'over {peer}' for peer in peers)} |")
    print("|---|---|---|---|" + "---|" * len(peers))
    rows = dict.fromkeys((r["type"], r["threads"], r["phase"], r["tokens"]) for r in results)
    for row in rows:
        found = {r["engine"]: r for r in results if (r["type"], r["threads"], r["phase"], r["tokens"]) == row}
        kind, threads, phase, tokens = row
        ratios = [f"{found[peer][ratio]:.2f}" if peer in found else "" for peer in peers]
        print(f"| {kind} | {threads} | {phase} {tokens} | {found['llamac']['tok_s']:.1f} | {' | '.join(ratios)} |")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--library", action="append", default=[], metavar="NAME=LIBRARY[:HEADERS...]", help="a peer")
    parser.add_argument("--types", default=",".join(TYPES), help="default: %(default)s")
    parser.add_argument(
        "--shape", choices=SHAPES | FAMILY_SHAPES, default="tinyllama-1.1b", help="default: %(default)s"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="number of layers (default: the shape's)")
    parser.add_argument("--dtype", metavar="DTYPE", help="convert llamac's model to this format, such as q4")
    parser.add_argument("--folder", type=Path, help="keep files here while they are measured")
    parser.add_argument("--threads", type=numbers, default="1,2", help="thread counts (default: %(default)s)")
    parser.add_argument("--prompt", type=numbers, default="256", help="prompt lengths (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=32, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: %(default)s)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="default: %(default)s")
    parser.add_argument("--result", metavar="NAME", help="write bench/results/DATE-NAME.json")
    options = parser.parse_args(arguments)
    if options.clock == "cpu" and options.threads != [1]:
        parser.error("--clock cpu needs --threads 1: waiting threads of some engines use CPU time")
    return options


def main() -> None:
    options = parse()
    libraries = dict(library.split("=", 1) for library in options.library)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in options.types.split(","):
            results += measure(kind, libraries, options, folder)
            print(f"{kind}: done", file=sys.stderr)
    show(results, "ratio_of_best" if options.clock == "cpu" else "ratio")
    if options.result:
        settings = {name: str(value) for name, value in vars(options).items() if name not in ("folder", "result")}
        settings["library"] = ", ".join(libraries)
        print(save(options.result, {"bench": "gguf_speed", "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
