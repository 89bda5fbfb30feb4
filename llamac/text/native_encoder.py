"""Encodes text with the core's byte pair encoding, as the library `tokenizers` does with the same tokenizer.json.

It needs no construction beyond the core's hash tables, and takes n log n time at most for every text. It supports BPE
with the steps of known models; `native_encoder` returns None for any other tokenizer, which the library then runs. The
library also splits text into words where a tokenizer has regular expressions, with an object that has no vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from llamac import _core
from llamac.errors import UnsupportedError
from llamac.text.chat_runs import SpecialNames
from llamac.text.encoding import BATCH_CHARACTERS, added_tokens, encode_with
from llamac.text.headroom import require_memory
from llamac.text.tokenizer_json import steps

SPECIAL, LSTRIP, RSTRIP = 1, 2, 4  # flags of csrc/vocab.h
MAX_NAME_BYTES = 256
NFC_UNCHANGED = "\u0300"  # text of characters below this is in normal form C
# Steps that only split words; the library runs them.
_SPLITTING = ("Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts")
_REMOVING = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts")  # they drop the spaces
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of a ByteLevel step

Normalize = Callable[[str], str]
# Splits or changes words; the flag says whether the first of them begins the text.
Step = Callable[[list[str], bool], list[str]]
Part = tuple[str, int, int, int]  # a part of a text, its added token or -1, where it starts and ends, in bytes


class NativeEncoder:
    """Encodes with one tokenizer. Threads can share it. `native_encoder` creates it.

    Attributes:
        added: The strings of the added tokens by id.
        special: The ids of the added tokens that are special.
    """

    def __init__(
        self,
        document: dict[str, Any],
        vocabulary: _core.Vocabulary,
        bos_eos: Collection[int],
        find_spans: Callable[[str], list[tuple[int, int]]],
    ) -> None:
        """
        Args:
            document: A tokenizer.json; its vocabulary and merges are not read.
            vocabulary: The vocabulary.
            bos_eos: The ids of BOS and EOS.
            find_spans: The library's `special_spans`, for the few tokenizers that need it.

        Raises:
            UnsupportedError: If it is not supported.
        """
        self.vocabulary = vocabulary
        self._find_spans = find_spans
        self._model = model = document["model"]
        _check_model(model)
        _check_decoder(document.get("decoder"))
        self._normalize = _normalizer(document.get("normalizer"))
        self._byte_level, self._steps = _pre_tokenizer(document)
        entries = _added_entries(document, vocabulary)
        self.added = {token: entry["content"] for token, entry in entries}
        self.special = frozenset(token for token, entry in entries if entry["special"])
        self.ids = {text: token for token, text in self.added.items()}
        self._names = _names_found_by_text(self, bos_eos)
        if model.get("byte_fallback") and any(name.startswith("<0x") for name in self._names):
            raise UnsupportedError("a special token that is a byte is not supported")
        self._search = SpecialNames(sorted(self._names))
        self._normalized_special = any(entry["special"] and entry["normalized"] for _, entry in entries)
        unknown = model.get("unk_token")
        self._special_ids = (self.special | frozenset(bos_eos)) - {self.id_of(unknown or "")}
        self._full = _Mode(self, entries, frozenset())
        self._plain: _Mode | None = None if self._names else self._full
        self._entries = entries

    def id_of(self, text: str) -> int | None:
        """The id of a string in the vocabulary or among the added tokens."""
        token = self.ids.get(text)
        return self.vocabulary.find(text) if token is None else token

    @property
    def reads_other_spellings(self) -> bool:
        """As `encoding.reads_other_spellings`."""
        return (self._normalized_special and self._normalize is not None) or bool(self._names)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Encode text. With `parse_special`, names of special tokens in it become those tokens."""
        if parse_special:
            return self._run(text, self._full, False)
        if self._plain is None and not self._normalized_special and next(self._search.find(text), None) is None:
            ids = self._run(text, self._full, False)
            if self._special_ids.isdisjoint(ids):
                return ids
        if self._plain is None:
            self._plain = _Mode(self, self._entries, frozenset(self._names))
        return self._run(text, self._plain, True)

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        """Find each part of the text that `encode` with `parse_special` turns into a special token, as (start, end)."""
        if self._normalize is not None or not self._byte_level:
            return self._find_spans(text)
        mode, spans, at = self._full, [], 0
        for part, token, start, _ in mode.outer(text, False):
            if token >= 0:
                spans += [(at, at + len(part))] if token in self._special_ids else []
            else:
                spans += self._spans_in_part(part, start == 0, at)
            at += len(part)
        return spans

    def _spans_in_part(self, part: str, is_first: bool, at: int) -> list[tuple[int, int]]:
        spans = []
        for inner, token, start, _ in self._full.inner(part, False):
            if token >= 0:
                spans += [(at, at + len(inner))] if token in self._special_ids else []
            elif self._names and not self._special_ids.isdisjoint(self._encode(inner, self._full, is_first)):
                spans += self._find_spans_in_words(inner, is_first and start == 0, at)
            at += len(inner)
        return spans

    def _find_spans_in_words(self, text: str, is_first: bool, at: int) -> list[tuple[int, int]]:
        """The special tokens that the model forms. Words are in the alphabet of byte-level BPE, a character a byte."""
        spans = []
        for word in self._words(text, is_first):
            ids = self._full.bpe.encode([word])
            if not self._special_ids.isdisjoint(ids):
                data, start = word.encode(), 0
                for token in ids:
                    end = start + len(self.vocabulary.text(token) or "")
                    if token in self._special_ids:
                        first = at + len(data[:start].decode(errors="ignore"))
                        spans.append((first, first + len(data[start:end].decode(errors="ignore"))))
                    start = end
            at += len(word)
        return spans

    def _run(self, text: str, mode: _Mode, skip_special: bool) -> list[int]:
        ids: list[int] = []
        for part, token, start, _ in mode.outer(text, skip_special):
            if token >= 0:
                ids.append(token)
                continue
            if self._normalize is not None:
                part = self._normalize(part)
            for inner, inner_token, inner_start, _ in mode.inner(part, skip_special):
                if inner_token >= 0:
                    ids.append(inner_token)
                else:
                    ids += self._encode(inner, mode, start == 0 and inner_start == 0)
        return ids

    def _encode(self, text: str, mode: _Mode, is_first: bool) -> list[int]:
        return mode.bpe.encode(self._words(text, is_first))

    def _words(self, text: str, is_first: bool) -> list[str]:
        words = [text]
        for step in self._steps:
            words = step(words, is_first)
        return words


