"""The JSON Schema Test Suite: guides accept every valid instance, and no other; or they refuse the schema by name."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import llamac
from llamac.errors import ArgumentError
from llamac.guided.constraint import Constraint
from llamac.guided.vocabulary import vocabulary_of
from llamac.text.tokenizer import Tokenizer

SUITE = Path(__file__).parent / "json_schema_suite" / "draft2020-12"
FILES = sorted(SUITE.rglob("*.json"))
MAX_KEYS = 4  # of an object whose keys are tried in every order

# Keywords that guides do not support. docs/guided.md lists them.
REFUSED = {
    *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
    *("propertyNames", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
    *("not", "if", "then", "else", "$dynamicRef", "$dynamicAnchor"),
}
# Other reasons to refuse a schema of the suite.
OTHER_REASONS = (
    "Unsatisfiable schema: schema is false",
    "the JSON schema is false, which allows nothing",
    "oneOf is supported only if a constant or a type tells the alternatives apart: use anyOf",
    r"Expected positive integer for '(max|min)(Items|Length|Properties)', got \d\.0",
    r"the reference to http://localhost:1234/\S+ cannot be followed: put that schema into \$defs",
    r"patternProperty regexes .* are not disjoint",
    r"Value for 'multipleOf' has too many digits: \d+",
)
# Strings that a format allows wrongly or refuses wrongly: guides do not know leap years and in which minutes leap
# seconds are, and they never generate rare forms of addresses.
INEXACT = {
    "date-time.json": ("1998-12-31T23:58:60Z", "1998-12-31T22:59:60Z"),
    "date.json": ("2021-02-29",),
    "email.json": (
        '"joe bloggs"@example.com',
        '"joe..bloggs"@example.com',
        '"joe@bloggs"@example.com',
        "joe.bloggs@[IPv6:::1]",
    ),
    "ipv6.json": (
        "1::d6:192.168.0.1",
        "1:2::192.168.0.1",
        "::ffff:192.168.0.1",
        "1000:1000:1000:1000:1000:1000:255.255.255.255",
    ),
    "time.json": (
        *("22:59:60Z", "23:58:60Z", "22:59:60+00:00", "23:58:60+00:00"),
        *("23:59:60+01:00", "23:59:60+00:30", "23:59:60-01:00", "23:59:60-00:30"),
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer with tokens of several bytes."""
    with llamac.load("stories-gpt2") as model:
        return model.tokenizer


def spellings(value: Any) -> Iterator[str]:
    """JSON texts of a value: the keys of small objects in every order; integers without a fraction."""
    if isinstance(value, dict):
        orders = itertools.permutations(value) if len(value) <= MAX_KEYS else [tuple(value)]
        for keys in orders:
            for parts in itertools.product(*(list(spellings(value[key])) for key in keys)):
                yield "{" + ", ".join(f"{quoted(key)}: {part}" for key, part in zip(keys, parts, strict=True)) + "}"
    elif isinstance(value, list):
        for parts in itertools.product(*(list(spellings(part)) for part in value)):
            yield "[" + ", ".join(parts) + "]"
    elif isinstance(value, float) and value.is_integer():
        yield str(int(value))
    else:
        yield quoted(value)


def quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def accepts(guide: llamac.Json, text: str, tokenizer: Tokenizer) -> bool:
    """Whether a guide's masks allow each token of a text, and its end."""
    constraint = Constraint(guide, tokenizer, [], [])
    for token in tokenizer.encode(text):
        forced = constraint.forced()
        if forced is not None and forced != token:
            return accepts_bytes(guide, text, tokenizer)
        mask = constraint.mask()
        if forced is None and (mask is None or not mask[token // 8] >> token % 8 & 1):
            return False
        constraint.accept(token)
    return constraint.is_accepting


def accepts_bytes(guide: llamac.Json, text: str, tokenizer: Tokenizer) -> bool:
    """Whether a text matches, however tokens divide it."""
    vocabulary = vocabulary_of(tokenizer)
    matcher = vocabulary.matcher(guide.grammar)
    tokens = [vocabulary.single[bytes([byte])] for byte in text.encode()]
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SUITE)))
def test_masks_allow_the_valid_instances_and_no_others(path: Path, tokenizer: Tokenizer) -> None:
    inexact = INEXACT.get(path.name, ()) if path.parent != SUITE else ()
    for group in json.loads(path.read_bytes()):
        if (guide := supported(group["schema"])) is None:
            continue
        for case in group["tests"]:
            found = any(accepts(guide, text, tokenizer) for text in spellings(case["data"]))
            assert found == (case["valid"] is not (case["data"] in inexact)), (
                group["description"],
                case["description"],
            )


def supported(schema: Any) -> llamac.Json | None:
    """The guide of a schema, or None if a keyword is refused by name."""
    try:
        return llamac.Json(schema)
    except ArgumentError as error:
        message = str(error)
    keywords = refused_keywords(message)
    reason = message.partition(": ")[2] or message
    assert keywords or any(re.fullmatch(other, reason) for other in OTHER_REASONS), message
    assert keywords <= REFUSED
    return None


def refused_keywords(error: str) -> set[str]:
    found = re.search(r": ('[\w$', ]+') (is|are) not supported$", error)
    return set(re.findall(r"'([\w$]+)'", found[1])) if found else set()


def test_every_keyword_that_is_refused_is_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "guided.md"
    if not page.is_file():
        pytest.skip("the documentation is not here: this is an installed copy")
    sentence = r"^Guides refuse the following keywords, .*?: (.*?)\.\n\n"
    line = re.search(sentence, page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert line is not None
    assert set(re.findall(r"`([\w$]+)`", line[1])) == REFUSED
    values: dict[str, Any] = {"not": {}, "if": {}, "propertyNames": {"pattern": "a"}}
    for keyword in REFUSED:
        with pytest.raises(ArgumentError, match=re.escape(f"at /items: {keyword!r} is not supported")):
            llamac.Json({"items": {keyword: values.get(keyword, True)}})
