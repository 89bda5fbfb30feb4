"""Time from process start to the first token of a model with a large vocabulary, and the speed of its encoder.

    python -m bench.big_vocabulary [--entries 128256] [--rounds 9] [MODEL]

Without MODEL, a small model with random weights and a random byte-level BPE is generated. Whole processes are timed;
the median and the best are printed. The limit is 0.6 s. Then the core's encoder and the library tokenizers alternate in
one process, and encode the pages in bench/.
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

import llamac
from bench.shapes import random_checkpoint
from llamac.export.checkpoint import LazyTensor
from llamac.export.flat.plan import make_plan
from llamac.export.flat.stream import write_file
from llamac.export.targets import atomic_file
from llamac.text.decoding import byte_alphabet
from llamac.text.encoding import Encoder
from llamac.text.encoding_cost import make_linear
from llamac.text.packed import pack
from llamac.text.tokenizer import Tokenizer
from llamac.text.tokenizer_json import parse_document
from llamac.text.vocabulary.tokenizer_json import canonical_json

LIMIT_S = 0.6
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
STEPS = {
    "import llamac": "import llamac",
    "open the model": "import llamac; m = llamac.load(path)",
    "tokenize": "import llamac; m = llamac.load(path); m.tokenize('Once upon a time')",
    "first token": "import llamac; m = llamac.load(path); next(m.stream('Once upon a time'))",
}


def tokenizer_json(entries: int, seed: int = 1) -> bytes:
    """A random byte-level BPE. Every entry but the 256 bytes merges two earlier entries."""
    rng = random.Random(seed)
    letters = sorted(byte_alphabet(), key=lambda char: (not char.isascii(), char))
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    known, merges = list(letters), []
    while len(known) < entries:
        # prefer old entries, so that tokens grow slowly, to about 8 letters, like real ones
        first = known[rng.randrange(64 + len(known) // 2)]
        second = known[rng.randrange(min(len(known), 4096))]
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
    """Write a model of stories15M's shape with a vocabulary of `entries`."""
    checkpoint = random_checkpoint("stories15m")
    dim = checkpoint.config.dim
    checkpoint.config = replace(checkpoint.config, vocab_size=entries, n_token_ids=entries)

    def rows(first: int, last: int) -> NDArray[np.float32]:
        numbers = np.random.default_rng(first).standard_normal((last - first, dim), np.float32)
        numbers *= np.float32(dim**-0.5)
        return numbers

    checkpoint.tensors["token_embedding.weight"] = LazyTensor((entries, dim), "f32", rows)
    with atomic_file(path) as file:
        write_file(
            file,
            make_plan(checkpoint, "bf16", {"tokenizer": pack(canonical_json(json.loads(tokenizer_json(entries))))}),
        )


def seconds(code: str, path: Path) -> float:
    """Wall time of one process. os._exit leaves out most of the interpreter's shutdown."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"path = {str(path)!r}; {code}; import os; os._exit(0)"], check=True)
    return time.perf_counter() - started


def encoding_speeds(tokenizer: Tokenizer, rounds: int) -> tuple[float, float]:
    """The core's and the library's speed, best of alternating runs, in characters per second."""
    text = "\n".join(path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.md")))
    document = parse_document(tokenizer.json, "the tokenizer")
    make_linear(document)
    library = Encoder(document, tokenizer.json, ())
    ours: list[float] = []
    theirs: list[float] = []
    assert tokenizer.encode(text, parse_special=True) == library.encode(text, True)
    for _ in range(rounds):
        for encode, times in ((tokenizer._loaded.encoder.encode, ours), (library.encode, theirs)):
            started = time.perf_counter()
            encode(text, True)
            times.append(time.perf_counter() - started)
    return len(text) / min(ours), len(text) / min(theirs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL", help="default: a generated model")
    parser.add_argument("--entries", type=int, default=128256, help="vocabulary size (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="runs per step (default: %(default)s)")
    options = parser.parse_args()
    samples: dict[str, list[float]] = {name: [] for name in STEPS}
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or Path(folder, "model.bin")
        if options.model is None:
            make_small(path, options.entries)
        for _ in range(options.rounds):
            for name, code in STEPS.items():
                samples[name].append(seconds(code, path))
        code = "import llamac; t = llamac.load(path).tokenizer; t.encode('a'); print(t.memory)"
        command = [sys.executable, "-c", f"path = {str(path)!r}; {code}"]
        memory = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        with llamac.load(path) as model:
            speeds = encoding_speeds(model.tokenizer, options.rounds)
    for name, values in samples.items():
        print(f"{name:<18} {statistics.median(values) * 1e3:6.1f} ms   best {min(values) * 1e3:.1f}")
    verdict = "within" if statistics.median(samples["first token"]) <= LIMIT_S else "OVER"
    print(f"{verdict} the limit of {LIMIT_S * 1e3:.0f} ms; the tokenizer uses {memory / 1e6:.0f} MB")
    print(f"encoding           {speeds[0] / 1e6:.1f} M characters/s, the library {speeds[1] / 1e6:.1f}")


if __name__ == "__main__":
    main()
