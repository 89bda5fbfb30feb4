"""Patterns match what `re` matches, however the text is cut."""

from __future__ import annotations

import random
import re
import time

import pytest

from llamac.errors import UnsupportedError
from llamac.tools.patterns import MAX_HELD, PARTIAL, Found, Pattern

PATTERNS = (
    *(
        "abc",
        "a|ab|b",
        "(?:a|ab)(?:c|bcd)",
        "a*b",
        "a*?b",
        "[^>\\n]+>",
        "(?P<n>\\w+):(?P<v>.*?);",
        "\\s*<b>",
        "a{2,3}b?",
    ),
    *("(?P<n>a+)(?P<m>a*)b", "x?y??z", "(a|b)*c", "[a-c\\d]+", "(?:(?:a?)*)*b", "^ab", "ab$", "(?P<n>a)|b", "[^ab]c"),
)


def texts(count: int) -> list[str]:
    draw = random.Random(1)
    return ["".join(draw.choices("abcxyz<>:; \n1", k=draw.randrange(8))) for _ in range(count)]


@pytest.mark.parametrize("source", PATTERNS)
def test_matches_are_those_of_re(source: str) -> None:
    compiled, expected = Pattern(source), re.compile(source, re.DOTALL)
    for text in [*texts(300), "abc", "aab", "aaab", "a:b;", "abcd", "ab", " \n<b>", "zz1"]:
        for at in range(len(text) + 1):
            found, wanted = compiled.match(text, at), expected.match(text, at)
            if source.endswith("$") and wanted is not None and text.endswith("\n"):
                continue  # `re` also matches before a line feed
            if source.startswith("^") and at > 0:
                wanted = None
            assert (found.end if isinstance(found, Found) else None) == (wanted.end() if wanted else None), (text, at)
            if wanted is not None and isinstance(found, Found):
                named = {name: value for name, value in wanted.groupdict().items() if value is not None}
                assert found.groups == named
                assert not text[at:] or found.end == at or compiled.may_start_with(text[at])


@pytest.mark.parametrize("source", PATTERNS)
def test_a_partial_text_decides_nothing_that_more_text_changes(source: str) -> None:
    compiled = Pattern(source)
    for text in texts(200):
        whole = compiled.match(text)
        for end in range(len(text) + 1):
            found = compiled.match(text[:end], final=False)
            assert found is PARTIAL or found == whole, (text, end)


def test_a_literal_is_known_with_its_last_character() -> None:
    assert Pattern("</a>").match("</a", final=False) is PARTIAL
    assert Pattern("</a>").match("</a>", final=False) == Found(4, {})
    assert Pattern("</a>").match("</b", final=False) is None


@pytest.mark.parametrize(
    ("source", "spelled", "others"),
    [
        (r"<\|(?:call|end|return)\|>", ("<|call|>", "<|end|>", "<|return|>", "end"), ("<|start|>", "<|calls|>")),
        (r"(?:<a>)?\s*<b>(?P<name>[^\n]+)</b>", ("<a>", "<b>", "<a><b>", "</b>"), ("<c>", "<b></b>", "\n")),
        (r"<[ab]+c>", ("<ac>", "<bac>"), ("<c>", "<dc>")),
        (r".*\w[^x]", (), ("a", "x")),
        ("", (), ("a",)),
    ],
)
def test_a_pattern_spells_what_it_names(source: str, spelled: tuple[str, ...], others: tuple[str, ...]) -> None:
    for text in spelled:
        assert Pattern(source).spells(text), text
    for text in others:
        assert not Pattern(source).spells(text), text


def test_patterns_that_stop_re_take_no_time() -> None:
    started = time.thread_time()  # other programs may have the CPUs
    assert Pattern("(a*)*b").match("a" * 5000) is None
    assert Pattern("(?:a|a)*(?:a|a)*c").match("a" * 5000) is None
    assert time.thread_time() - started < 1


def test_a_match_that_could_grow_forever_ends() -> None:
    assert Pattern("a+").match("a" * (MAX_HELD * 2), final=False) == Found(MAX_HELD + 1, {})


@pytest.mark.parametrize(
    "source",
    [
        "(?=a)",
        "(?<!a)b",
        "(?i)a",
        "(a)\\1",
        "(?i:a)",
        "(",
        "a{100000}",
        "((((a{99}){99})))",
        "\\b",
        "a" * 10**5,
        "(" * 90 + "a" + ")" * 90,
    ],
)
def test_other_patterns_are_refused(source: str) -> None:
    with pytest.raises(UnsupportedError, match="the pattern"):
        Pattern(source)
