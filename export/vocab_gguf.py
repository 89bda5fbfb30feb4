"""Tokenizers from GGUF metadata alone: SentencePiece vocabularies ("llama") and byte-level BPE ("gpt2").

A GGUF file names the way its model cuts text into words instead of describing it. `PRE_TOKENIZERS` holds what the
names stand for; a name that is not in it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from llamac.errors import TokenizerError, UnsupportedError
from llamac.tokenizer import SpecialTokens

from .gguf_metadata import Value, read_metadata
from .vocab_added import Added, Document
from .vocab_json import Merge, Vocabulary, byte_level_document, canonical_json, split_words
from .vocab_spm import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Piece, piece_ids, spm_document

T = TypeVar("T", bool, int, str)

# The regular expressions of the models' own tokenizer.json files.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+%s" + r"|[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*%s"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|"
_TEKKEN = _CASED % ("", "") + r"|\p{N}|" + _PUNCTUATION + _SPACES
_GPT4O = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?") + r"|\p{N}{1,3}|" + _PUNCTUATION + _SPACES
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES
)


def _characters(ranges: str) -> str:
    """Ranges of code points in hexadecimal as the inside of a regular expression's character class."""
    return "-".join(re.sub(r"[0-9A-F]+", r"\\x{\g<0>}", part) for part in ranges.split("-")).replace(" ", "")


