"""How model families split text into words: the names that the GGUF key `tokenizer.ggml.pre` uses.

A name stands for a list of regular expressions. Each one splits the words that the previous ones left: its matches and
the text between them become words. The expressions come from the models' own tokenizer.json files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+%s" + r"|[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*%s"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|"
_JAIS2 = (
    _LLAMA3.removesuffix(r"|\s+(?!\S)|\s+")
    + "".join(rf"|\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
    + r"|\s"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED_CODER = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
_EXAONE_MOE = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED % ("", "") + r"|\p{N}|" + _PUNCTUATION + _SPACES
_GPT4O = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?") + r"|\p{N}{1,3}|" + _PUNCTUATION + _SPACES
_YOUTU = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?") + r"|\p{N}|" + _PUNCTUATION + _SPACES
_KIMI2 = (
    r"\p{Han}+|"
    + (_CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?")).replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    + _SPACES
)
_ASCII_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_DEEPSEEK3 = _ASCII_WORD + r"[\r\n]*|" + _SPACES
_SPARK = _ASCII_WORD + r"|[\r\n]|\s+(?!\S)|\s+"


def _characters(ranges: str) -> str:
    """Hexadecimal ranges of code points as the content of a regular expression's character class."""
    return "-".join(re.sub(r"[0-9A-F]+", r"\\x{\g<0>}", part) for part in ranges.split("-")).replace(" ", "")


# Letters with case, as DeepSeek LLM's tokenizer.json lists them, from an older version of Unicode than the library's.
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
# Digits in groups of three, counted from the right.
_GROUPS_OF_3 = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_GROUPS_OF_3_WORDS = r"\d{1,3}(?=(?:\d{3})*\b)"
_CUTS_OF_3 = r"(?=(\d{3})+(?!\d))"

# Expressions that take quadratic time, and equivalents that take linear time. The original looks ahead to the end of
# the number from every group of digits, which takes days for a million digits; the equivalent looks ahead once per
# number. Both split text at the same positions in a `Split` step with the behavior "Isolated".
_HEAD = r"\d{1,2}(?=(?:\d{3})*(?!\d))"  # the digits before the groups
_OTHER = rf"(?:\D+(?:{_HEAD})?)"
LINEAR = {
    r"\s+$": r"(?<!\s)\s+$",
    "\u2581+\\z": "(?<!\u2581)\u2581+\\z",
    _GROUPS_OF_3: rf"(?<!\p{{N}}){_GROUPS_OF_3}|\p{{N}}{{3}}",
    _GROUPS_OF_3_WORDS: rf"(?<!\d){_GROUPS_OF_3_WORDS}|(?!\A)\G\d{{3}}",
    _CUTS_OF_3: rf"\A{_HEAD}{_OTHER}*|\A{_OTHER}+|\d{{3}}{_OTHER}*",
}

# Expressions of known models that are linear, although `regex_problem` cannot prove it.
PROVEN_BY_HAND = frozenset({*LINEAR.values(), _JAIS2, _EXAONE_MOE, "<sentinel:[0-9]+>"})

_AFMOE_SCRIPTS = _characters(
    "4E00-9FFF 3400-4DBF F900-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F "
    "AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
)
_YOUTU_SCRIPTS = (
    f"[{_characters('AC00-D7A3 3131-318E')}]+|"
    f"[{_characters('FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F')}]+|"
    f"[{_characters('3105-312F')}]+|[{_characters('4E00-9FA5 3040-309F 30A0-30FF')}]+"
)
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(?:IMGIMG)[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
)
_LINES = r"[^\n]+|\n+"
_BLOOM_WORD = rf" ?[^(\s|{_characters('2E 2C 21 3F 2026 3002 FF0C 3001 964 6D4 60C')})]+"


class PreTokenizer(NamedTuple):
    """How a model family splits text into words.

    Attributes:
        splits: Regular expressions, applied in this order.
        nfc: Whether characters are composed first (Unicode normal form C).
        ignore_merges: Whether a word that is a token becomes that token regardless of the merges.
        add_bos: Whether text starts with BOS if the file does not say.
        raw: Whether pieces are plain text with U+2581 for spaces and <0xNN> for bytes, as in SentencePiece. Otherwise
            they use the byte-level alphabet.
    """

    splits: Sequence[str]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    raw: bool = False


def _named(names: str, *splits: str, **rules: bool) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), PreTokenizer(splits, **rules))


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **_named("default", r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **_named(
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe modern-bert gigachat"
        " a.x-4.0 mellum jais exaone4 trillion granite-docling",
        _GPT2,
    ),
    **_named("mpt olmo", _GPT2, nfc=True),
    **_named(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3,
        ignore_merges=True,
        add_bos=True,
    ),
    **_named("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    **_named("glm4 glm5", _LLAMA3, ignore_merges=True),
    **_named("jais-2", _JAIS2),
    **_named("minicpm5", r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+"), ignore_merges=True),
    **_named("qwen2", _QWEN2, nfc=True),
    **_named("stablelm2 deepseek-r1-qwen megrez hunyuan grok-2 kormo f2llmv2 solar-open", _QWEN2),
    **_named("ufakzeka", _QWEN2.removeprefix(_CONTRACTIONS + "|")),
    **_named("laguna", _LINES, _QWEN2),
    **_named("qwen35", _QWEN35),  # its published vectors do not compose characters
    **_named("bailingmoe bailingmoe2 llada-moe", _BAILING),
    **_named("seed-coder", _SEED_CODER),
    **_named("exaone-moe", _EXAONE_MOE),
    **_named("starcoder refact smollm codeshell exaone minerva-7b mellum2", r"\p{N}", _GPT2),
    **_named("command-r", r"\p{N}", _GPT2, nfc=True),
    **_named("chameleon", *_CHAMELEON, _GPT2, add_bos=True),
    **_named("falcon", r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **_named("tekken", _TEKKEN, ignore_merges=True, add_bos=True),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    **_named("granite-embed-multi-97m", _GPT4O, ignore_merges=True),
    **_named("tiny_aya cohere2moe", _GROUPS_OF_3_WORDS, _GPT4O),
    **_named("youtu", _YOUTU_SCRIPTS, _YOUTU, ignore_merges=True),
    **_named("kimi-k2", _KIMI2),
    **_named("superbpe", r"\p{N}+", _CUTS_OF_3),
    **_named("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", r"\p{N}{1,3}", _DEEPSEEK3_CJK, _DEEPSEEK3),
    **_named("spark2_5", r"\p{N}{1,3}", _DEEPSEEK3_CJK, _SPARK, r"\p{N}"),
    **_named("afmoe", _GROUPS_OF_3, f"[{_AFMOE_SCRIPTS}]+", _DEEPSEEK3),
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
    **_named("gemma4 granite-embed-multi-311m", _LINES, add_bos=True, raw=True),
    **_named("sarvam-moe", _LINES, raw=True),
}