class _Mode:
    """What text can become: all tokens, or those that are not special and not `hidden`."""

    def __init__(self, encoder: NativeEncoder, entries: list[tuple[int, dict[str, Any]]], hidden: frozenset[str]):
        model, vocabulary = encoder._model, encoder.vocabulary
        flags = None
        if hidden:
            marks = bytearray(len(vocabulary))
            for name in hidden:
                token = vocabulary.find(name)
                if token is not None:
                    marks[token] = 1
            flags = bytes(marks)
        unknown = model.get("unk_token")
        if unknown is not None and vocabulary.find(unknown) is None:
            raise UnsupportedError("the unknown token is not in the vocabulary")
        self.bpe = _core.Bpe(
            vocabulary,
            byte_level=encoder._byte_level,
            byte_fallback=bool(model.get("byte_fallback")),
            ignore_merges=bool(model.get("ignore_merges")),
            fuse_unknown=bool(model.get("fuse_unk")),
            unknown=None if unknown is None else vocabulary.find(unknown),
            hidden=flags,
        )
        shown = [(token, entry) for token, entry in entries if entry["content"] not in hidden]
        self._outer = _finder([(t, e, e["content"]) for t, e in shown if not e["normalized"]])
        normalize = encoder._normalize or str
        self._inner = _finder([(t, e, normalize(e["content"])) for t, e in shown if e["normalized"]])

    def outer(self, text: str, skip_special: bool) -> list[Part]:
        """Split a text at the added tokens that are found before normalization."""
        return _split(self._outer, text, skip_special)

    def inner(self, text: str, skip_special: bool) -> list[Part]:
        """Split a normalized part at the other added tokens."""
        return _split(self._inner, text, skip_special)


_Finder = tuple[_core.AddedTokens, list[int]]


