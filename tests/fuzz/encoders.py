"""Compares the core's encoder with the library `tokenizers` on random texts.

    python -m tests.fuzz.encoders [--texts 10000] [--seed 1] [TOKENIZER ...]

Each TOKENIZER is the name of a built-in model, or a file that `Tokenizer.from_file` reads (default: all built-in ones).
The texts mix characters of all planes, words, code, runs of white space, names and fragments of special tokens, and
pieces of the vocabulary. Ids and special spans must be equal.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable, Iterator

import llamac
from llamac.models import NAMES
from llamac.text.encoding import Encoder
from llamac.text.encoding_cost import make_linear
from llamac.text.native_encoder import NativeEncoder
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer import Tokenizer
from llamac.text.tokenizer_json import parse_document

WORDS = [
    *("the", "of", "and", "to", "in", "is", "you", "that", "it", "was", "for", "on", "HELLO", "World", "don't", "I'll"),
    *(
        "we've",
        "it's",
        "Straße",
        "naïve",
        "café",
        "Привет",
        "мир",
        "你好世界",
        "こんにちは",
        "안녕하세요",
        "مرحبا",
        "שלום",
    ),
]
CODE = ["def f(x):\n    return x + 1\n", "for (int i = 0; i < n; i++) {\n\t", "<div class='a'>", "a.b->c[0] != 0", "//"]
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2003", "\u3000", " \n ", "\u2581", "\u2581\u2581"]
PLANES: tuple[tuple[int, int], ...] = (
    (0, 0x80),
    (0x80, 0x250),
    (0x300, 0x370),
    (0x370, 0x1000),
    (0x2000, 0x2C00),
    (0x3000, 0xD800),
)
PLANES += ((0xE000, 0x10000), (0x10000, 0x11000), (0x1F300, 0x1FB00), (0xE0000, 0x110000))


def pieces_of_text(rng: random.Random, names: list[str], tokens: list[str]) -> Iterator[str]:
    """Yield random parts of a text."""
    while True:
        kind = rng.randrange(12)
        if kind < 3:
            yield rng.choice(WORDS) + rng.choice(("", " ", " "))
        elif kind == 3:
            yield rng.choice(SPACES) * rng.choice((1, 1, 1, 2, 3, 7, 20))
        elif kind == 4:
            yield "".join(chr(rng.randrange(*rng.choice(PLANES))) for _ in range(rng.randrange(1, 4)))
        elif kind == 5:
            yield rng.choice(CODE)
        elif kind == 6 and names:
            yield rng.choice(names)
        elif kind == 7 and names:
            name = rng.choice(names)
            yield name[rng.randrange(len(name)) :] if rng.random() < 0.5 else name[: rng.randrange(len(name) + 1)]
        elif kind < 10:
            yield rng.choice(tokens)
        elif kind == 10:
            yield str(rng.randrange(10 ** rng.randrange(1, 9)))
        else:
            yield chr(rng.randrange(33, 127)) * rng.choice((1, 2, 3, 5, 40, 90))


def random_text(rng: random.Random, names: list[str], tokens: list[str]) -> str:
    """A random text without lone surrogates."""
    parts = pieces_of_text(rng, names, tokens)
    return "".join(next(parts) for _ in range(rng.choice((0, 1, 1, 2, 3, 5, 8, 15, 40))))


def library_encoder(data: bytes, special: SpecialTokens) -> Encoder:
    """The library's encoder for a tokenizer.json, as for tokenizers that the core does not support."""
    document = parse_document(data, "the tokenizer")
    make_linear(document)
    return Encoder(document, data, {token for token in (special.bos_id, special.eos_id) if token is not None})


def compare(tokenizer: Tokenizer, texts: int, seed: int, spans: bool = True) -> Iterator[str]:
    """Encode random texts both ways, and yield a description of each difference."""
    native = tokenizer._loaded.encoder
    if not isinstance(native, NativeEncoder):
        yield "the core does not support this tokenizer"
        return
    library = library_encoder(tokenizer.json, tokenizer.special)
    rng = random.Random(seed)
    names = sorted(native.added.values())
    vocabulary = [tokenizer.token_bytes(rng.randrange(tokenizer.n_ids)).decode(errors="ignore") for _ in range(2000)]
    raw = [native.vocabulary.text(rng.randrange(len(native.vocabulary))) or "" for _ in range(2000)]
    for _ in range(texts):
        text = random_text(rng, names[:50] + rng.choices(names, k=5) if names else [], vocabulary + raw)
        for parse_special in (False, True):
            ours, theirs = native.encode(text, parse_special), library.encode(text, parse_special)
            if ours != theirs:
                yield f"{text!r}, parse_special={parse_special}: {ours} instead of {theirs}"
        if spans and native.special_spans(text) != library.special_spans(text):
            yield f"{text!r}: spans {native.special_spans(text)} instead of {library.special_spans(text)}"


def read_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a built-in model or in a file."""
    if name not in NAMES:
        return Tokenizer.from_file(name)
    with llamac.load(name) as model:
        return model.tokenizer


def compare_all(tokenizers: Iterable[str], texts: int, seed: int = 1) -> int:
    """Compare the encoders of tokenizers; print a line for each one and its first differences; return how many."""
    total = 0
    for name in tokenizers:
        started = time.perf_counter()
        problems = 0
        for problem in compare(read_tokenizer(name), texts, seed):
            problems += 1
            if problems <= 5:
                print(f"{name}: {problem}")
        total += problems
        print(f"{name}: {texts} texts, {problems} differences, {time.perf_counter() - started:.1f} s", flush=True)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("tokenizers", nargs="*", metavar="TOKENIZER", default=NAMES)
    parser.add_argument("--texts", type=int, default=10_000, help="texts per tokenizer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the random texts (default: %(default)s)")
    options = parser.parse_args()
    return 1 if compare_all(options.tokenizers, options.texts, options.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
