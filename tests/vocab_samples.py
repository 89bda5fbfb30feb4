"""Tokenizers of every kind, texts that are hard to tokenize, and published test vectors."""

from __future__ import annotations

import itertools
import json
import random
import struct
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from llamac.format.gguf_metadata import parse_metadata
from llamac.text.decoding import byte_alphabet
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer import Tokenizer
from llamac.text.vocabulary import gguf as vocab_gguf

NO_SPECIAL = SpecialTokens(bos_id=None, add_bos=False, add_eos=False, eos_id=None, stop_ids=())
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


def gguf_value(value: Any) -> tuple[int, bytes]:
    """Encode a GGUF value.

    Args:
        value: A bool, an int (as uint32), str or bytes; a tuple (code of struct, number) for a scalar of another type;
            ("[", code, list) for an array, with code "s" for strings and "[" for arrays.

    Returns:
        The GGUF value type, and the value's bytes.
    """
    codes = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}
    if isinstance(value, tuple) and value[0] == "[":
        if value[1] == "[":
            parts = [gguf_value(item)[1] for item in value[2]]
            return 9, struct.pack("<IQ", 9, len(parts)) + b"".join(parts)
        if value[1] == "s":
            parts = [gguf_value(item)[1] for item in value[2]]
            return 9, struct.pack("<IQ", 8, len(parts)) + b"".join(parts)
        return 9, struct.pack(f"<IQ{len(value[2])}{value[1]}", codes[value[1]], len(value[2]), *value[2])
    if isinstance(value, tuple):
        return codes[value[0]], struct.pack("<" + value[0], value[1])
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    data = value if isinstance(value, bytes) else value.encode()
    return 8, struct.pack("<Q", len(data)) + data


def gguf_file(entries: Iterable[tuple[str, Any]], version: int = 3, tensors: int = 0) -> bytes:
    """A GGUF file with these entries and no tensors, whatever number of them it declares."""
    body = []
    for key, value in entries:
        kind, data = gguf_value(value)
        body.append(gguf_value(key)[1] + struct.pack("<I", kind) + data)
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(body)) + b"".join(body)


def byte_level_gguf(pre: str | None = "gpt-2", **changes: Any) -> list[tuple[str, Any]]:
    """Metadata of a byte-level vocabulary: the bytes, a few merges, a control token and user-defined tokens."""
    merges = ["h e", "l l", "he ll", "Ġ hell", "1 2", "12 3", "Ċ Ċ"]
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges), "<|end|>", "  ", "[PAD265]"]
    types = [1] * (len(tokens) - 3) + [3, 4, 4]
    values = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ("[", "s", tokens),
        "tokenizer.ggml.token_type": ("[", "i", types),
        "tokenizer.ggml.merges": ("[", "s", merges),
        "tokenizer.ggml.bos_token_id": 263,
        "tokenizer.ggml.eos_token_id": 263,
    }
    values.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return [(key, value) for key, value in values.items() if value is not None]


def raw_bpe_gguf(pre: str = "gemma4", **changes: Any) -> list[tuple[str, Any]]:
    """Metadata of a BPE vocabulary on characters: byte pieces, a few merges, runs of line feeds, control tokens."""
    merges = ["h e", "l l", "he ll", "▁ hell", "1 2", "12 3", "\n \n", "\n\n \n", "▁ ▁", "a \n"]
    made = [merge[: (cut := merge.find(" ", 1))] + merge[cut + 1 :] for merge in merges]
    letters = sorted(set("".join(made)))
    tokens = ["<bos>", "<turn|>", *BYTE_PIECES, *letters, *made]
    values = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gemma4" if pre == "gemma4" else "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ("[", "s", tokens),
        "tokenizer.ggml.token_type": ("[", "i", [3, 3] + [6] * 256 + [1] * (len(tokens) - 258)),
        "tokenizer.ggml.merges": ("[", "s", merges),
        "tokenizer.ggml.bos_token_id": 0,
    }
    values.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return [(key, value) for key, value in values.items() if value is not None]


