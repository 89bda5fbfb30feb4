"""Computing a prefix, and saving, loading and restoring it: python -m bench.session_file MODEL

Prints the best of several rounds, in ms. Files come from the page cache, like any file that was written recently.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import llamac
from llamac.engine.cache.prefix_store import PrefixStore


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-dtype", choices=("f32", "f16", "q8"))
    options = parser.parse_args()
    best: dict[str, float] = {}
    with llamac.load(options.model, threads=options.threads, kv_dtype=options.kv_dtype) as model:
        ids = [100 + i * i % 997 for i in range(options.tokens)]
        with tempfile.TemporaryDirectory() as name, model.session(sequences=2) as session:
            path = Path(name) / "a.session"
            identity = timed(lambda: PrefixStore(session, Path(name) / "prefixes").close())
            for round_ in range(options.rounds):
                store = PrefixStore(session, Path(name) / f"prefixes{round_}")
                session.truncate(0)

                def keep(store: PrefixStore = store) -> None:
                    store.keep(array("i", ids), session._core, 0)
                    store.close()

                def restore(store: PrefixStore = store) -> None:
                    longer = array("i", [*ids, 1])
                    loaded = store.load(longer, len(ids) // 64 * 64)
                    assert loaded is not None
                    store.restore(longer, loaded, session._core, 1)

                work: dict[str, Callable[[], object]] = {
                    "compute": lambda: session.eval(ids, logits=None),
                    "save": lambda: session.save(path),
                    "load": lambda: session.load(path),
                    "keep in a folder": keep,
                    "restore from a folder": restore,
                }
                for key, call in work.items():
                    best[key] = min(best.get(key, 1e9), timed(call))
                session.truncate(0, sequence=1)
            size = path.stat().st_size
        print(f"{options.tokens} tokens, {size / 1e6:.1f} MB; the first identity took {identity:.0f} ms")
        for key, value in best.items():
            print(f"{key:22} {value:8.1f} ms, {100 * value / best['compute']:.2f}% of computing")


if __name__ == "__main__":
    main()
