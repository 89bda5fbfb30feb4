"""The tokenizer: converts text to token ids and back.

The canonical form is a Hugging Face `tokenizer.json`. It does not contain the rules for BOS, EOS and stop ids. They are
stored as numbers (`SpecialTokens`) and applied only here.

A tokenizer is parsed on first use, not when it is created. The core encodes with the tokenizers of most models
(native_encoder.py), the library tokenizers with the others.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from llamac.arguments import StrPath, file_path, to_int, wrong_type
from llamac.errors import ArgumentError, ArgumentTypeError, ContextFullError, TokenizerError
from llamac.interrupt import in_main_thread, interruptible
from llamac.text.decoding import StreamDecoder, TokenTexts, decode_rules
from llamac.text.encoding import Encoder, make_encoder, reads_other_spellings
from llamac.text.encoding_cost import cost_problem, make_linear
from llamac.text.native_encoder import NativeEncoder, native_encoder
from llamac.text.packed import is_packed, join, rest_of, tables, unpack, vocabulary_of
from llamac.text.special_tokens import SpecialTokens
from llamac.text.token_counts import token_bound
from llamac.text.token_index import TokenIndex
from llamac.text.tokenizer_json import check_counts, check_structure, library_errors, parse_document

if TYPE_CHECKING:
    from llamac.text.isolated_encoder import IsolatedEncoder
    from llamac.text.sentencepiece_text import SentencePieceEncoder

Result = TypeVar("Result")

LONG_TEXT = 20_000  # characters from which Ctrl-C can interrupt encoding; they take 10 ms


class _Parsed:
    """A parsed tokenizer."""

    def __init__(self, data: bytes, special: SpecialTokens, source: str) -> None:
        before = resident_bytes()
        named = {token for token in (special.bos_id, special.eos_id) if token is not None}
        self._lock = threading.Lock()
        self._library_encoder: Encoder | None = None
        with library_errors(f"{source}: the tokenizer cannot be used"):
            native = self._native(data, named)
            if native is None:
                self._use_library(data, named)
        self.memory = max(0, resident_bytes() - before)

    def _native(self, data: bytes, named: set[int]) -> NativeEncoder | None:
        """Use the core's encoder. Returns None, without setting anything, if it does not support the tokenizer."""
        if is_packed(data):
            document, vocabulary = rest_of(data), vocabulary_of(data)
            check_counts(len(vocabulary), vocabulary.n_merges)
        else:
            document = parse_document(data, "its tokenizer.json")
            check_structure(document)
            found = tables(document)
            if found is None:
                return None
            document = {**document, "model": {**document["model"], "vocab": {}, "merges": []}}
            try:
                vocabulary = vocabulary_of(join(b"", *found))
            except TokenizerError:  # the library decides whether the tokenizer is damaged
                return None
        check_structure(document)
        make_linear(document)
        if cost_problem(document):
            return None

        def find_spans(text: str) -> list[tuple[int, int]]:
            with self._lock:
                if self._library_encoder is None:
                    whole = parse_document(data, "its tokenizer.json")
                    make_linear(whole)
                    self._library_encoder = Encoder(whole, data, named)
            return self._library_encoder.special_spans(text)

        native = native_encoder(document, vocabulary, named, find_spans)
        if native is None:
            return None
        self.encoder: Encoder | SentencePieceEncoder | IsolatedEncoder | NativeEncoder = native
        self.bound = token_bound(document, vocabulary)
        self.reads_other_spellings = native.reads_other_spellings
        self.special_texts = {native.added[token] for token in native.special}
        self.vocab_size = vocabulary.n_strings + sum(vocabulary.text(token) is None for token in native.added)
        self.id_of: Callable[[str], int | None] = native.id_of
        self.texts = TokenTexts(
            decode_rules(document.get("decoder")),
            native.added,
            frozenset(named | native.special),
            max([len(vocabulary), *(token + 1 for token in native.added)]),
            vocabulary.text,
        )
        return native

    def _use_library(self, data: bytes, named: set[int]) -> None:
        document = parse_document(data, "its tokenizer.json")
        check_structure(document)
        make_linear(document)
        self.encoder = _make_encoder(document, data, named)
        self.bound = token_bound(document)
        self.reads_other_spellings = reads_other_spellings(document, named)
        library = self.encoder.library
        added = library.get_added_tokens_decoder()
        self.special_texts = {entry.content for entry in added.values() if entry.special and entry.content}
        self.vocab_size = int(library.get_vocab_size())
        self.id_of = library.token_to_id
        self.texts = TokenTexts(
            decode_rules(json.loads(library.decoder.__getstate__()) if library.decoder else None),
            {token: entry.content for token, entry in added.items()},
            frozenset(named | {token for token, entry in added.items() if entry.special}),
            _id_count(library),
            library.id_to_token,
        )