def word_piece_gguf(**changes: Any) -> list[tuple[str, Any]]:
    """Metadata of a WordPiece vocabulary, as llama.cpp's converter writes BERT's."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁un", "aff", "able", "▁a", "b", "▁!", "▁,", "▁e", "▁日", "[unused1]"]
    values = {
        "model": "bert",
        "tokens": ("[", "s", tokens),
        "token_type": ("[", "i", [3, 3, 3, 3] + [1] * (len(tokens) - 4)),
        "unknown_token_id": 1,
        "cls_token_id": 2,
        "seperator_token_id": 3,
    }
    return [(f"tokenizer.ggml.{key}", value) for key, value in (values | changes).items() if value is not None]


def unigram_gguf(**changes: Any) -> list[tuple[str, Any]]:
    """Metadata of a unigram vocabulary, as llama.cpp's converter writes T5's, with an unused id and without "<"."""
    tokens = ["<pad>", "</s>", "<unk>", "▁", "a", "b", "ab", "▁a", "bb", "s", ">", "/", "[PAD12]", "<extra_id_0>"]
    scores = [0.0, 0.0, 0.0, -2.0, -3.0, -3.0, -4.0, -3.5, -5.0, -6.0, -6.0, -6.0, -10000.0, 0.0]
    values = {
        "model": "t5",
        "tokens": ("[", "s", tokens),
        "scores": ("[", "f", scores),
        "token_type": ("[", "i", [3, 3, 2] + [1] * 9 + [5, 4]),
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
    }
    return [(f"tokenizer.ggml.{key}", value) for key, value in (values | changes).items() if value is not None]


def from_gguf(entries: Iterable[tuple[str, Any]]) -> Tokenizer:
    """The tokenizer of a GGUF file with these entries."""
    vocabulary = vocab_gguf.from_metadata(parse_metadata(gguf_file(entries)).values)
    return Tokenizer.from_json(vocabulary.json, vocabulary.special)


WORDS = ["he", "ll", "hell", " hell", "lo", "  ", "    ", " h"]


def llama2c_file(words: Sequence[str] = WORDS, scores: Sequence[float] | None = None) -> bytes:
    """A tokenizer.bin of llama2.c: special tokens, bytes, words and their characters."""
    chars = sorted(set("".join(words)))
    texts = ["<unk>", "\n<s>\n", "\n</s>\n", *BYTE_PIECES, *words, *chars]
    scores = [-float(index) for index in range(len(words))] if scores is None else scores
    ranks = [0.0] * 259 + list(scores) + [-1000.0] * len(chars)
    blobs = [text.encode() for text in texts]
    body = b"".join(struct.pack("<fi", rank, len(blob)) + blob for rank, blob in zip(ranks, blobs, strict=True))
    return struct.pack("<i", max(map(len, blobs))) + body


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    """A byte-level tokenizer.json with BOS 256, which a template adds, and EOS 257."""
    special = [{"id": 256 + index, "content": name, "special": True} for index, name in enumerate(("<s>", "</s>"))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocab = {char: index for index, char in enumerate(byte_alphabet())} | {"<s>": 256, "</s>": 257, "he": 258}
    document = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [token | flags for token in special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": template,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": ["h e"], "dropout": None, "unk_token": None},
    }
    return document | changes


def write_json(folder: Path, **files: Any) -> Path:
    """Write JSON files, given by name without suffix; return the folder."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def field(number: int, value: int | float | bytes) -> bytes:
    """An encoded field of a protocol buffer message."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def llama2c_encoder(data: bytes) -> Callable[[str], list[int]]:
    """llama2.c's encode(): looks up the characters, then joins the best pair until none is left."""
    texts, scores, at = [], [], 4
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        texts.append(data[at + 8 : at + 8 + length])
        scores.append(score)
        at += 8 + length
    ids = {text: index for index, text in enumerate(texts)}

    def encode(text: str) -> list[int]:
        tokens = [ids[b" "]] if text else []
        for char in text:
            blob = char.encode()
            tokens += [ids[blob]] if blob in ids else [byte + 3 for byte in blob]
        while True:
            pairs = [ids.get(texts[left] + texts[right]) for left, right in itertools.pairwise(tokens)]
            best = max((scores[pair] for pair in pairs if pair is not None), default=-1e10)
            at = next((at for at, pair in enumerate(pairs) if pair is not None and scores[pair] == best), None)
            if at is None or best <= -1e10:
                return tokens
            tokens[at : at + 2] = [pair for pair in pairs[at : at + 1] if pair is not None]

    return encode