# Letters with case, as DeepSeek LLM's tokenizer.json lists them: those of an older Unicode than the library's.
_DEEPSEEK_LETTERS = _characters(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 "
    "1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE "
    "1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 "
    "2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A "
    "10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_MARKS = _characters("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_DEEPSEEK_CJK = f"[{_characters('4E00-9FA5 800-4E00 AC00-D7FF')}]+"
_DEEPSEEK3_CJK = f"[{_characters('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_BLOOM_WORD = rf" ?[^(\s|{_characters('2E 2C 21 3F 2026 3002 FF0C 3001 964 6D4 60C')})]+"


class PreTokenizer(NamedTuple):
    """How a family cuts text into words: regular expressions, applied in turn.

    `nfc`: characters are composed first. `whole_words`: a word that is a token becomes it, whatever the merges say.
    `add_bos`: whether BOS is put in front where the file says nothing."""

    splits: Sequence[str]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


def _named(
    names: str, *splits: str, nfc: bool = False, whole_words: bool = False, add_bos: bool = False
) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), PreTokenizer(splits, nfc, whole_words, add_bos))


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **_named("default", r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **_named(
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum jais exaone4 trillion"
        " granite-docling",
        _GPT2,
    ),
    **_named("mpt olmo", _GPT2, nfc=True),
    **_named(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3, whole_words=True, add_bos=True
    ),
    **_named("dbrx smaug-bpe glm4 chatglm-bpe", _LLAMA3),
    **_named("qwen2", _QWEN2, nfc=True),
    **_named("stablelm2 deepseek-r1-qwen megrez hunyuan grok-2", _QWEN2),
    **_named("qwen35", _QWEN35, nfc=True),
    **_named("starcoder refact smollm codeshell exaone minerva-7b", r"\p{N}", _GPT2),
    **_named("command-r", r"\p{N}", _GPT2, nfc=True),
    **_named("falcon", r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **_named("tekken", _TEKKEN, whole_words=True, add_bos=True),
    **_named("gpt-4o llama4 kanana2 minimax-m2", _GPT4O),
    **_named("deepseek-v3 hunyuan-dense", r"\p{N}{1,3}", _DEEPSEEK3_CJK, _DEEPSEEK3),
    **_named(
        "deepseek-llm",
        r"[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        rf"\s?[{_DEEPSEEK_MARKS}]+",
        r"\s+$",
        _DEEPSEEK_CJK,
        r"\p{N}+",
    ),
    **_named("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"),
    **_named("bloom gpt3-finnish poro-chat", _BLOOM_WORD),
    **_named("viking", _BLOOM_WORD, r"\p{N}"),
}

# Tokens that end a turn or a text in the models that have them; files seldom name more than EOS.
_END_NAMES = frozenset(
    [
        "<EOT>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|call|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<|return|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ]
)


def from_gguf(path: str | Path) -> Vocabulary:
    """The vocabulary of the GGUF file `path`, which may be without weights.

    Raises ModelError where the file is damaged, TokenizerError or UnsupportedError where its tokenizer is.
    """
    values = read_metadata(path).values
    try:
        return from_metadata(values)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def from_metadata(values: dict[str, Value]) -> Vocabulary:
    """The vocabulary that the metadata `values` of a GGUF file describe."""
    kind = _get(values, "model", str, None)
    if kind == "llama":
        return _spm(values)
    if kind == "gpt2":
        return _byte_level(values)
    if kind is None:
        raise TokenizerError("the file has no tokenizer: 'tokenizer.ggml.model' is missing")
    known = {
        "bert": "BERT's WordPiece",
        "t5": "T5's unigram model",
        "rwkv": "RWKV's",
        "none": "no vocabulary",
        "no_vocab": "no vocabulary",
    }
    raise UnsupportedError(
        f"the GGUF tokenizer '{kind}' ({known.get(kind, 'unknown')}) is not supported, only 'llama' and 'gpt2'"
    )


def _get(values: dict[str, Value], name: str, kind: type[T], default: T | None) -> T | None:
    value = values.get(f"tokenizer.ggml.{name}", default)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise TokenizerError(f"'tokenizer.ggml.{name}' is {value!r:.40}, not of the type {kind.__name__}")
    return value


def _list(values: dict[str, Value], name: str, kind: type, count: int | None = None) -> list[Value] | None:
    items = values.get(f"tokenizer.ggml.{name}")
    if items is None:
        return None
    if not isinstance(items, list) or not all(type(item) is kind for item in items):
        raise TokenizerError(f"'tokenizer.ggml.{name}' is no array of the type {kind.__name__}")
    if count is not None and len(items) != count:
        raise TokenizerError(f"'tokenizer.ggml.{name}' has {len(items)} entries for {count} tokens")
    return items


def _pieces(values: dict[str, Value]) -> list[Piece]:
    """Tokens with scores and types. Converters fill holes in the ids with "[PAD<id>]": those are no text."""
    tokens = _list(values, "tokens", str)
    if not tokens:
        raise TokenizerError("'tokenizer.ggml.tokens' is missing or empty")
    scores = _list(values, "scores", float, len(tokens)) or [0.0] * len(tokens)
    types = _list(values, "token_type", int, len(tokens)) or [NORMAL] * len(tokens)
    pieces = [Piece(*entry) for entry in zip(tokens, scores, types, strict=True)]  # type: ignore[arg-type]
    for index, piece in enumerate(pieces):
        if not piece.text:
            pieces[index] = Piece(f"[EMPTY_{index}]", 0.0, UNUSED)
        elif piece.text == f"[PAD{index}]":
            pieces[index] = piece._replace(type=UNUSED)
    return pieces


def _token_id(values: dict[str, Value], name: str, size: int, default: int | None) -> int | None:
    token = _get(values, f"{name}_token_id", int, default)
    if token is None or 0 <= token < size:
        return token
    if token in (-1, 0xFFFFFFFF):  # both are written for "none"
        return None
    raise TokenizerError(f"'tokenizer.ggml.{name}_token_id' is {token}, but there are {size} tokens")


def _special(
    values: dict[str, Value],
    pieces: Sequence[Piece],
    bos: int | None = None,
    eos: int | None = None,
    add_bos: bool = False,
) -> SpecialTokens:
    """BOS, EOS and stop rules; `bos`, `eos` and `add_bos` are what holds where the file does not say."""
    bos = _token_id(values, "bos", len(pieces), bos)
    eos = _token_id(values, "eos", len(pieces), eos)
    stops = {eos, *(_token_id(values, name, len(pieces), None) for name in ("eot", "eom"))} - {None}
    ends = {
        index
        for index, piece in enumerate(pieces)
        if piece.text in _END_NAMES and piece.type in (CONTROL, USER_DEFINED)
    }
    names = {pieces[index].text for index in ends}
    if "<|return|>" in names and "<|call|>" in names:  # there <|end|> closes a message, not the answer
        ends = {index for index in ends if pieces[index].text != "<|end|>"}
    add_bos = bool(_get(values, "add_bos_token", bool, add_bos and bos is not None))
    add_eos = bool(_get(values, "add_eos_token", bool, False))
    return SpecialTokens(
        bos, add_bos, add_eos, eos, tuple(sorted(token for token in stops | ends if token is not None))
    )


def _added(pieces: Sequence[Piece], special: SpecialTokens, rstrip: frozenset[str] = frozenset()) -> list[Added]:
    return [
        Added(
            index,
            piece.text,
            special=piece.type != USER_DEFINED or index in (special.bos_id, special.eos_id),
            rstrip=piece.text in rstrip,
        )
        for index, piece in enumerate(pieces)
        if piece.type in (CONTROL, UNKNOWN, USER_DEFINED) or index in (special.bos_id, special.eos_id)
    ]


def _spm(values: dict[str, Value]) -> Vocabulary:
    if "tokenizer.ggml.scores" not in values:
        raise TokenizerError(
            "'tokenizer.ggml.scores' is missing: without scores a SentencePiece vocabulary cannot encode"
        )
    if _get(values, "remove_extra_whitespaces", bool, False):
        raise UnsupportedError("'tokenizer.ggml.remove_extra_whitespaces' is not supported for the tokenizer 'llama'")
    pieces = _pieces(values)
    special = _special(values, pieces, bos=1, eos=2, add_bos=True)
    name = values.get("general.name")
    added = _added(pieces, special, _phi3_rstrip(pieces) if isinstance(name, str) and _is_phi3(name) else frozenset())
    prefix = bool(_get(values, "add_space_prefix", bool, True))
    return Vocabulary(canonical_json(spm_document(pieces, prefix_space=prefix, added=added)), special, None)


def _is_phi3(name: str) -> bool:
    return "phi-3" in name.lower() or "phi3" in name.lower()


def _phi3_rstrip(pieces: Sequence[Piece]) -> frozenset[str]:
    """Phi-3's tokens swallow the white space behind them, all but three. GGUF has no field for that."""
    names = {piece.text for piece in pieces if piece.type in (CONTROL, USER_DEFINED)}
    return frozenset(names - {"<unk>", "<s>", "<|endoftext|>"})


def _byte_level(values: dict[str, Value]) -> Vocabulary:
    name = _get(values, "pre", str, "default") or "default"
    rules = PRE_TOKENIZERS.get(name)
    if rules is None:
        raise UnsupportedError(
            f"the GGUF pre-tokenizer '{name}' is not known here: how this model cuts words is not in the file"
        )
    pieces = _pieces(values)
    special = _special(values, pieces, add_bos=rules.add_bos)
    ids = piece_ids([piece.text for piece in pieces])
    merges = _merges(values, ids)
    document: Document = byte_level_document(
        ids, merges, _added(pieces, special), split_words(rules.splits), nfc=rules.nfc, ignore_merges=rules.whole_words
    )
    return Vocabulary(canonical_json(document), special, None)


def _merges(values: dict[str, Value], ids: dict[str, int]) -> list[Merge]:
    merges: dict[Merge, None] = {}  # of a pair that is there twice the first counts
    for index, line in enumerate(_list(values, "merges", str) or []):
        assert isinstance(line, str)
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise TokenizerError(f"merge {index} ({line!r}) does not join two tokens of the vocabulary to a third")
        merges[left, right] = None
    if not merges:
        raise TokenizerError("'tokenizer.ggml.merges' is missing or empty")
    return list(merges)
