"""The story generator: the same stories everywhere, every choice counted, consistent characters and objects."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from itertools import islice, pairwise

import pytest

from llamac import models
from llamac.errors import ArgumentError
from llamac.models.training import adventures, consistency, generator, lexicon
from llamac.models.training.telling import Draw, Telling


@pytest.fixture(scope="module")
def some_stories() -> list[generator.Story]:
    return list(islice(generator.stories(seed=11), 3000))


def test_a_story_depends_only_on_seed_and_index() -> None:
    assert list(islice(generator.stories(seed=4, start=7), 3)) == [generator.story(4, index) for index in (7, 8, 9)]
    assert len({generator.story(seed, index).text for seed in range(20) for index in range(20)}) == 400


def test_the_training_text_does_not_change() -> None:
    """The built-in models were trained on this series of stories."""
    text = "\n\n".join(generator.story(1, index).text for index in range(2000))
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "f2283292cf1ca7dd1166b2e719ef34c97ab3762eeae8c64ef0f8d90084c51d1e"


def test_stories_are_plain_text_of_the_right_length(some_stories: list[generator.Story]) -> None:
    for story in some_stories:
        assert story.text.isascii()
        assert story.text.replace("\n", " ").isprintable()
        assert [mark for mark in ("{", "  ", " \n", "\n ", "\n\n") if mark in story.text] == []
        assert story.text[0].isupper()
        assert story.text[-1] in '.!?"'
        assert story.text.count('"') % 2 == 0
        assert 90 <= len(story.text.split()) <= 230


def test_stories_are_varied(some_stories: list[generator.Story]) -> None:
    assert len({story.text for story in some_stories}) == len(some_stories)
    assert {story.plot for story in some_stories} == {plot.__name__ for plot in generator.PLOTS}
    openings = Counter(" ".join(story.text.split()[:2]) for story in some_stories)
    assert {"Once upon", "One sunny", "Lily and", "Long ago,", "There once", "This is"} <= set(openings)


def test_stories_are_consistent(some_stories: list[generator.Story]) -> None:
    assert {
        story.text: consistency.faults(story.text) for story in some_stories if consistency.faults(story.text)
    } == {}


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("carried the kite home", "carried the blue kite home", "the kite is blue and red"),
        ("the fox said", "the owl said", "the owl was never introduced"),
        ('"It is yours, Lily,"', '"It is yours, Anna,"', "Anna was never introduced"),
    ],
)
def test_the_consistency_check_finds_faults(old: str, new: str, fault: str) -> None:
    story = (
        "A kind girl named Lily had a red kite.\n"
        'She met a wise fox. "It is yours, Lily," the fox said. Lily carried the kite home.'
    )
    assert consistency.faults(story) == []
    assert consistency.faults(story.replace(old, new)) == [fault]


def test_a_and_an_are_used_correctly(some_stories: list[generator.Story]) -> None:
    words = " ".join(story.text for story in some_stories).replace('"', "").split()
    wrong = {
        f"{article} {word}"
        for article, word in pairwise(words)
        if (article.lower() == "an") != (word[0] in "aeiou") and article.lower() in ("a", "an")
    }
    assert wrong == set()


def test_heroes_need_no_help_with_their_own_skill() -> None:
    """A duck does not need help in the water, nor a squirrel in a tree."""
    heroes: dict[str, set[str]] = {}
    for index in range(4000):
        draw = Draw(5, index)
        telling = Telling(draw)
        adventures.lost(telling)
        skills = [skill for skill, nouns in lexicon.SKILLS.items() if telling.cast["f"].noun in nouns]
        if len(skills) == 1:
            heroes.setdefault(skills[0], set()).add(telling.cast["h"].noun)
    assert set(heroes) == set(lexicon.SKILLS)
    for skill, nouns in heroes.items():
        assert not nouns & set(lexicon.SKILLS[skill])


def test_draw_counts_the_bits_of_each_choice() -> None:
    draw = Draw(1, 0)
    draw.choose("abcd")
    draw.choose("x")  # no choice: only one option
    likely = draw.choose("aab") == "a"
    hit = draw.chance(1, 8)
    draw.chance(8, 8)
    assert draw.choices == 3
    assert draw.bits == pytest.approx(2 + math.log2(3 / 2 if likely else 3) + math.log2(8 if hit else 8 / 7))


def test_draw_is_uniform() -> None:
    n, rounds = 7, 7000
    counts = Counter(Draw(2, index).choose(range(n)) for index in range(rounds))
    chi_squared = sum((counts[value] - rounds / n) ** 2 / (rounds / n) for value in range(n))
    assert chi_squared < 22.5  # 6 degrees of freedom: probability 0.001


def _small(telling: Telling) -> None:
    """A grammar small enough to enumerate. Each text has one derivation; their numbers of choices differ."""
    telling.pick("color", ("red", "blue", "green"))
    if telling.draw.chance(1, 4):
        telling.pick_other("other", ("red", "blue", "green"), telling.cast["color"])
        telling.tell("{color} and {other}", "{other} after {color}", "first {color} then {other}")
    else:
        telling.tell("only {color}", "just {color}")
    telling.maybe("The end.", "The end.", "That is all.")


def _derive(index: int) -> tuple[str, float]:
    draw = Draw(3, index)
    telling = Telling(draw)
    _small(telling)
    return telling.text(), draw.bits


def test_bits_are_the_logarithm_of_the_probability() -> None:
    """For the texts of a small grammar, 2**-bits adds up to 1 and equals their frequencies."""
    rounds = 20_000
    drawn = [_derive(index) for index in range(rounds)]
    counts = Counter(text for text, _ in drawn)
    bits = dict(drawn)
    assert len(bits) == 3 * 2 * 3 * 3 + 3 * 2 * 3
    assert sum(2**-each for each in bits.values()) == pytest.approx(1.0)
    for text, each in bits.items():
        expected = rounds * 2**-each
        assert abs(counts[text] - expected) < 5 * math.sqrt(expected)
    entropy = sum(each * 2**-each for each in bits.values())
    assert sum(each for _, each in drawn) / rounds == pytest.approx(entropy, rel=0.01)


def test_the_choice_of_the_plot_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(telling: Telling) -> None:
        telling.tell("One.")

    def second(telling: Telling) -> None:
        telling.tell("Two.")

    monkeypatch.setattr(generator, "PLOTS", (first, second))
    stories = [generator.story(1, index) for index in range(20)]
    assert {(story.text, story.plot) for story in stories} == {("One.", "first"), ("Two.", "second")}
    assert {(story.bits, story.choices) for story in stories} == {(1.0, 1)}


def test_the_command_line_prints_stories(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["generator", "--seed", "6", "--start", "2", "--count", "2"])
    generator.main()
    printed = capsys.readouterr().out
    assert generator.story(6, 2).text in printed
    assert generator.story(6, 3).text in printed
    assert printed.count("---") == 2


def test_paths_of_the_built_in_models() -> None:
    assert models.DEFAULT in models.NAMES
    assert [models.path(name).name for name in models.NAMES] == ["stories.bin", "stories-gpt2.bin", "helper.bin"]
    assert models.path() == models.path(models.DEFAULT)
    with pytest.raises(ArgumentError, match=r"'tales'.*stories, stories-gpt2, helper"):
        models.path("tales")