def varint(value: int) -> bytes:
    """A number in the encoding of protocol buffers."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def sentencepiece_file(
    pieces: Iterable[tuple[str, float, int]], trainer: bytes = b"", normalizer: bytes = b""
) -> bytes:
    """A SentencePiece model of pieces (text, score, type), with further fields of the trainer and the normalizer."""
    entries = [field(1, field(1, text.encode()) + field(2, score) + field(3, kind)) for text, score, kind in pieces]
    return b"".join(entries) + field(2, field(3, 2) + trainer) + field(3, field(4, 0) + normalizer)


SPM_PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((piece, 0.0, 6) for piece in BYTE_PIECES)]
SPM_PIECES += [("▁a", -1.0, 1), ("ab", -2.0, 1), ("▁ab", -3.0, 1), *((char, -9.0, 1) for char in "▁abc")]


def spm(tmp_path: Path, *args: Any, **kwargs: Any) -> Tokenizer:
    """The tokenizer of a SentencePiece model. The arguments are those of `sentencepiece_file`."""
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(*args, **kwargs))
    return Tokenizer.from_file(tmp_path)


# ---- texts that are hard to tokenize

ALPHABET = [
    chr(code) for code in (*range(0x20, 0x7F), *range(0xA0, 0x250), *range(0x400, 0x450), *range(0x4E00, 0x4E40))
]
ALPHABET += list("\t\n\r\0\u00ad\u0301\u200d\u2581\u3000\ufe0f\U0001f600\U0001f999")
RUNS = "-=.*_ wxf!'`)}/I\n"


def random_texts(count: int, words: Sequence[str]) -> Iterable[str]:
    """Texts of random words, of random characters, and of runs of equal characters."""
    rng = random.Random(1234)
    for _ in range(count):
        kind = rng.random()
        if kind < 0.35:
            yield "".join(rng.choice(words) for _ in range(rng.randrange(12)))
        elif kind < 0.65:
            yield "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(24)))
        else:
            yield "".join(
                rng.choice(RUNS) * rng.choice((1, 2, 3, 4, 5, 7, 16, 17, 40)) for _ in range(rng.randrange(5))
            )


# Texts at which pre-tokenizers split, or that are hard to split.
HARD = (
    "'s 'S 'RE 'll \u2019s 1 12 123 1234567 1,234.5 \u0664\u0665 x\u00b2 \u00bd \u2167 fooBar HTTPServer b_c ... ://\n "
    "e\u0301 \u0e01\u0e33 \u0915\u093f \u0627\u0651 \u05e9\u05dc \u200d \u202e \ufb01 \ufeff \x00 \u20ac \u00e9 \u00c9 "
    "\U0001f468\u200d\U0001f469 \U0001f3f3\ufe0f \u65e5\u672c \u3072\u3089 \u30ab\u30ca \ud55c\uad6d \uff0c \u3002"
)
NASTY = HARD.split(" ")
NASTY += [" ", "  ", "   ", " a", "\n", "\n\n", "\r\n", " \n ", "\t", "\u3000", "\u00a0", "\u0085"]
NASTY += "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def category_texts(count: int) -> list[str]:
    """Texts of characters of all Unicode categories, mixed with texts at which pre-tokenizers split."""
    rng = random.Random(5)
    categories: dict[str, list[str]] = {}
    for code in range(0x20, 0x30000):
        categories.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    categories = {name: chars for name, chars in categories.items() if name not in ("Cn", "Co", "Cs")}
    names = sorted(categories)
    return [
        "".join(
            rng.choice(NASTY) if rng.random() < 0.75 else rng.choice(categories[rng.choice(names)])
            for _ in range(rng.randint(1, 25))
        )
        for _ in range(count)
    ]


def vectors(data_dir: Path, name: str) -> list[tuple[str, list[int]]]:
    """llama.cpp's published test vectors of a vocabulary: (text, ids)."""
    stem = data_dir / "tokenizers" / f"ggml-vocab-{name}.gguf"
    texts = stem.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = stem.with_suffix(".gguf.out").read_text().splitlines()
    if texts[-1] == "":  # a separator after the last text
        texts.pop()
    assert len(texts) == len(lines) > 40
    return [(text, [int(word) for word in line.split()]) for text, line in zip(texts, lines, strict=True)]


def check_vectors(tokenizer: Tokenizer, cases: Sequence[tuple[str, list[int]]]) -> None:
    """Check that a tokenizer encodes and decodes test vectors."""
    for text, ids in cases:
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text


def spm_gguf(**changes: Any) -> list[tuple[str, Any]]:
    """Metadata of a SentencePiece vocabulary, as llama.cpp's converter writes LLaMA's."""
    pieces = [*SPM_PIECES, ("<|end|>", -1000.0, 3), ("[PAD267]", -1000.0, 2)]
    values = {
        "model": "llama",
        "tokens": ("[", "s", [text for text, _, _ in pieces]),
        "scores": ("[", "f", [score for _, score, _ in pieces]),
        "token_type": ("[", "i", [kind for _, _, kind in pieces]),
    }
    return [(f"tokenizer.ggml.{key}", value) for key, value in (values | changes).items() if value is not None]
