"""Text to token ids and back: the tokenizer that a model carries.

The canonical form is the text of a Hugging Face `tokenizer.json`; the library `tokenizers` encodes with it. What BOS,
EOS and the stop ids are is no part of that text: it is stored as numbers (`SpecialTokens`) and applied here, exactly
once. Decoding works on bytes, so that a stream of tokens never shows a broken UTF-8 character and loses none.

`tokenizers` is imported and the text parsed at the first use, not when a `Tokenizer` is made: 128k entries take 0.6 s.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import mmap
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llamac.arguments import file_path, whole_number, wrong_type
from llamac.errors import ArgumentError, LlamacError, TokenizerError, UnsupportedError
from llamac.sentencepiece_text import SentencePieceText, split_document
from llamac.tokenizer_json import check_structure, library_errors, without_names

if TYPE_CHECKING:
    from pathlib import Path

    import tokenizers

LONG_TEXT = 20_000  # characters from which other threads can run while a text is encoded, which takes some 10 ms
SPACE_MARK = "▁"  # SentencePiece writes a space as U+2581
BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")
WORD_PIECE_PREFIX = "##"  # of BERT's pieces that continue a word
# What the library's WordPiece decoder replaces in the text of each token, in this order.
_WORD_PIECE_CLEANUP = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m")),
    (" do not", " don't"),
    *((f" {ending}", ending) for ending in ("'s", "'ve", "'re")),
)


@dataclass(frozen=True)
class SpecialTokens:
    """The rules for special tokens as numbers; an id is None where the vocabulary has no such token.

    `add_bos` and `add_eos` say whether `Tokenizer.encode(add_special=True)` puts BOS in front and EOS behind.
    `stop_ids` are the tokens that end a generated text (EOS is usually one of them).
    """

    bos_id: int | None
    add_bos: bool
    add_eos: bool
    eos_id: int | None
    stop_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, wanted, token in (("add_bos", self.add_bos, self.bos_id), ("add_eos", self.add_eos, self.eos_id)):
            if wanted and token is None:
                raise TokenizerError(f"{name} is set, but the tokenizer has no {name[4:].upper()} token")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SpecialTokens:
        """The rules that a model file's config record holds, where -1 stands for no token."""
        return cls(
            bos_id=config["bos_id"] if config["bos_id"] >= 0 else None,
            add_bos=bool(config["add_bos"]),
            add_eos=bool(config["add_eos"]),
            eos_id=config["eos_id"] if config["eos_id"] >= 0 else None,
            stop_ids=tuple(config["stop_ids"][: config["n_stop_ids"]]),
        )


class DecodeRules(NamedTuple):
    """How pieces become bytes.

    `spaces` is the mark that stands for a space. `first`: what is special about the first token of a text, where
    encoding may have put a space: it loses a "space", all of its "marks", or it is "bare", the others being words."""

    # "bpe": byte-level alphabet; "spm": text, with <0xNN> pieces for bytes; "wpm": words and ##rests (BERT)
    kind: Literal["bpe", "spm", "wpm"]
    byte_fallback: bool = False
    spaces: str | None = None
    first: Literal["space", "marks", "bare"] | None = None
    rest_prefix: str | None = None  # of pieces that continue a word
    cleanup: bool = False  # no space in front of punctuation


def decode_rules(decoder: dict[str, Any] | None) -> DecodeRules:
    """The rules that the `decoder` of a tokenizer.json stands for; UnsupportedError names what is unknown here."""
    if decoder is None:
        return DecodeRules("wpm", first="bare")  # every token is a word
    steps: list[dict[str, Any]] = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodeRules("bpe")
    if kinds == ["WordPiece"]:
        prefix, cleanup = steps[0].get("prefix"), steps[0].get("cleanup")
        return DecodeRules("wpm", first="bare", rest_prefix=str(prefix), cleanup=bool(cleanup))
    byte_fallback, spaces = False, None
    first: Literal["space", "marks"] | None = None
    for step in steps:
        kind = step.get("type")
        if kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Replace" and (step.get("pattern"), step.get("content")) == ({"String": SPACE_MARK}, " "):
            spaces = SPACE_MARK
        elif kind == "Metaspace":
            spaces = str(step.get("replacement", SPACE_MARK))
            if step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True) is True:
                first = "marks"
        elif kind == "Strip" and (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0):
            first = "space"
        elif kind != "Fuse":
            raise UnsupportedError(f"the tokenizer's decoder {json.dumps(step)} is not supported")
    return DecodeRules("spm", byte_fallback, spaces, first)


