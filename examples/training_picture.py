"""Draw what a StreamMonitor recorded: four grids, depth upwards, training to the right.

    python examples/training_picture.py out/monitored/stream.jsonl docs/pictures/training.svg

Colour is logarithmic between the limits printed beside each grid; a red cell was not finite, an empty one not
seen. Needs mainstem and the standard library only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mainstem.training import read_monitor

PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP_X, GAP_Y = 330, 190, 58, 46, 108, 66
INK, BAD = "#333333", "#D00000"
# Five stops of cividis (Nunez, Anderton and Renslow 2018), which colour-blind readers see alike.
CIVIDIS = [(0, 34, 78), (67, 78, 108), (125, 124, 120), (187, 174, 111), (254, 232, 56)]

Records = Sequence[Mapping[str, Any]]
Grid = list[list[float | None]]
"""Columns by record, each from the bottom up."""


def draw(records: Records) -> str:
    """Return the records as an SVG document."""
    panels: list[tuple[str, str, Grid]] = [
        ("Stream", "root mean square after each sublayer", [list(r["stream_rms"]) for r in records]),
        ("Gradient", "norm of d loss / d stream", [list(r["gradient_norm"]) for r in records]),
        ("Writes", "size beside the stream they join", [list(r["write_ratio"]) for r in records]),
        ("Updates", "of each block's parameters, relative", [list(r["update_ratio"]) for r in records]),
    ]
    steps = [record["step"] for record in records]
    spoilt = [record["non_finite"] is not None for record in records]
    parts: list[str] = []
    for number, (name, what, grid) in enumerate(panels):
        x = LEFT + number % 2 * (PANEL_WIDTH + GAP_X)
        y = TOP + number // 2 * (PANEL_HEIGHT + GAP_Y)
        parts.append(cells(x, y, grid, spoilt))
        parts.append(frame(x, y, f"{name}: {what}", steps, records[-1]["num_blocks"]))
        parts.append(scale(x + PANEL_WIDTH + 8, y, *limits(grid)))
    width, height = LEFT + 2 * PANEL_WIDTH + GAP_X + 74, TOP + 2 * PANEL_HEIGHT + GAP_Y + 52
    last = records[-1]
    worst = max((r["additivity"] for r in records if r["additivity"] is not None), default=None)
    books = "" if worst is None else f"; books balance to {'the bit' if worst == 0 else format(worst, '.0e')}"
    finite = f"{sum(spoilt)} records with numbers that are not finite" if any(spoilt) else "all finite"
    foot = f"{last['num_blocks']} blocks, steps {steps[0]} to {steps[-1]}, {last['tokens']:,} tokens a step"
    parts.append(text(LEFT, height - 10, f"{foot}; {finite}{books}"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Stream, gradient, writes and updates by depth through training">\n'
        f'<rect width="{width}" height="{height}" fill="#FFFFFF"/>\n{body}\n</svg>\n'
    )


def limits(grid: Grid) -> tuple[float, float]:
    """Return the least and the greatest figure of a grid."""
    known = [value for column in grid for value in column if value is not None and value > 0]
    return (min(known), max(known)) if known else (1.0, 1.0)


def cells(x: float, y: float, grid: Grid, spoilt: Sequence[bool]) -> str:
    """Return a grid: a column a record, depth upwards."""
    low, high = limits(grid)
    wide, rows = PANEL_WIDTH / len(grid), max(len(column) for column in grid)
    tall = PANEL_HEIGHT / max(rows, 1)
    parts: list[str] = []
    for i, column in enumerate(grid):
        for depth, value in enumerate(column):
            if value is None and not spoilt[i]:
                continue
            fill = BAD if value is None else colour(value, low, high)
            place = f'x="{x + i * wide:.1f}" y="{y + PANEL_HEIGHT - (depth + 1) * tall:.1f}"'
            parts.append(f'<rect {place} width="{wide + 0.3:.1f}" height="{tall + 0.3:.1f}" fill="{fill}"/>')
    return "\n".join(parts)


def frame(x: float, y: float, title: str, steps: Sequence[int], num_blocks: int) -> str:
    """Return title and axes."""
    below = y + PANEL_HEIGHT + 16
    size = f'width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}"'
    return "\n".join(
        [
            text(x, y - 10, title, weight="bold"),
            f'<rect x="{x}" y="{y}" {size} fill="none" stroke="{INK}"/>',
            text(x - 6, y + PANEL_HEIGHT, "0", anchor="end"),
            text(x - 6, y + 10, str(num_blocks), anchor="end"),
            text(x - 6, y + PANEL_HEIGHT / 2, "block", anchor="end"),
            text(x, below, f"step {steps[0]}"),
            text(x + PANEL_WIDTH, below, str(steps[-1]), anchor="end"),
        ]
    )


def scale(x: float, y: float, low: float, high: float) -> str:
    """Return what the colours mean."""
    tall = PANEL_HEIGHT / 20
    parts = [
        f'<rect x="{x}" y="{y + PANEL_HEIGHT - (i + 1) * tall:.1f}" width="10" height="{tall + 0.3:.1f}" '
        f'fill="{colour(low * (high / low) ** (i / 19), low, high)}"/>'
        for i in range(20)
    ]
    return "\n".join(
        [*parts, text(x + 14, y + PANEL_HEIGHT, f"{low:.2g}"), text(x + 14, y + 10, f"{high:.2g}")]
    )


def colour(value: float, low: float, high: float) -> str:
    """Return the colour of a value between limits, on a log scale."""
    if not value > 0:
        return "#FFFFFF"
    share = math.log(value / low) / math.log(high / low) if high > low else 0.5
    place = min(max(share, 0.0), 1.0) * (len(CIVIDIS) - 1)
    i = min(int(place), len(CIVIDIS) - 2)
    mixed = (round(a + (b - a) * (place - i)) for a, b in zip(CIVIDIS[i], CIVIDIS[i + 1], strict=True))
    return "#" + "".join(f"{channel:02X}" for channel in mixed)


def text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> str:
    """Return a line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-family="system-ui, sans-serif" font-size="12">{words}</text>'
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    target.write_text(draw(read_monitor(source)), encoding="utf-8")
    print(f"wrote {target}")
