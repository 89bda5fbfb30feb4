"""Special tokens in chats with normalizing tokenizers: other spellings of a name in a message remain text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vocab_samples import tokenizer_json

from llamac import ChatTemplate, Tokenizer
from llamac.text.encoding import make_encoder
from llamac.text.isolated_encoder import IsolatedEncoder
from llamac.text.special_tokens import SpecialTokens

BOS, EOS = 256, 257
RULES = SpecialTokens(BOS, True, False, EOS, (EOS,))
TEMPLATE = "<s>{% for message in messages %}{{ message.content }}</s>\n{% endfor %}"
Json = dict[str, Any]

NORMALIZERS: dict[str, Json] = {
    "compatibility forms": {"type": "NFKC"},
    "lower case": {"type": "Lowercase"},
    "removed characters": {"type": "Replace", "pattern": {"String": "x"}, "content": ""},
    "removed accents": {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]},
    "BERT": {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": False,
        "strip_accents": True,
        "lowercase": True,
    },
}
SPELLINGS = (
    *("<s>", "</s>", "\uff1cs\uff1e", "a \uff1c\uff0fs\uff1e b", "\ufe64s\ufe65", "<\u017f>", "<S>", " </S> ", "<xs>"),
    *("<s\u0301>", "<\u015b>", "</\0s>", "<\u200bs>", "x<s>x", "</sx></s>"),
)

ASCII = {chr(code): code for code in range(33, 127)}
WORDS = {**ASCII, "[UNK]": 255, "<s>": BOS, "</s>": EOS, "hi": 258}
_FILLERS = [[f"<{index}>", -20.0] for index in range(BOS - 1 - len(ASCII))]
PIECES = [["[UNK]", -9.0], *([char, -3.0] for char in ASCII), *_FILLERS, ["<s>", 0.0], ["</s>", 0.0], ["hi", -1.0]]
BYTE_BPE = tokenizer_json()["model"]
WHITESPACE: Json = {"pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": None}
MODELS: dict[str, Json] = {
    "BPE": {},
    "BPE that ignores merges": {"model": {**BYTE_BPE, "ignore_merges": True}},
    "BPE whose merges form names": {
        "model": {
            "type": "BPE",
            "unk_token": "[UNK]",
            "vocab": {**WORDS, "<s": 259, "</": 260, "</s": 261, "<s>h": 262},
            "merges": ["< s", "<s >", "< /", "</ s", "</s >", "<s> h", "h i"],
        },
        **WHITESPACE,
    },
    "Unigram": {"model": {"type": "Unigram", "unk_id": 0, "vocab": PIECES}, **WHITESPACE},
    "WordLevel": {"model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": WORDS}, **WHITESPACE},
    "WordPiece": {
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {**WORDS, **{f"##{char}": 300 + index for index, char in enumerate(ASCII)}},
        },
        **WHITESPACE,
    },
}


def make_document(model: str, normalizer: Json | None, *, normalized: bool, strip: bool = False) -> Json:
    flags = {"special": True, "single_word": False, "lstrip": strip, "rstrip": strip, "normalized": normalized}
    added = [{"id": BOS, "content": "<s>", **flags}, {"id": EOS, "content": "</s>", **flags}]
    return tokenizer_json(normalizer=normalizer, added_tokens=added, **MODELS[model])


def make_tokenizer(document: Json) -> Tokenizer:
    return Tokenizer.from_json(json.dumps(document), RULES)


def chat_ids(tokenizer: Tokenizer, *contents: str, template: str = TEMPLATE) -> list[int]:
    find_special = tokenizer.special_spans if tokenizer.reads_other_spellings else None
    messages = [{"role": "user", "content": content} for content in contents]
    runs = ChatTemplate(template).render_runs(messages, tokenizer.special_names, find_special)
    return [token for run in runs for token in tokenizer.encode(run.text, parse_special=run.parse_special)]


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_other_spellings_of_a_name_are_text(model: str, normalizer: str, normalized: bool, strip: bool) -> None:
    document = make_document(model, NORMALIZERS[normalizer], normalized=normalized, strip=strip)
    for spelling in SPELLINGS:
        tokenizer = make_tokenizer(document)  # a new one each time, because a tokenizer caches what it finds
        assert not {BOS, EOS} & set(tokenizer.encode(spelling)), spelling
        found = chat_ids(tokenizer, "hi ", spelling)
        assert [token for token in found if token in (BOS, EOS)] == [BOS, EOS, EOS], spelling


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_harmless_messages_give_the_ids_of_the_whole_text(model: str, normalizer: str, normalized: bool) -> None:
    """transformers gives these ids."""
    tokenizer = make_tokenizer(make_document(model, NORMALIZERS[normalizer], normalized=normalized))
    for contents in (("hi",), ("hi hi", "\uff41 \u00e9 \u65e5\u672c"), ("a < b > c / d", "S s </ s>", "xx")):
        text = ChatTemplate(TEMPLATE).render([{"role": "user", "content": content} for content in contents])
        assert chat_ids(tokenizer, *contents) == tokenizer.encode(text, parse_special=True)


def test_a_template_can_write_another_spelling() -> None:
    tokenizer = make_tokenizer(make_document("BPE", {"type": "Lowercase"}, normalized=True))
    for message in ("hi", "<S>", "<s>", "</S>"):
        found = chat_ids(tokenizer, "hi", message, template=TEMPLATE.replace("<s>", "<S>"))
        assert [token for token in found if token in (BOS, EOS)] == [BOS, EOS, EOS], message


def test_tokenizers_without_normalization_need_no_check() -> None:
    assert not make_tokenizer(make_document("BPE", None, normalized=True)).reads_other_spellings
    assert not make_tokenizer(make_document("BPE", {"type": "NFKC"}, normalized=False)).reads_other_spellings
    assert make_tokenizer(make_document("BPE", {"type": "NFKC"}, normalized=True)).reads_other_spellings


def test_the_isolated_tokenizer_finds_the_same_tokens() -> None:
    document = make_document("BPE", {"type": "NFKC"}, normalized=True)
    data = json.dumps(document).encode()
    isolated, direct = IsolatedEncoder(document, data, {BOS, EOS}), make_encoder(document, data, {BOS, EOS})
    for text in ("a", "<s>\U0001f600 \uff1cs\uff1e</s>"):
        assert isolated.special_spans(text) == direct.special_spans(text)
    assert direct.special_spans("<s>\U0001f600 \uff1cs\uff1e</s>") == [(0, 3), (5, 8), (8, 12)]
