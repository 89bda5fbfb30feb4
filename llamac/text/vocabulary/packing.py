"""Builds packed tokenizers (packed.py) from the arrays of a GGUF file, without a Python object for each merge.

The functions return None for a vocabulary that needs a closer look. Its reader then builds the tokenizer.json, and
finds the error if there is one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from llamac import _core
from llamac.errors import LlamacError, TokenizerError, UnsupportedError
from llamac.text.packed import OpenedBytes, join, rest_json, vocabulary_of
from llamac.text.vocabulary.added import Document
from llamac.text.vocabulary.spm import BYTE_PIECES, MAX_TIES, NORMAL, UNUSED, check_ties

MANY = 1 << 14  # tokens from which threads rank merges
RANKERS = 4
PARTS = 32  # of that work: Ctrl-C waits only for those that threads have begun

_FORMED = bytes(kind in (NORMAL, UNUSED) for kind in range(256))  # types of pieces that merges can form


def pack_lines(texts: list[str], lines: list[str], shell: Callable[[], Document]) -> bytes | None:
    """Pack BPE whose merges are written as "left right".

    Args:
        texts: The strings of the tokens.
        lines: The merges.
        shell: Makes the tokenizer.json without its vocabulary and merges.
    """
    opened = _open(texts)
    if opened is None:
        return None
    ends, strings, vocabulary = opened
    merges = vocabulary.parse_merges(lines)
    return _join(shell(), ends, merges, strings) if merges else None


def pack_scores(
    texts: list[str],
    scores: Sequence[float],
    types: Sequence[int],
    has_unknown: bool,
    shell: Callable[[bool], Document],
) -> bytes | None:
    """Pack SentencePiece's BPE.

    Args:
        texts: The strings of the tokens.
        scores: Their scores, exact in 32 bits.
        types: Their types.
        has_unknown: Whether there is a token for unknown characters.
        shell: Makes the tokenizer.json without its vocabulary and merges; the argument says whether there are byte
            pieces.
    """
    opened = _open(texts)
    if opened is None or not all(map(range(256).__contains__, set(types))):
        return None
    ends, strings, vocabulary = opened
    present = sum(vocabulary.find(piece) is not None for piece in BYTE_PIECES)
    if present not in (0, 256) or not (present or has_unknown):
        return None
    forms = bytes(types).translate(_FORMED)
    values = array("f", scores)
    try:
        merges, rivals = _rank(vocabulary, values, forms)
    except UnsupportedError:
        return None
    data = _join(shell(present == 256), ends, merges, strings)
    if data is None:
        return None
    ranked = data.vocabulary

    def by_score(left: str, right: str) -> float | None:
        token = ranked.find(left + right)
        return None if token is None or not forms[token] else -values[token]

    try:
        check_ties(((texts[x], texts[y], texts[z]) for x, y, z in rivals), by_score, ranked.rank)
    except TokenizerError:
        return None
    return data


def _open(texts: list[str]) -> tuple[bytes, bytes, _core.Vocabulary] | None:
    """The tables of the strings, and the vocabulary that they are. Every id has a token."""
    try:
        tables = _core.string_tables(texts)
    except UnicodeEncodeError:
        return None
    try:
        vocabulary = vocabulary_of(join(b"", tables[0], b"", tables[1]))
    except TokenizerError:
        return None
    return (*tables, vocabulary) if vocabulary.n_strings == len(texts) else None


def _rank(vocabulary: _core.Vocabulary, scores: array[float], forms: bytes) -> tuple[bytes, list[tuple[int, int, int]]]:
    """The merges that scores imply, and their rivals (`_core.Vocabulary.rank_merges`). Threads rank a large one."""
    if len(forms) < MANY:
        return vocabulary.rank_merges(scores, forms, MAX_TIES)
    pool = ThreadPoolExecutor(RANKERS)
    try:
        parts = [pool.submit(vocabulary.rank_merges, scores, forms, MAX_TIES, part, PARTS) for part in range(PARTS)]
        found = [part.result() for part in parts]
    finally:
        pool.shutdown(cancel_futures=True)
    return b"".join(merges for merges, _ in found), [rival for _, rivals in found for rival in rivals]


def _join(document: Document, ends: bytes, merges: bytes, strings: bytes) -> OpenedBytes | None:
    """The packed form."""
    model = {key: value for key, value in document["model"].items() if key not in ("vocab", "merges")}
    data = join(rest_json({**document, "model": model}), ends, merges, strings)
    try:
        vocabulary = vocabulary_of(data)
        vocabulary.index()  # finds equal merges
    except LlamacError:
        return None
    opened = OpenedBytes(data)
    opened.vocabulary = vocabulary
    return opened
