"""Decode and prefill speed of a model file, decode also as a share of the bare read bandwidth measured in the same run.

    python -m bench.decode MODEL [--threads 1,2] [--rounds 7] [--prompt 128] [--json FILE]

Bandwidth (the best of 1, 2 and 4 streams, without software prefetch) and decode take turns, so that a busy neighbour
slows both. Bytes are those that a step reads: all matrices, the embedding only where it is also the output.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import llamac

BLOCK_BYTES = 512 << 20


class Bandwidth:
    """The bare read, compiled for this machine when it is needed."""

    def __init__(self) -> None:
        source = Path(__file__).with_name("read_bandwidth.c")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "read_bandwidth.so")
            subprocess.run(
                ["cc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", source, "-o", library], check=True
            )
            self._pass = ctypes.CDLL(str(library)).read_pass
        self._pass.restype = ctypes.c_double
        self._block = mmap.mmap(-1, BLOCK_BYTES)
        for start in range(0, BLOCK_BYTES, 4096):
            self._block[start] = 1
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._block))

    def measure(self, threads: int) -> float:
        """Bytes per second, the best of 1, 2 and 4 streams."""
        result = ctypes.c_uint64()
        arguments = (ctypes.c_void_p(self._address), ctypes.c_size_t(BLOCK_BYTES), threads)
        return max(self._pass(*arguments, streams, ctypes.byref(result)) for streams in (1, 2, 4))


def step_bytes(model: llamac.Model) -> int:
    """Bytes of weights that one decode step reads."""
    skipped = () if model.config["tied_output"] else ("token_embedding.weight",)
    return sum(
        t.bytes
        for t in model.file.tensors
        if len(t.shape) == 2 and t.name not in (*skipped, "position_embedding.weight")
    )


def measure(path: Path, threads: int, rounds: int, prompt: int, bandwidth: Bandwidth) -> dict[str, Any]:
    """Medians and spread of one setting."""
    with llamac.load(path, threads=threads) as model:
        count = step_bytes(model)
        steps = max(4, int(2e9 // count))
        greedy = llamac._core.Sampling()
        shares, decode, prefill, read = [], [], [], []
        with model.session(context=min(model.config["context"], prompt + steps + 1)) as session:
            for _ in range(rounds):
                session.rewind(0)
                started = time.perf_counter()
                session.prefill(array("i", [i % 97 for i in range(prompt)]))
                prefill.append(prompt / (time.perf_counter() - started))
                read.append(bandwidth.measure(threads))
                started = time.perf_counter()
                for _ in range(steps):
                    session.step(session.sample(greedy, model.config["n_token_ids"]))
                decode.append(steps / (time.perf_counter() - started))
                shares.append(decode[-1] * count / statistics.mean([read[-1], bandwidth.measure(threads)]))
        return {
            "threads": threads,
            "prompt": prompt,
            "prefill_tok_s": statistics.median(prefill),
            "decode_tok_s": statistics.median(decode),
            "decode_spread": [min(decode), max(decode)],
            "decode_gb_s": statistics.median(decode) * count / 1e9,
            "read_gb_s": statistics.median(read) / 1e9,
            "share_of_read": statistics.median(shares),
            "share_spread": [min(shares), max(shares)],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--threads", default="1,2", help="thread counts, separated by commas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each measurement (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    bandwidth = Bandwidth()
    results = [
        measure(options.model, int(n), options.rounds, options.prompt, bandwidth) for n in options.threads.split(",")
    ]
    for r in results:
        print(
            f"{r['threads']} threads: prefill {r['prefill_tok_s']:.1f} tok/s, decode {r['decode_tok_s']:.1f} tok/s = "
            f"{r['decode_gb_s']:.1f} GB/s, bare read {r['read_gb_s']:.1f} GB/s, share {r['share_of_read']:.0%} "
            f"({r['share_spread'][0]:.0%} to {r['share_spread'][1]:.0%})"
        )
    if options.json:
        machine = {"processor": platform.processor() or platform.machine(), "python": sys.version.split()[0]}
        options.json.write_text(
            json.dumps({"model": options.model.name, "machine": machine, "results": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
