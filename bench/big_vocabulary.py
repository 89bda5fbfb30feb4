"""A model with a vocabulary of Llama 3's size, and the time from the process's start to its first token.

    python -m bench.big_vocabulary [--entries 128256] [--rounds 9] [MODEL]

Without MODEL a small one with random weights and a random byte-level BPE is made. Whole processes are timed; best and
median. The limit is 0.8 s.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.shapes import random_checkpoint
from llamac.export.checkpoint import LazyTensor
from llamac.export.writer import make_plan, temporary_beside, write
from llamac.tokenizer import byte_alphabet

LIMIT_S = 0.8
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
STEPS = {
    "import llamac": "import llamac",
    "open the model": "import llamac; m = llamac.load(path)",
    "tokenize": "import llamac; m = llamac.load(path); m.tokenize('Once upon a time')",
    "first token": "import llamac; m = llamac.load(path); next(m.stream('Once upon a time'))",
}


def tokenizer_json(entries: int, seed: int = 1) -> bytes:
    """A byte-level BPE with so many entries: all but the bytes are made of two earlier ones."""
    chance = random.Random(seed)
    letters = sorted(byte_alphabet(), key=lambda char: (not char.isascii(), char))
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    known, merges = list(letters), []
    while len(known) < entries:
        # two of the older half: words grow slowly, to some 8 letters, as real ones do
        first = known[chance.randrange(64 + len(known) // 2)]
        second = known[chance.randrange(min(len(known), 4096))]
        if first + second not in vocabulary and len(first + second) <= 16:
            vocabulary[first + second] = len(known)
            known.append(first + second)
            merges.append([first, second])
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    model: dict[str, object] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True}
    document: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None,
        "decoder": level,
        "model": {**model, "vocab": vocabulary, "merges": merges},
    }
    return json.dumps(document, ensure_ascii=False).encode()


def make_small(path: Path, entries: int) -> None:
    """A model of stories15M's shape with that vocabulary."""
    made = random_checkpoint("stories15m")
    dim = made.config.dim
    made.config = replace(made.config, vocab_size=entries, n_token_ids=entries)

    def rows(first: int, last: int) -> NDArray[np.float32]:
        numbers = np.random.default_rng(first).standard_normal((last - first, dim), np.float32)
        numbers *= np.float32(dim**-0.5)
        return numbers

    made.tensors["token_embedding.weight"] = LazyTensor((entries, dim), "f32", rows)
    texts = dict.fromkeys(("spm", "template", "probes"), b"") | {
        "metadata": b"{}",
        "tokenizer": tokenizer_json(entries),
    }
    with temporary_beside(path) as file:
        write(file, make_plan(made, "bf16", texts))


def seconds(code: str, path: Path) -> float:
    """Seconds of one process, its end left out as far as possible."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"path = {str(path)!r}; {code}; import os; os._exit(0)"], check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL")
    parser.add_argument("--entries", type=int, default=128256, help="of the vocabulary (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    samples: dict[str, list[float]] = {name: [] for name in STEPS}
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or Path(folder, "model.bin")
        if options.model is None:
            make_small(path, options.entries)
        for _ in range(options.rounds):
            for name, code in STEPS.items():
                samples[name].append(seconds(code, path))
        told = "import llamac; t = llamac.load(path).tokenizer; t.encode('a'); print(t.memory)"
        command = [sys.executable, "-c", f"path = {str(path)!r}; {told}"]
        memory = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    for name, values in samples.items():
        print(f"{name:<18} {statistics.median(values) * 1e3:6.1f} ms   best {min(values) * 1e3:.1f}")
    verdict = "within" if statistics.median(samples["first token"]) <= LIMIT_S else "OVER"
    print(f"{verdict} the limit of {LIMIT_S * 1e3:.0f} ms; the tokenizer holds {memory / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
