"""Parts that several plots share: openings, a question and an answer, thanks, and last sentences."""

from __future__ import annotations

from .lexicon import FOODS, HOBBIES, HOMES, PARTS, WEATHER, capital
from .telling import Telling


def opening(t: Telling) -> None:
    """Introduce the hero and where the hero lives."""
    t.cast["Home"] = capital(t.pick("home", HOMES))
    t.tell(
        "Once upon a time, there was {h.a} named {h}. {h} lived {home}.",
        "Once upon a time, {h.called} lived {home}.",
        "Once upon a time, there lived {h.called}. {h.His} home was {home}.",
        "Long ago, {h.called} lived {home}.",
        "There once was {h.called}, who lived {home}.",
        "{h} was {h.a} who lived {home}.",
        "{Home} lived {h.called}.",
        "This is the story of {h}, {h.a} who lived {home}.",
        "Have you heard of {h}? {h} was {h.a} who lived {home}.",
    )
    if t.draw.chance(1, 2):
        t.pick("hobby", HOBBIES)
        t.tell(
            "{h.He} loved {hobby}.",
            "Most of all, {h.he} liked {hobby}.",
            "Every day {h.he} found time {hobby}.",
        )
    t.paragraph()


def meeting(t: Telling) -> None:
    """Introduce the hero and a friend together, so that the story is about both from its first sentence on."""
    t.cast["Home"] = capital(t.pick("home", HOMES))
    t.tell(
        "{h.short} and {f.short} lived {home}. {h} was {h.trait}, and {f} was {f.trait}.",
        "{h.short} and {f.short} were best friends. They lived {home}. {h} was {h.trait}, and {f} was {f.trait}.",
        "Once upon a time, {h.called} and {f.called} lived {home}.",
        "Once upon a time, there were two friends, {h.called} and {f.called}. They lived {home}.",
        "{Home} lived {h.called}. {h.His} best friend was {f.called}.",
        "{h.short} was {h.trait}, and {f.short} was {f.trait}. They lived {home} and did everything together.",
    )
    t.paragraph()


def day(t: Telling, *variants: str) -> None:
    """Tell one of the variants, which name the {weather} and the {part} of the day."""
    t.pick("weather", WEATHER)
    t.pick("part", PARTS)
    t.tell(*variants)


def scenery(t: Telling) -> None:
    """Perhaps look around for a moment."""
    t.maybe(
        "The birds were singing in the trees.",
        "The air smelled of flowers and fresh bread.",
        "Bees were humming, and the grass was soft.",
        "Far away, a bell was ringing.",
        "White clouds sailed across the sky like ships.",
        "Everything was quiet and peaceful.",
    )


def ask(t: Telling, worry: str) -> None:
    """Let the friend come by and ask, and the hero answer with `worry` (a template for direct speech, "I ...")."""
    t.tell(
        "Just then, {f.called} came by.",
        "Not long after, {f.called} looked around the corner.",
        "There came {f.called}, humming a song.",
        "Soon {f.called} heard {h.him} and came closer.",
        "After a while, {h} met {f.called}.",
        "Then {f.called} walked up to {h.him}.",
        "Luckily, {f.called} was not far away.",
    )
    t.tell(
        '"What is wrong, {h}?" asked {f}.',
        '"Why do you look so sad?" asked {f}.',
        '"Can I help you?" {f} asked.',
        '"Hello, {h}! What happened?" said {f}.',
        '"Please do not cry," said {f}. "Tell me what happened."',
    )
    t.tell(f'"{worry}" said {{h}}.', f'"{worry}" {{h}} answered.', f'"{worry}" {{h}} said with a small voice.')


def thanks(t: Telling) -> None:
    """Let the hero thank the friend, and perhaps share a meal."""
    t.tell(
        '"Thank you, thank you!" cried {h}.',
        '"You did it!" shouted {h}. "Thank you, {f.call}!"',
        '"I am so glad that I met you," said {h}.',
        '"Thank you so much," said {h}. "You are a true friend."',
        '{h} hugged {f}. "I will never forget this," {h.he} said.',
        '"How can I thank you?" asked {h}. "Just be my friend," said {f}.',
        "{h} was so happy that {h.he} danced around {f}.",
    )
    if "robot" not in (t.cast["h"].noun, t.cast["f"].noun) and t.draw.chance(1, 2):
        t.pick("food", FOODS)
        t.tell(
            "Then they sat down and shared some {food}.",
            "{h} ran home and came back with {food} for both of them.",
            "{h} gave {f} some {food}, and they ate together.",
            "To say thank you, {h} brought {f} a basket full of {food}.",
        )


def goodbye(t: Telling, *own: str) -> None:
    """End the story: with one of the plot's own last sentences, or with one that fits every story of two friends."""
    t.tell(
        *own,
        *own,
        "From that day on, {h} and {f} were the best of friends.",
        "And {h} and {f} are still friends today.",
        "When the sun went down, {h} and {f} were still laughing.",
        "It was a day that {h} never forgot.",
        "That night, {h} went to bed with a smile.",
        "{h} and {f} laughed all the way home.",
    )
    t.maybe("The end.")
