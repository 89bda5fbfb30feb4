"""The story generator. A story is a pure function of (seed, index) and knows its information content in bits.

`python -m models.training.generator --seed 1 --count 3` prints stories. It generates the training data of the built-in
models; nothing is stored.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from .adventures import brave, lost, race, trade
from .home import garden, gift, share, sound, truth
from .telling import Draw, Telling

PLOTS = (lost, trade, brave, race, share, sound, gift, truth, garden)


@dataclass(frozen=True)
class Story:
    """A story, the name of its plot, and the information in the random choices that led to it.

    `bits` is -log2 of the probability of this derivation. Where two derivations give the same text, the text is more
    likely than that, so `bits` is an upper bound of the text's own information, and its mean over many stories is an
    upper bound of the generator's entropy (a close one: the choices almost always show in the text).
    """

    text: str
    plot: str
    bits: float
    choices: int


def story(seed: int, index: int) -> Story:
    """Return story number `index` of the series `seed`."""
    draw = Draw(seed, index)
    telling = Telling(draw)
    plot = draw.choose(PLOTS)
    plot(telling)
    return Story(telling.text(), plot.__name__, draw.bits, draw.choices)


def stories(seed: int, start: int = 0) -> Iterator[Story]:
    """Yield the stories of a series from number `start` on, without end."""
    index = start
    while True:
        yield story(seed, index)
        index += 1


def main() -> None:
    """Print stories."""
    parser = argparse.ArgumentParser(
        prog="python -m models.training.generator", description="Print generated stories.", allow_abbrev=False
    )
    parser.add_argument("--seed", type=int, default=1, help="the series (default: 1)")
    parser.add_argument("--start", type=int, default=0, help="number of the first story (default: 0)")
    parser.add_argument("--count", type=int, default=1, help="how many stories (default: 1)")
    arguments = parser.parse_args()
    for index in range(arguments.start, arguments.start + arguments.count):
        told = story(arguments.seed, index)
        print(f"--- {arguments.seed}:{index}, {told.plot}, {told.choices} choices, {told.bits:.1f} bits")
        print(told.text)
        print()


if __name__ == "__main__":
    main()
