"""Draws quality against size as an SVG picture: bits per weight and divergence, a point for each file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

LEAST = 1e-9  # nats; less is the rounding of sums
WIDTH, HEIGHT = 720, 460
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 64, 56  # margins of the area with the points, in pixels
FONT = "font-family: sans-serif; font-size: 13px"
LETTER, LINE = 7.2, 15  # the size of a letter, estimated, to keep labels apart
# Each series: its color and the path of its mark, around (0, 0).
SERIES = {
    "llamac": ("#1f5fa8", "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z"),
    "GGUF": ("#c2570c", "M-5 -5H5V5H-5Z"),
}


class Point(NamedTuple):
    """A file.

    Attributes:
        label: Its name.
        series: A key of `SERIES`.
        bits: Bits per weight.
        nats: The mean divergence, at least `LEAST`.
    """

    label: str
    series: str
    bits: float
    nats: float


class Box(NamedTuple):
    """The place of a label or a mark, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        return not (
            self.right <= other.left or other.right <= self.left or self.bottom <= other.top or other.bottom <= self.top
        )


def draw(points: Sequence[Point], title: str) -> str:
    """Draw the points.

    Args:
        points: At least one.
        title: The line above the picture.

    Returns:
        An SVG document. The divergence has a logarithmic scale.
    """
    first_bits, last_bits = _span([point.bits for point in points], 1)
    first_power, last_power = _span([math.log10(point.nats) for point in points], 1)

    def x(bits: float) -> float:
        return LEFT + (bits - first_bits) / (last_bits - first_bits) * (WIDTH - LEFT - RIGHT)

    def y(power: float) -> float:
        return TOP + (last_power - power) / (last_power - first_power) * (HEIGHT - TOP - BOTTOM)

    parts = [_text(WIDTH / 2, 24, title, "middle", "font-weight: bold")]
    for number in range(first_bits, last_bits + 1, max(1, (last_bits - first_bits) // 12)):
        parts.append(_line(x(number), TOP, x(number), HEIGHT - BOTTOM))
        parts.append(_text(x(number), HEIGHT - BOTTOM + 18, str(number), "middle"))
    for power in range(first_power, last_power + 1):
        parts.append(_line(LEFT, y(power), WIDTH - RIGHT, y(power)))
        parts.append(_text(LEFT - 8, y(power) + 4, f"{10.0**power:g}", "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "bits per weight", "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    rotated = f'transform="rotate(-90 18 {middle:g})"'
    parts.append(_text(18, middle, "KL divergence, nats per token", "middle", attributes=rotated))
    parts += _legend(points)
    places = [(x(point.bits), y(math.log10(point.nats))) for point in points]
    taken = [Box(left - 6, top - 6, left + 6, top + 6) for left, top in places]
    for point, (left, top) in zip(points, places, strict=True):
        color, mark = SERIES[point.series]
        parts.append(f'<path d="{mark}" transform="translate({left:.1f} {top:.1f})" fill="{color}"/>')
        box = _place(point.label, left, top, taken)
        taken.append(box)
        if not Box(left - 10, top - 10, left + 10, top + 10).overlaps(box):
            end = min(max(left, box.left), box.right), box.bottom if box.bottom < top else box.top
            parts.append(_line(left, top, *end, color))
        parts.append(_text(box.left, box.bottom - 3, point.label, "start", f"fill: {color}"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"


def _span(values: Sequence[float], step: int) -> tuple[int, int]:
    """Integers around all values, at least `step` apart."""
    first, last = math.floor(min(values)), math.ceil(max(values))
    return first, max(last, first + step)


def _place(label: str, left: float, top: float, taken: Sequence[Box]) -> Box:
    """A free place for the label of a mark: beside it, above, below, or further away."""
    width = LETTER * len(label)
    beside, before, centered = left + 9, left - 9 - width, left - width / 2
    places = [(beside, top - LINE / 2), (before, top - LINE / 2), (centered, top - 8 - LINE), (centered, top + 8)]
    for step in range(1, 9):
        for row in (top - LINE / 2 - step * LINE, top - LINE / 2 + step * LINE):
            places += [(beside, row), (before, row), (centered, row)]
    boxes = [Box(a, b, a + width, b + LINE) for a, b in places]
    inside = [box for box in boxes if box.left >= LEFT and box.right <= WIDTH and TOP <= box.top < HEIGHT - BOTTOM]
    free = [box for box in inside if not any(box.overlaps(other) for other in taken)]
    return (free or inside or boxes)[0]


def _legend(points: Sequence[Point]) -> list[str]:
    """A mark and a name for each series, below the title."""
    parts, left = [], float(LEFT)
    for series in SERIES:
        if any(point.series == series for point in points):
            color, mark = SERIES[series]
            parts.append(f'<path d="{mark}" transform="translate({left + 6:g} 45)" fill="{color}"/>')
            parts.append(_text(left + 17, 50, series, "start"))
            left += 40 + LETTER * len(series)
    return parts


def _line(left: float, top: float, right: float, bottom: float, color: str = "#d8d8d8") -> str:
    return f'<path d="M{left:.1f} {top:.1f}L{right:.1f} {bottom:.1f}" stroke="{color}"/>'


def _text(x: float, y: float, text: str, anchor: str, style: str = "", attributes: str = "") -> str:
    styles = f"{FONT}; {style}" if style else FONT
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} style="{styles}"{" " if attributes else ""}{attributes}>{escape(text)}</text>'