def _finder(tokens: list[tuple[int, dict[str, Any], str]]) -> _Finder | None:
    """Prepare the search for added tokens, given as (id, entry, string to look for)."""
    if not tokens:
        return None
    named = sorted((text.encode(), token, entry) for token, entry, text in tokens)
    names = [name for name, _, _ in named]
    if len(set(names)) < len(names) or not all(0 < len(name) <= MAX_NAME_BYTES for name in names):
        raise UnsupportedError("two added tokens are equal after normalization, or one is empty or too long")
    flags = bytes(
        SPECIAL * entry["special"] + LSTRIP * entry["lstrip"] + RSTRIP * entry["rstrip"] for _, _, entry in named
    )
    return _core.AddedTokens(names, flags), [token for _, token, _ in named]


def _split(finder: _Finder | None, text: str, skip_special: bool) -> list[Part]:
    if finder is None:
        return [(text, -1, 0, len(text))] if text else []
    search, tokens = finder
    parts = search.split(text, skip_special)
    if len(parts) == 1 and parts[0][1] < 0:
        return parts
    return [(part, tokens[index] if index >= 0 else -1, start, end) for part, index, start, end in parts]


def native_encoder(
    document: dict[str, Any],
    vocabulary: _core.Vocabulary,
    bos_eos: Collection[int],
    find_spans: Callable[[str], list[tuple[int, int]]],
) -> NativeEncoder | None:
    """Build an encoder (`NativeEncoder`), or return None if the core does not support the tokenizer."""
    try:
        return NativeEncoder(document, vocabulary, bos_eos, find_spans)
    except UnsupportedError:
        return None


# ---- the parts of a tokenizer.json


def _added_entries(document: dict[str, Any], vocabulary: _core.Vocabulary) -> list[tuple[int, dict[str, Any]]]:
    """The added tokens with the ids that the library gives them."""
    entries: list[tuple[int, dict[str, Any]]] = []
    size = vocabulary.n_strings
    next_id, seen = size, set()
    for entry in added_tokens(document):
        text = entry["content"]
        if not text or text in seen or entry["single_word"]:
            raise UnsupportedError("an added token is empty, occurs twice, or matches whole words only")
        seen.add(text)
        try:
            token = vocabulary.find(text)
        except UnicodeEncodeError:
            raise UnsupportedError("an added token has a lone surrogate") from None
        if token is None:
            token = next_id
        next_id = max(next_id, token + 1)
        entries.append((token, entry))
    if len({token for token, _ in entries}) < len(entries) or any(
        token < len(vocabulary) and vocabulary.text(token) not in (None, entry["content"]) for token, entry in entries
    ):
        raise UnsupportedError("two tokens have the same id")
    return entries


def _names_found_by_text(encoder: NativeEncoder, bos_eos: Collection[int]) -> set[str]:
    """As `encoding._names_found_by_text`."""
    vocabulary, formed, names = encoder.vocabulary, set(), set()
    for token in {*encoder.special, *bos_eos}:
        text = vocabulary.text(token)
        if text is None:
            continue
        is_formed, is_joined = vocabulary.merge_roles(token)
        if is_formed and token in encoder.special:
            formed.add(text)
        if encoder._model.get("ignore_merges") and not (is_formed or is_joined):
            names.add(text)
    return names | formed


def _normalizer(node: dict[str, Any] | None) -> Normalize | None:
    """The function that normalizes a text, or None if there is nothing to do."""
    functions = []
    for step in steps(node):
        kind, pattern, content = step.get("type"), step.get("pattern"), step.get("content")
        if kind == "Prepend" and isinstance(step.get("prepend"), str):
            functions.append(_prepend(step["prepend"]))
        elif kind == "Replace" and isinstance(pattern, dict) and pattern.get("String") and isinstance(content, str):
            functions.append(_replace(pattern["String"], content))
        elif kind == "NFC":
            functions.append(_compose)
        else:
            raise UnsupportedError(f"the normalizer {kind} is not supported")
    if not functions:
        return None

    def normalize(text: str) -> str:
        for function in functions:
            text = function(text)
        return text

    return normalize


def _prepend(prefix: str) -> Normalize:
    return lambda text: prefix + text if text else text


def _replace(old: str, new: str) -> Normalize:
    return lambda text: text.replace(old, new)


