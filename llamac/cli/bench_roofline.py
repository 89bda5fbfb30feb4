"""The picture of `llamac bench --roofline`: measured speeds under the machine's limits, as SVG.

Both axes are logarithmic. To the right, the multiply-adds of a step for each byte that it reads; upwards, multiply-adds
per second. No step can be above the slope, which is the speed of reading, nor above the line of its number format.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

from llamac.cli.bench_tables import row_name
from llamac.cli.text import safe_line

WIDTH, HEIGHT = 760, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 50, 60
COLORS = ("#1b6ca8", "#c2410c", "#15803d", "#7e22ce", "#b45309", "#0f766e")
STYLE = (
    "text{font:12px sans-serif;fill:#222}.title{font-size:15px}.grid{stroke:#ddd}.limit{fill:none;stroke-width:2}"
    ".point{stroke:#fff}"
)


class Axes:
    """Maps multiply-adds per byte, and multiply-adds per second, to places in the picture.

    Args:
        x: The least and the greatest value to the right.
        y: The least and the greatest value upwards.
    """

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        # whole powers of ten around the values
        self.x, self.y = ((math.floor(math.log10(low)), math.ceil(math.log10(high))) for low, high in (x, y))

    def place(self, x: float, y: float) -> tuple[float, float]:
        """The place of a value, in pixels from the left and from the top."""
        right = (math.log10(x) - self.x[0]) / max(1, self.x[1] - self.x[0])
        up = (math.log10(y) - self.y[0]) / max(1, self.y[1] - self.y[0])
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return round(LEFT + right * width, 1), round(TOP + (1 - up) * height, 1)


def picture(report: dict[str, Any]) -> str:
    """Draw a report of `llamac bench`: the rows and the limits of its largest number of threads.

    Args:
        report: The report, with at least one row.

    Returns:
        An SVG document.
    """
    limits = max(report["limits"], key=lambda entry: entry["threads"])
    rows = [row for row in report["results"] if row["threads"] == limits["threads"]]
    read, peaks = limits["read_gb_s"] * 1e9, limits["mac_per_s"]
    points = [(row, row["multiply_adds"] / row["bytes"], row["mac_s"]) for row in rows]
    knees = [peak / read for peak in peaks.values()]
    xs, ys = [x for _, x, _ in points] + knees, [y for _, _, y in points] + list(peaks.values())
    axes = Axes((min(xs) / 2, max(xs) * 2), (min(ys) / 2, max(ys)))
    parts = [*_grid(axes), *_limits(axes, read, peaks), *_points(axes, points, list(peaks), report["model"]["dtype"])]
    threads = f"{limits['threads']} thread{'s' if limits['threads'] > 1 else ''}"
    title = f"{report['model']['name']}: {report['model']['dtype']}, {report['isa']}, {threads}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            _text(LEFT, 28, title, ' class="title"'),
            *parts,
            "</svg>\n",
        ]
    )


def _grid(axes: Axes) -> list[str]:
    """Lines and labels at powers of ten, and the names of the axes."""
    parts = []
    bottom, top = 10.0 ** axes.y[0], 10.0 ** axes.y[1]
    left, right = 10.0 ** axes.x[0], 10.0 ** axes.x[1]
    for power in range(axes.x[0], axes.x[1] + 1):
        x, y = axes.place(10.0**power, bottom)
        parts.append(_line((x, y), axes.place(10.0**power, top)))
        parts.append(_text(x, y + 18, f"{10.0**power:g}", ' text-anchor="middle"'))
    for power in range(axes.y[0], axes.y[1] + 1):
        x, y = axes.place(left, 10.0**power)
        parts.append(_line((x, y), axes.place(right, 10.0**power)))
        parts.append(_text(x - 8, y + 4, f"{10.0 ** (power - 9):g}", ' text-anchor="end"'))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 16, "multiply-adds per byte read", ' text-anchor="middle"'))
    parts.append(_text(18, HEIGHT / 2, "G multiply-adds/s", f' transform="rotate(-90 18 {HEIGHT / 2})"'))
    return parts


def _limits(axes: Axes, read: float, peaks: dict[str, float]) -> list[str]:
    """The slope of reading, and for each number format the line of its multiply-adds from there on."""
    start = max(10.0 ** axes.x[0], 10.0 ** axes.y[0] / read)
    slope = [axes.place(start, start * read), axes.place(max(peaks.values()) / read, max(peaks.values()))]
    parts = [_limit(slope, "#555"), _text(slope[0][0] + 16, slope[0][1] - 4, f"reading: {read / 1e9:.3g} GB/s")]
    lowest = math.inf  # where the last label is: they must not cover each other
    for number, (dtype, peak) in sorted(enumerate(peaks.items()), key=lambda item: item[1][1]):
        ends = [axes.place(peak / read, peak), axes.place(10.0 ** axes.x[1], peak)]
        lowest = min(ends[1][1] + 4, lowest - 14)
        parts += [
            _limit(ends, _color(number)),
            _text(ends[1][0] + 6, lowest, f"{dtype}: {peak / 1e9:.3g} G/s", f' style="fill:{_color(number)}"'),
        ]
    return parts


def _limit(places: list[tuple[float, float]], color: str) -> str:
    path = " ".join(f"{x},{y}" for x, y in places)
    return f'<polyline class="limit" stroke="{color}" points="{path}"/>'


def _points(axes: Axes, points: list[tuple[dict[str, Any], float, float]], dtypes: list[str], main: str) -> list[str]:
    """A dot for each row, in the color of the model's main number format, with its name."""
    parts = []
    color = _color(dtypes.index(main)) if main in dtypes else _color(0)
    for row, x, y in points:
        name = row_name(row) + (f", {row['batch']} sequences" if row["batch"] > 1 else "")
        place = axes.place(x, y)
        detail = f"{name}: {row['tok_s']:.4g} tok/s, {row['share_of_limit']:.0%} of the limit"
        parts.append(
            f'<circle class="point" cx="{place[0]}" cy="{place[1]}" r="5" fill="{color}">'
            f"<title>{escape(detail)}</title></circle>"
        )
        if not row["sampling"]:  # it would cover the name of the row without draws
            parts.append(_text(place[0] + 8, place[1] + 4, name))
    return parts


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _line(start: tuple[float, float], end: tuple[float, float]) -> str:
    return f'<line class="grid" x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}"/>'


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}"{attributes}>{escape(safe_line(text))}</text>'