def kind_of(data: bytes) -> str:
    """The kind of a tokenizer.json, "bpe", "spm" or "unknown": takes less time than making a tokenizer of it."""
    try:
        return decode_rules(json.loads(data).get("decoder")).kind
    except (LlamacError, ValueError, AttributeError, TypeError, RecursionError):
        return "unknown"


def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE (GPT-2) writes bytes as: printable Latin-1 as itself, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def resident_bytes() -> int:
    """Memory that this process holds now; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


class _Pieces:
    """The parsed tokenizer: the library's object, and the bytes of the tokens that have been asked for."""

    def __init__(self, data: bytes, special: SpecialTokens, where: str) -> None:
        before = resident_bytes()
        import tokenizers

        with library_errors(f"{where} cannot be used"):
            data, model = split_document(data)
            check_structure(data)
            library = tokenizers.Tokenizer.from_buffer(data)
            library.no_truncation()
            library.no_padding()
            self.added = library.get_added_tokens_decoder()
            self.model = None if model is None else SentencePieceText(model, self.added)
        self.library = library
        self.data = data
        self.lock = threading.Lock()
        self.plain: tokenizers.Tokenizer | None = None
        self.rules = decode_rules(json.loads(library.decoder.__getstate__()) if library.decoder else None)
        named = {token for token in (special.bos_id, special.eos_id) if token is not None}
        self.special = named | {token for token, added in self.added.items() if added.special}
        # Where none of these texts occurs, it does not matter whether special tokens are looked for.
        names = sorted(added.content for added in self.added.values() if added.special and not added.normalized)
        self.names = re.compile("|".join(map(re.escape, names))) if names else None
        self.normalized_names = any(added.special and added.normalized for added in self.added.values())
        self.size = _id_count(library)
        self.alphabet = byte_alphabet() if self.rules.kind == "bpe" else {}
        self.known: dict[int, bytes] = {}
        # Texts of tokens that are whole characters, for decoders that show special tokens (False) or skip them (True).
        self.texts: dict[bool, dict[int, str]] = {False: {}, True: {}}
        self.memory = max(0, resident_bytes() - before)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        if self.model is not None:
            return self.model.encode(text, parse_special)
        library = self.encoder(text, parse_special)
        if len(text) < LONG_TEXT:
            encoding = library.encode(text, add_special_tokens=False)
        else:  # the library lets go of the GIL for batches only
            encoding = library.encode_batch([text], add_special_tokens=False)[0]
        ids: list[int] = encoding.ids
        return ids

    def encoder(self, text: str, parse_special: bool) -> tokenizers.Tokenizer:
        """The library's object that encodes `text`. One that takes the names of special tokens for ordinary text is a
        second vocabulary in memory: it is made when a text first holds such a name."""
        if parse_special or not (self.normalized_names or (self.names is not None and self.names.search(text))):
            return self.library
        with self.lock:
            if self.plain is None:
                import tokenizers

                plain = tokenizers.Tokenizer.from_buffer(without_names(self.data, self.special))
                plain.no_truncation()
                plain.no_padding()
                plain.encode_special_tokens = True  # the library's name for "encode them as text"
                self.plain = plain
            return self.plain

    def token_bytes(self, token: int) -> bytes:
        if type(token) is not int:  # what equals a known id (True, 1.0) is none
            token = self.check(token)
        data = self.known.get(token)
        if data is None:
            data = self.known[token] = self._bytes(self.check(token))
        return data

    def shown_bytes(self, token: int, skip_special: bool) -> bytes:
        data = self.token_bytes(token)
        return b"" if skip_special and token in self.special else data

    def is_first(self, token: int, skip_special: bool) -> bool:
        """Whether a token begins a text of which nothing has been shown."""
        if skip_special and token in self.special:
            return False
        return bool(self.token_bytes(token)) or (self.rules.first != "space" and self._text(token) is not None)

    def first_bytes(self, token: int) -> bytes:
        """The bytes of a token that begins a text."""
        data = self.token_bytes(token)
        if self.rules.first == "space":
            return data.removeprefix(b" ")
        text = self._text(token)
        if self.rules.first == "bare" and text is not None:
            return self._clean(text).encode()
        if self.rules.first == "marks" and self.rules.spaces and text is not None:
            return text.replace(self.rules.spaces, "").encode()
        return data

    def check(self, token: int) -> int:
        number = whole_number(token, "a token id")
        if not 0 <= number < self.size:
            raise ArgumentError(f"token id {number} is out of range: this tokenizer has the ids 0 to {self.size - 1}")
        return number

    def _text(self, token: int) -> str | None:
        """The token as the vocabulary writes it; None for a hole between the ids."""
        added = self.added.get(token)  # for these the library may give the text as normalizing leaves it
        text: str | None = self.library.id_to_token(token) if added is None else added.content
        return text

    def _bytes(self, token: int) -> bytes:
        text, rules = self._text(token), self.rules
        if text is None:
            return b""
        if rules.kind == "bpe":
            alphabet = self.alphabet
            if token in self.added or not all(char in alphabet for char in text):
                return text.encode()  # added tokens are plain text
            return bytes([alphabet[char] for char in text])
        if rules.kind == "wpm":
            rest = text.removeprefix(rules.rest_prefix) if rules.rest_prefix else text
            return self._clean(rest if rest != text else " " + text).encode()
        if rules.byte_fallback and BYTE_PIECE.fullmatch(text):
            return bytes.fromhex(text[3:5])
        return (text.replace(rules.spaces, " ") if rules.spaces else text).encode()

    def _clean(self, text: str) -> str:
        for dirty, clean in _WORD_PIECE_CLEANUP if self.rules.cleanup else ():
            text = text.replace(dirty, clean)
        return text