def _make_encoder(
    document: dict[str, Any], data: bytes, special: set[int]
) -> Encoder | SentencePieceEncoder | IsolatedEncoder:
    if not cost_problem(document):
        return make_encoder(document, data, special)
    from llamac.text.isolated_encoder import IsolatedEncoder  # imports `subprocess`, which few tokenizers need

    return IsolatedEncoder(document, data, special)


def resident_bytes() -> int:
    """The memory of this process; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def _id_count(library: Any) -> int:
    """One more than the highest id. Reads the whole vocabulary only if its ids have gaps."""
    count: int = library.get_vocab_size()
    if count and library.id_to_token(count - 1) is not None and library.id_to_token(count) is None:
        return count
    return max(library.get_vocab().values(), default=-1) + 1


class Tokenizer:
    """Encodes text to token ids and decodes ids to text, as the model's own tokenizer does.

    `from_file` and `from_json` create one. It is immutable, and threads can share it. Pickling stores the path if the
    tokenizer was read from a file, else the whole tokenizer.json.
    """

    _data: bytes
    _special: SpecialTokens
    _source: str  # its name in error messages
    _path: str | None
    _parsed: _Parsed | None
    _lock: threading.Lock
    table_bytes: int  # of tables that guides and banned strings have made from its tokens

    def __init__(self, *_: object, **__: object) -> None:
        raise ArgumentTypeError("use Tokenizer.from_file(path) or Tokenizer.from_json(data, special)")

    @classmethod
    def _create(cls, data: bytes, special: SpecialTokens, source: str, path: str | None) -> Tokenizer:
        self = cls.__new__(cls)
        self._data, self._special, self._source, self._path = data, special, source, path
        self._parsed = None
        self._lock = threading.Lock()
        self.table_bytes = 0
        return self

    @classmethod
    def from_json(cls, data: bytes | str, special: SpecialTokens, *, source: str = "tokenizer.json") -> Tokenizer:
        """Create a tokenizer from the text of a tokenizer.json.

        The text is parsed on first use. If it is damaged, TokenizerError is raised then.

        Args:
            data: The text, or the packed form that a model file stores.
            special: The rules for its special tokens.
            source: Its name in error messages.

        Raises:
            ArgumentTypeError: If an argument has the wrong type.
        """
        if isinstance(data, str):
            data = data.encode()
        if not isinstance(data, bytes):
            raise wrong_type("data", data, "the text of a tokenizer.json")
        if not isinstance(special, SpecialTokens):
            raise wrong_type("special", special, "SpecialTokens")
        return cls._create(data, special, source, None)

    @classmethod
    def from_file(cls, path: StrPath) -> Tokenizer:
        """Read a tokenizer of any kind.

        Args:
            path: A tokenizer.json, a SentencePiece tokenizer.model, a vocab.json next to a merges.txt, llama2.c's
                tokenizer.bin, a GGUF file (with or without weights), or a directory with one of these. The rules for
                BOS, EOS and stop tokens come from the model's other files in the same directory.

        Raises:
            TokenizerError: If the file is damaged, or cannot be represented exactly.
            UnsupportedError: If the kind of tokenizer is unknown.
            ModelError: If a GGUF file is damaged.
            OSError: If the file cannot be read.
        """
        from llamac.text.vocabulary.load import load_vocabulary

        path = file_path(path, "path")
        vocabulary = load_vocabulary(path)
        return cls._create(vocabulary.data, vocabulary.special, str(path), os.path.abspath(path))

    def _with_special(self, special: SpecialTokens) -> Tokenizer:
        """The same tokenizer with other rules. Shares the parsed tables if BOS and EOS are the same."""
        changed = self._create(self._data, special, self._source, self._path)
        if (special.bos_id, special.eos_id) == (self._special.bos_id, self._special.eos_id):
            changed._parsed = self._parsed
        return changed

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is not None:
            return Tokenizer.from_file, (self._path,)
        return partial(Tokenizer.from_json, source=self._source), (self._data, self._special)

    def __repr__(self) -> str:
        facts = f"{self.kind}, {self.n_ids} ids" if self._parsed else f"{len(self._data)} bytes, not parsed yet"
        return f"<llamac.Tokenizer {self._path or self._source}: {facts}>"

    @property
    def _loaded(self) -> _Parsed:
        if self._parsed is None:
            with self._lock:
                if self._parsed is None:
                    self._parsed = _Parsed(self._data, self._special, self._source)
        return self._parsed

    @property
    def json(self) -> bytes:
        """The text of the tokenizer.json."""
        return unpack(self._data)

    @property
    def memory(self) -> int:
        """Bytes by which the process grew when it parsed the tokenizer; 0 before
        that, or if the system does not report it."""
        return self._parsed.memory if self._parsed is not None else 0

    @property
    def special(self) -> SpecialTokens:
        """The rules for BOS, EOS and stop tokens."""
        return self._special

    @property
    def special_names(self) -> tuple[str, ...]:
        """The names of the special tokens, the longest first."""
        return tuple(sorted(self._loaded.special_texts, key=lambda name: (-len(name), name)))

    @property
    def reads_other_spellings(self) -> bool:
        """Whether normalization can turn a text into a special token although the text does not contain its name."""
        return self._loaded.reads_other_spellings

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        """Find each part of the text that `encode` with `parse_special` turns into a special token, as (start, end)."""
        encoder = self._loaded.encoder
        return self._guarded(text, lambda: encoder.special_spans(text))

    @property
    def kind(self) -> Literal["bpe", "spm", "wpm"]:
        """ "bpe": byte-level (GPT-2, Llama 3), "spm": SentencePiece's alphabet (Llama 2), "wpm": words (BERT)."""
        return self._loaded.texts.rules.kind

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return self._loaded.vocab_size

    @functools.cached_property
    def _token_index(self) -> TokenIndex:
        """Finds tokens by their bytes. Built on first use: 0.2 s for 128,000 tokens."""
        before = resident_bytes()
        index = TokenIndex(self._loaded.texts)
        self.table_bytes += max(0, resident_bytes() - before)
        return index

    @property
    def n_ids(self) -> int:
        """One more than the highest token id; greater than `vocab_size` if some ids are unused."""
        return self._loaded.texts.id_count

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = False, limit: int | None = None
    ) -> list[int]:
        """Encode text as token ids. Ctrl-C interrupts the encoding of long text.

        Args:
            text: Any str without lone surrogates.
            add_special: Put BOS before the text and EOS after it if the model's rules say so, unless they are already
                there.
            parse_special: Turn the names of special tokens in the text into those tokens. Otherwise they are ordinary
                text, and no text becomes a special token. Added tokens that are not special are found in either case.
            limit: The largest number of ids. A text that certainly has more (see `min_tokens`) is not encoded at all.

        Raises:
            ArgumentError: If the text contains a lone surrogate.
            ContextFullError: If there are more than `limit` ids.
            TokenizerError: If the tokenizer is damaged or cannot encode the text.
        """
        if not isinstance(text, str):
            raise wrong_type("text", text, "a str")
        if limit is not None and (limit := to_int(limit, "limit")) < 0:
            raise ArgumentError(f"limit is {limit}, expected 0 or more")
        loaded = self._loaded
        if limit is not None and (least := loaded.bound.least(text)) > limit:
            raise ContextFullError(f"the text has at least {least} tokens, the limit is {limit}")
        ids = self._guarded(text, lambda: loaded.encoder.encode(text, parse_special))
        if add_special:
            special = self._special
            if special.add_bos and special.bos_id is not None and ids[:1] != [special.bos_id]:
                ids[:0] = special.front
            if special.add_eos and special.eos_id is not None and ids[-1:] != [special.eos_id]:
                ids.append(special.eos_id)
        if limit is not None and len(ids) > limit:
            raise ContextFullError(f"the text has {len(ids)} tokens, the limit is {limit}")
        return ids

    def _guarded(self, text: str, call: Callable[[], Result]) -> Result:
        """Run a call that encodes `text`. Ctrl-C interrupts it if the text is long."""
        try:
            with library_errors(f"{self._source}: the tokenizer cannot encode this text"):
                if len(text) < LONG_TEXT or not in_main_thread():
                    return call()
                return interruptible(call, None)
        except TokenizerError:
            if not _is_unicode(text):
                raise ArgumentError("text contains a lone surrogate, which is not a character") from None
            raise

    def min_tokens(self, text: str) -> int:
        """Compute a lower bound for the number of ids in `encode(text)`, without encoding.

        It is the size of the text divided by the size of the longest token. It is 0 for tokenizers that can drop
        characters or replace many of them with one token (WordPiece, unigram models that collapse spaces).
        """
        if not isinstance(text, str):
            raise wrong_type("text", text, "a str")
        return self._loaded.bound.least(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, start: bool = True) -> str:
        """Decode token ids to text, as a new `decoder` with the same arguments does.

        Bytes that are not UTF-8 become U+FFFD; `token_bytes` returns them unchanged.

        Args:
            ids: Token ids.
            skip_special: Leave out special tokens.
            start: Whether the ids begin the text, as for `decoder`.

        Raises:
            ArgumentError: If an id does not exist.
        """
        if not isinstance(ids, Iterable):
            raise wrong_type("ids", ids, "token ids")
        texts = self._loaded.texts
        tokens = list(ids)
        shown = [texts.shown_bytes(token, skip_special) for token in tokens]
        if start and texts.rules.first:
            first = next((at for at, token in enumerate(tokens) if texts.is_first(token, skip_special)), None)
            if first is not None:
                shown[first] = texts.first_bytes(tokens[first])
        return b"".join(shown).decode("utf-8", "replace")

    def decoder(self, *, skip_special: bool = True, start: bool = True) -> StreamDecoder:
        """Create a decoder for tokens that arrive one at a time.

        Args:
            skip_special: Leave out special tokens.
            start: Whether the ids begin the text. If so, the decoder drops the space that SentencePiece puts there.
                False continues text that has been shown, such as a prompt.
        """
        return StreamDecoder(self._loaded.texts, skip_special, start)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, or the name of a special token.

        Raises:
            ArgumentError: If the id does not exist.
        """
        return self._loaded.texts.bytes_of(token)

    def is_special(self, token: int) -> bool:
        """Whether a token is special, so that texts do not show it."""
        return token in self._loaded.texts.special

    def id_of(self, token_text: str) -> int | None:
        """Look up a token by its string in the vocabulary, in which spaces are `▁` or `Ġ`. Returns None if unknown."""
        if not isinstance(token_text, str):
            raise wrong_type("token_text", token_text, "a str")
        return self._loaded.id_of(token_text) if _is_unicode(token_text) else None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