def _compose(text: str) -> str:
    """Unicode normal form C, as the library defines it."""
    if text.isascii() or max(text) < NFC_UNCHANGED:
        return text
    from tokenizers import normalizers

    require_memory((1 << 20) + 256 * len(text), "encoding this text")
    composed: str = normalizers.NFC().normalize_str(text)
    return composed


def _pre_tokenizer(document: dict[str, Any]) -> tuple[bool, list[Step]]:
    """Whether words are encoded as bytes, and the steps that make words."""
    nodes = list(steps(document.get("pre_tokenizer")))
    byte_level = bool(nodes) and nodes[-1].get("type") == "ByteLevel"
    made: list[Step] = []
    while nodes and nodes[0].get("type") != "ByteLevel":
        count = next((i for i, node in enumerate(nodes) if node.get("type") not in _SPLITTING), len(nodes))
        if count:
            made.append(_library_step(nodes[:count]))
            del nodes[:count]
        else:
            made.append(_metaspace(nodes.pop(0), document))
    if nodes:
        if len(nodes) > 1 or document["model"].get("byte_fallback"):
            raise UnsupportedError("a step after ByteLevel, or byte pieces for bytes, is not supported")
        if nodes[0].get("add_prefix_space", True):
            made.append(lambda words, _: [word if word.startswith(" ") else " " + word for word in words])
        if nodes[0].get("use_regex", True):
            made.append(_library_step([{**_ISOLATED, "pattern": {"Regex": _GPT2}}]))
    return byte_level, made


_ISOLATED = {"type": "Split", "behavior": "Isolated", "invert": False}


def _metaspace(node: dict[str, Any], document: dict[str, Any]) -> Step:
    scheme, mark = node.get("prepend_scheme"), node.get("replacement")
    supported = node.get("type") == "Metaspace" and node.get("split") is False and "add_prefix_space" not in node
    if not supported or scheme not in ("always", "first", "never") or not isinstance(mark, str) or len(mark) != 1:
        raise UnsupportedError(f"the pre-tokenizer {node.get('type')} is not supported")
    if scheme == "first" and (document.get("normalizer") is not None or _removes(document["pre_tokenizer"])):
        raise UnsupportedError("a prefix of the first word, if it may not begin the text, is not supported")

    def step(words: list[str], is_first: bool) -> list[str]:
        words = [word.replace(" ", mark) for word in words]
        if scheme == "always":
            return [word if word.startswith(mark) else mark + word for word in words]
        if scheme == "first" and is_first and words and not words[0].startswith(mark):
            words[0] = mark + words[0]
        return words

    return step


def _removes(node: dict[str, Any]) -> bool:
    """Whether a step can remove the beginning of the text, so that the first word does not begin it."""
    return any(step.get("type") in _REMOVING or step.get("behavior") == "Removed" for step in steps(node))


def _library_step(nodes: list[dict[str, Any]]) -> Step:
    """Splits words with the library: an object without a vocabulary, for which every word is unknown."""
    shell = {
        "version": "1.0",
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": nodes},
        "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
    }
    import tokenizers

    library = tokenizers.Tokenizer.from_str(json.dumps(shell))

    def split(word: str) -> list[str]:
        if len(word) < BATCH_CHARACTERS:
            require_memory((1 << 20) + 256 * len(word), "encoding this text")
            return [text for text, _ in library.pre_tokenizer.pre_tokenize_str(word)]
        return [word[start:end] for start, end in encode_with(library, word).offsets]

    def step(words: list[str], _: bool) -> list[str]:
        return split(words[0]) if len(words) == 1 else [part for word in words for part in split(word)]

    return step


def _check_model(model: dict[str, Any]) -> None:
    affixes = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
    if any(model.get(name) for name in affixes) or not isinstance(model.get("unk_token"), (str, type(None))):
        raise UnsupportedError("the model's options are not supported")


def _check_decoder(node: dict[str, Any] | None) -> None:
    """Check that the decoder needs no library to fill in defaults or to find errors."""
    nodes = node.get("decoders") if isinstance(node, dict) and node.get("type") == "Sequence" else [node]
    known = ("ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip")
    if not isinstance(nodes, list) or not all(isinstance(each, dict) and each.get("type") in known for each in nodes):
        raise UnsupportedError("the decoder is not supported")