def _id_count(library: tokenizers.Tokenizer) -> int:
    """One more than the highest id. Only a vocabulary with holes needs its whole table for that."""
    count = library.get_vocab_size()
    if count and library.id_to_token(count - 1) is not None and library.id_to_token(count) is None:
        return count
    return max(library.get_vocab().values(), default=-1) + 1


class Tokenizer:
    """Encodes text to token ids and decodes ids to text, as the model's own tokenizer does. Threads may share it."""

    def __init__(self, data: bytes, special: SpecialTokens, where: str = "the tokenizer.json text") -> None:
        self._data = data
        self._special = special
        self._where = where  # what errors name
        self._parsed: _Pieces | None = None
        self._lock = threading.Lock()

    @classmethod
    def from_json(cls, data: bytes | str, special: SpecialTokens) -> Tokenizer:
        """A tokenizer from the text of a tokenizer.json and the rules for its special tokens.

        The text is parsed at the first use; a TokenizerError about it comes then.
        """
        if isinstance(data, str):
            data = data.encode()
        if not isinstance(data, bytes):
            raise wrong_type("data", data, "the text of a tokenizer.json")
        if not isinstance(special, SpecialTokens):
            raise wrong_type("special", special, "SpecialTokens")
        return cls(data, special)

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Open any tokenizer: tokenizer.json, a SentencePiece tokenizer.model, vocab.json beside merges.txt, llama2.c's
        tokenizer.bin, a GGUF file (with or without weights), or a directory that holds one of these.

        BOS, EOS and stop rules come from the model's own files beside it. Raises TokenizerError, UnsupportedError or
        ModelError (GGUF) where the file is damaged or of a kind that cannot be represented exactly.
        """
        from llamac.export.vocabulary.load import load_vocabulary

        path = file_path(path, "path")
        vocabulary = load_vocabulary(path)
        return cls(vocabulary.json, vocabulary.special, f"{path}: the tokenizer")

    @property
    def _pieces(self) -> _Pieces:
        if self._parsed is None:
            with self._lock:
                if self._parsed is None:
                    self._parsed = _Pieces(self._data, self._special, self._where)
        return self._parsed

    @property
    def json(self) -> bytes:
        """The text of the tokenizer.json this was made from."""
        return self._data

    @property
    def memory(self) -> int:
        """Bytes by which the process grew when the vocabulary was built; 0 before, or if the system does not tell."""
        return self._parsed.memory if self._parsed is not None else 0

    @property
    def special(self) -> SpecialTokens:
        """The rules for BOS, EOS and stop tokens."""
        return self._special

    @property
    def special_names(self) -> tuple[str, ...]:
        """The names of the special tokens, the longest first."""
        names = {added.content for added in self._pieces.added.values() if added.special and added.content}
        return tuple(sorted(names, key=lambda name: (-len(name), name)))

    @property
    def kind(self) -> Literal["bpe", "spm", "wpm"]:
        """ "bpe": byte-level (GPT-2, Llama 3), "spm": SentencePiece's alphabet (Llama 2), "wpm": words (BERT)."""
        return self._pieces.rules.kind

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return int(self._pieces.library.get_vocab_size())

    @property
    def n_ids(self) -> int:
        """One more than the highest token id; greater than `vocab_size` where the ids have holes."""
        return self._pieces.size

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """The token ids of `text`.

        `add_special` puts BOS in front and EOS behind as far as the model wants them, but never where one already is.
        `parse_special`: names of special tokens within the text become those tokens; otherwise they are text like any
        other, and no text can pass for one. Tokens that are added but not special are found in both cases.
        Raises ArgumentError for a text that cannot be written as UTF-8.
        """
        if not isinstance(text, str):
            raise wrong_type("text", text, "a str")
        pieces = self._pieces
        try:
            with library_errors("the tokenizer cannot encode this text"):
                ids = pieces.encode(text, parse_special)
        except TokenizerError:
            if not _is_unicode(text):
                raise ArgumentError("text holds a lone surrogate, which is no character") from None
            raise
        if add_special:
            special = self._special
            if special.add_bos and special.bos_id is not None and ids[:1] != [special.bos_id]:
                ids.insert(0, special.bos_id)
            if special.add_eos and special.eos_id is not None and ids[-1:] != [special.eos_id]:
                ids.append(special.eos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, start: bool = True) -> str:
        """The text of `ids`: what a fresh `decoder` with the same arguments gives, all at once.

        Bytes that are no UTF-8 become U+FFFD; `token_bytes` gives them as they are. Raises ArgumentError for an id that
        does not exist.
        """
        if not isinstance(ids, Iterable):
            raise wrong_type("ids", ids, "token ids")
        pieces = self._pieces
        tokens = list(ids)
        shown = [pieces.shown_bytes(token, skip_special) for token in tokens]
        if start and pieces.rules.first:
            first = next((at for at, token in enumerate(tokens) if pieces.is_first(token, skip_special)), None)
            if first is not None:
                shown[first] = pieces.first_bytes(tokens[first])
        return b"".join(shown).decode("utf-8", "replace")

    def decoder(self, *, skip_special: bool = True, start: bool = True) -> StreamDecoder:
        """A decoder for tokens that come one by one. `start=False` continues a text (a prompt) that has been shown: the
        space that SentencePiece puts in front of a text is then a real one and stays."""
        return StreamDecoder(self._pieces, skip_special, start)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a special token gives its name. ArgumentError if there is no such id."""
        return self._pieces.token_bytes(token)

    def id_of(self, token_text: str) -> int | None:
        """The id of the token written `token_text` in the vocabulary (spaces as `▁` or `Ġ`), or None."""
        if not isinstance(token_text, str):
            raise wrong_type("token_text", token_text, "a str")
        found: int | None = self._pieces.library.token_to_id(token_text) if _is_unicode(token_text) else None
        return found


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class StreamDecoder:
    """Turns token ids into text one at a time. A character whose bytes span tokens appears with its last one.

    What `push` returned, put together and followed by `flush`, is `Tokenizer.decode` of all the ids.
    """

    __slots__ = ("_first", "_pieces", "_plain", "_skip_special", "_texts", "_utf8")

    def __init__(self, pieces: _Pieces, skip_special: bool, start: bool) -> None:
        self._pieces = pieces
        self._skip_special = skip_special
        self._texts = pieces.texts[skip_special]
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = start and pieces.rules.first is not None  # the first token is still to come, and is special
        self._plain = not self._first  # nothing to drop and no bytes held back: a token's own text can be shown

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        if self._plain:
            text = self._texts.get(token)
            if text is not None and type(token) is int:
                return text
        return self._push_bytes(token)

    def _push_bytes(self, token: int) -> str:
        data = self._pieces.shown_bytes(token, self._skip_special)
        if self._plain:
            with contextlib.suppress(UnicodeDecodeError):
                self._texts[token] = data.decode()
        elif self._first and self._pieces.is_first(token, self._skip_special):
            self._first = False
            data = self._pieces.first_bytes(token)
        text = self._utf8.decode(data)
        self._plain = not self._first and not self._utf8.getstate()[0]
        return text

    def flush(self) -> str:
        """The text of the bytes held back, at the end of a stream: U+FFFD for an unfinished character."""
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        self._plain = not self._first
        return text
