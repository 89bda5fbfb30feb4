"""The generator of conversations. A conversation is a pure function of (seed, index, held_out, level).

`python -m models.training.helper.generator --count 3` prints conversations as the model sees them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from . import passages, records, talk, thinking, tools
from .conversation import Conversation
from .dice import Dice
from .rendering import render

# How often each kind of conversation is generated.
MIX: tuple[tuple[int, Callable[[Dice], Conversation]], ...] = (
    (4, talk.greets),
    (4, talk.remembers),
    (4, talk.unknown),
    (3, talk.persona),
    (2, talk.signs_off),
    (9, talk.instructions),
    (18, passages.answers),
    (4, passages.brief),
    (6, passages.unsaid),
    (12, thinking.thinks),
    (9, records.with_keys),
    (8, records.with_schema),
    (13, tools.calls),
    (10, tools.calls_many),
    (4, tools.no_call),
    (1, tools.answers_beside_tools),
    (4, tools.reports),
)
_CHOICES = tuple(kind for weight, kind in MIX for _ in range(weight))
KINDS = tuple(kind for _, kind in MIX)
SKILLS = (
    *("greets", "answers", "declines", "remembers", "follows", "thinks", "json", "schema"),
    *("calls", "calls_many", "no_call", "reports"),
)


def conversation(seed: int, index: int, *, held_out: bool = False, level: int = 2) -> Conversation:
    """Return conversation number `index` of the series `seed`."""
    dice = Dice(seed, index, held_out, level)
    return dice.choose(_CHOICES)(dice)


def of_kind(
    kind: Callable[[Dice], Conversation], seed: int, index: int, *, held_out: bool = False, level: int = 2
) -> Conversation:
    """Return conversation number `index` of the series `seed` of one kind."""
    return kind(Dice(seed, index, held_out, level))


def main() -> None:
    """Print conversations."""
    parser = argparse.ArgumentParser(
        prog="python -m models.training.helper.generator", description="Print conversations.", allow_abbrev=False
    )
    parser.add_argument("--seed", type=int, default=1, help="the series (default: 1)")
    parser.add_argument("--start", type=int, default=0, help="number of the first conversation (default: 0)")
    parser.add_argument("--count", type=int, default=1, help="how many conversations (default: 1)")
    parser.add_argument("--level", type=int, default=2, choices=(0, 1, 2), help="0: short, 2: long (default: 2)")
    parser.add_argument("--held-out", action="store_true", help="use the held-out words and phrases")
    arguments = parser.parse_args()
    for index in range(arguments.start, arguments.start + arguments.count):
        made = conversation(arguments.seed, index, held_out=arguments.held_out, level=arguments.level)
        print(f"--- {arguments.seed}:{index}, {made.skill}")
        print(render(made))


if __name__ == "__main__":
    main()
