"""Charts as inline SVG: colours are the page's CSS variables, everything else is in the picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from html import escape

from mainstem.errors import MainstemError
from mainstem.report._axes import Scale, domain_of, label, ticks
from mainstem.report._colours import cividis, diverging
from mainstem.report._png import data_url
from mainstem.report._text import visible
from mainstem.report.figure import Axis, Bars, Chart, Grid, Lines, Number, Series

WIDTH, HEIGHT = 460, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 14, 46, 40
_LANE = 15
_DASH = {"dashed": "6 4", "dotted": "1.5 3.5"}


def draw(chart: Chart, name: str) -> str:
    """Return a chart as an ``<svg>`` element.

    Args:
        chart: lines, a grid or bars.
        name: what its inner ids begin with; unlike that of any other chart of the page.

    Raises:
        MainstemError: a tower, which the browser draws.
    """
    if isinstance(chart, Lines):
        return _lines(chart)
    if isinstance(chart, Grid):
        return _grid(chart, name)
    if isinstance(chart, Bars):
        return _bars(chart)
    raise MainstemError(f"A chart is a {chart.form!r}, which has no SVG; give lines, a grid or bars.")


def _lines(chart: Lines) -> str:
    y_axis, all_y = chart.y, [v for s in chart.series for v in (*s.y, *(s.low or ()), *(s.high or ()))]
    all_y += [level for _, level in chart.references]
    is_log = y_axis.scale == "log"
    zeros = sum(v is not None and v <= 0 for s in chart.series for v in s.y) if is_log else 0
    lost = sum(v is not None and not math.isfinite(v) for s in chart.series for v in s.y)
    top, bottom = _TOP + _LANE * (lost > 0), HEIGHT - _BOTTOM - _LANE * (zeros > 0)
    x = Scale(*domain_of(chart.x, [v for s in chart.series for v in s.x]), _LEFT, WIDTH - _RIGHT)
    y = Scale(*domain_of(y_axis, all_y), bottom, top, y_axis.scale)
    parts = [_frame(chart.x, x, y_axis, y, HEIGHT - _BOTTOM), _rules(y_axis, x, y)]
    if zeros:
        parts.append(_lane(HEIGHT - _BOTTOM - 7, "0"))
        parts.append(_text(WIDTH - _RIGHT, HEIGHT - 7, f"{zeros} at or below 0", anchor="end", css="small"))
    if lost:
        parts.append(_lane(_TOP + 4, "inf, NaN"))
        parts.append(_text(WIDTH - _RIGHT, 34.5, f"{lost} not finite", anchor="end", css="small"))

    def place(value: float) -> float:
        if not math.isfinite(value):
            return _TOP + 4
        return HEIGHT - _BOTTOM - 7 if is_log and value <= 0 else y.at(value)

    parts += [f'<path class="ref" d="M{_LEFT} {y.at(v):.1f}H{WIDTH - _RIGHT}"/>' for _, v in chart.references]
    parts += [_series(series, x, y, place) for series in reversed(chart.series)]  # the first on top
    return _svg(chart, HEIGHT, [*parts, _legend(chart)])


def _series(series: Series, x: Scale, y: Scale, place: Callable[[float], float]) -> str:
    points = [(x.at(a), None if b is None else place(b), b) for a, b in zip(series.x, series.y, strict=True)]
    parts = [_band(series, x, y)] if series.low is not None and series.high is not None else []
    # what lies in a lane is a mark of its own: a line from there would say that the figure is near
    on_line = [
        (a, b if v is not None and math.isfinite(v) and (v > 0 or y.kind == "linear") else None)
        for a, b, v in points
    ]
    marks = [(a, b) for a, b, _ in points if b is not None]
    if series.mark != "dots":
        dash = f' stroke-dasharray="{_DASH[series.mark]}"' if series.mark in _DASH else ""
        parts.append(f'<path class="line" d="{_path(on_line)}"{dash}/>')
        shown = dict(on_line)
        marks = [(a, b) for a, b in marks if shown.get(a) is None or len(marks) == 1]
    if marks:
        size = 2.6 if len(marks) <= 64 else 1.9
        parts.append(f'<path class="mark" d="{"".join(_mark(series.role, a, b, size) for a, b in marks)}"/>')
    return f'<g class="r-{series.role}">{"".join(parts)}</g>'


def _band(series: Series, x: Scale, y: Scale) -> str:
    runs: list[list[tuple[float, float, float]]] = [[]]
    for a, low, high in zip(series.x, series.low or (), series.high or (), strict=True):
        if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
            runs.append([])
        else:
            runs[-1].append((x.at(a), y.at(low), y.at(high)))
    shapes = (
        "M"
        + "L".join(f"{a:.1f} {b:.1f}" for a, _, b in run)
        + "L"
        + "L".join(f"{a:.1f} {b:.1f}" for a, b, _ in reversed(run))
        + "Z"
        for run in runs
        if run
    )
    return f'<path class="band" d="{"".join(shapes)}"/>'


def _path(points: Sequence[tuple[float, Number]]) -> str:
    """Return a line that is broken where there is no figure."""
    steps: list[str] = []
    is_open = False
    for a, b in points:
        if b is not None:
            steps.append(f"{'L' if is_open else 'M'}{a:.1f} {b:.1f}")
        is_open = b is not None
    return "".join(steps)


def _mark(role: str, a: float, b: float, size: float) -> str:
    if role == "feed_forward":
        return f"M{a:.1f} {b - size * 1.2:.1f}l{size * 1.2:.1f} {size * 2:.1f}h{-size * 2.4:.1f}z"
    if role == "other":
        return f"M{a - size:.1f} {b - size:.1f}h{2 * size:.1f}v{2 * size:.1f}h{-2 * size:.1f}z"
    return f"M{a - size:.1f} {b:.1f}a{size} {size} 0 1 0 {2 * size} 0a{size} {size} 0 1 0 {-2 * size} 0z"


def _frame(x_axis: Axis, x: Scale, y_axis: Axis, y: Scale, floor: float) -> str:
    """Return axes, ticks and labels; ``floor``: pixel of the x axis."""
    parts = [f'<path class="axis" d="M{x.start} {_TOP}V{floor}H{x.end}"/>']
    for value in ticks(y_axis, y):
        parts.append(_text(x.start - 6, y.at(value) + 3.5, _named(y_axis, value), anchor="end"))
    for value in ticks(x_axis, x):
        at = x.at(value)
        parts.append(f'<path class="axis" d="M{at:.1f} {floor}v4"/>')
        parts.append(_text(at, floor + 16, _named(x_axis, value), anchor="middle"))
    if x_axis.floors and (x.end - x.start) / (x.high - x.low) >= 6:
        minor = "".join(f"M{x.at(v):.1f} {floor}v2" for v in range(math.ceil(x.low), int(x.high) + 1))
        parts.append(f'<path class="axis" d="{minor}"/>')
    parts.append(_text((x.start + x.end) / 2, floor + 33, x_axis.label, anchor="middle"))
    parts.append(_upright(11, (_TOP + floor) / 2, y_axis.label))
    return "".join(parts)


def _rules(axis: Axis, x: Scale, y: Scale) -> str:
    return "".join(f'<path class="rule" d="M{x.start} {y.at(v):.1f}H{x.end}"/>' for v in ticks(axis, y))


def _named(axis: Axis, value: float) -> str:
    if axis.names is not None and value == int(value) and 0 <= value < len(axis.names):
        return axis.names[int(value)]
    return label(value)


def _lane(at: float, name: str) -> str:
    line = f'<path class="lane" d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}"/>'
    return line + _text(_LEFT - 6, at + 3.5, name, anchor="end", css="small")


def _legend(chart: Lines) -> str:
    """Say what is what; one series without a reference is what the title says."""
    if len(chart.series) + len(chart.references) < 2 and not any(s.low for s in chart.series):
        return ""
    signs: list[tuple[str, Callable[[float], str]]] = []
    for one in chart.series:
        signs.append((one.name, partial(_sign, one)))
    for says, _ in chart.references:
        signs.append((says, lambda at: f'<path class="ref" d="M{at:.1f} 31h16"/>'))
    parts: list[str] = []
    at = float(_LEFT)
    for name, sign in signs:
        parts.append(sign(at) + _text(at + 20, 34.5, name))
        at += 32 + 5.6 * len(name)
    return "".join(parts)


def _sign(series: Series, at: float) -> str:
    sign = f'<path class="mark" d="{_mark(series.role, at + 8, 31, 3)}"/>'
    if series.mark != "dots":
        dash = f' stroke-dasharray="{_DASH[series.mark]}"' if series.mark in _DASH else ""
        sign = f'<path class="line" d="M{at:.1f} 31h16"{dash}/>'
    return f'<g class="r-{series.role}">{sign}</g>'


def _grid(chart: Grid, name: str) -> str:
    rows, columns = len(chart.values), max(map(len, chart.values))
    low, high = domain_of(chart.colour, [v for row in chart.values for v in row])
    if chart.diverging:
        low, high = -max(abs(low), abs(high)), max(abs(low), abs(high))
    shade = Scale(low, high, 0.0, 1.0, chart.colour.scale)
    colour = diverging if chart.diverging else cividis

    def pixel(value: Number) -> tuple[int, int, int, int]:
        if value is None or not math.isfinite(value):
            return (0, 0, 0, 0)
        is_below = chart.colour.scale == "log" and value <= 0
        return (*colour(0.0 if is_below else shade.at(value)), 255)

    nothing: list[Number] = [None]
    image = data_url(
        [[pixel(v) for v in (*row, *nothing * (columns - len(row)))] for row in reversed(chart.values)]
    )
    side = 290
    height = _TOP + side + _BOTTOM
    x = Scale(-0.5, columns - 0.5, _LEFT, _LEFT + side)
    y = Scale(-0.5, rows - 0.5, _TOP + side, _TOP)
    bar = data_url([[(*colour(1 - n / 63), 255)] for n in range(64)])
    at, levels = _LEFT + side + 22, Scale(low, high, _TOP + side, _TOP, chart.colour.scale)
    parts = [
        f'<defs><pattern id="{name}-none" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path class="rule" d="M0 0V6"/></pattern></defs>'
        f'<rect x="{_LEFT}" y="{_TOP}" width="{side}" height="{side}" fill="url(#{name}-none)"/>',
        _image(image, _LEFT, _TOP, side, side),
        _frame(chart.x, x, chart.y, y, _TOP + side),
        _image(bar, at, _TOP, 14, side),
        *(
            _text(at + 19, levels.at(v) + 3.5, label(v))
            for v in ticks(Axis(label="", scale=chart.colour.scale), levels)
        ),
        _upright(WIDTH - 12, _TOP + side / 2, chart.colour.label),
        _text(
            _LEFT,
            34.5,
            f"colours from {label(float(f'{low:.3g}'))} to {label(float(f'{high:.3g}'))}; hatched: no figure",
            css="small",
        ),
    ]
    return _svg(chart, height, parts)


def _image(url: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<image href="{url}" x="{x}" y="{y}" width="{width}" height="{height}" '
        'preserveAspectRatio="none" style="image-rendering:pixelated"/>'
    )


def _bars(chart: Bars) -> str:
    step, left = 17, 150
    height = _TOP + step * len(chart.labels) + _BOTTOM
    values = [v for v in chart.values if v is not None and math.isfinite(v)]
    low, high = domain_of(chart.x, [*values, 0.0])
    x = Scale(min(low, 0.0), max(high, 0.0), left, WIDTH - 50)
    zero, floor = x.at(0.0), _TOP + step * len(chart.labels)
    parts = [f'<path class="axis" d="M{zero:.1f} {_TOP}V{floor}"/>']
    for number, (name, value, role) in enumerate(zip(chart.labels, chart.values, chart.roles, strict=True)):
        top = _TOP + step * number
        parts.append(_text(left - 8, top + 12, _short(name, 22), anchor="end"))
        if value is None or not math.isfinite(value):
            parts.append(_text(zero + 4, top + 12, "not finite", css="small"))
            continue
        end = x.at(value)
        parts.append(
            f'<g class="r-{role}"><path class="mark" '
            f'd="M{zero:.1f} {top + 3}H{end:.1f}v{step - 6}H{zero:.1f}z"/></g>'
        )
        parts.append(_text(max(zero, end) + 4, top + 12, f"{value:+.3g}"))
    parts.append(_text((x.start + x.end) / 2, floor + 18, chart.x.label, anchor="middle"))
    if chart.total is not None:
        parts.append(_text(left, 34.5, f"together {chart.total:+.4g}", css="small"))
    return _svg(chart, height, parts)


def _text(x: float, y: float, says: str, *, anchor: str = "start", css: str = "") -> str:
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="t {css}" x="{x:.1f}" y="{y:.1f}"{where}>{escape(visible(says))}</text>'


def _upright(x: float, y: float, says: str) -> str:
    """Return text that reads upwards, its middle at a place."""
    return (
        f'<text class="t" transform="translate({x} {y:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(_short(says, 42))}</text>"
    )


def _short(text: str, most: int) -> str:
    text = visible(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _svg(chart: Lines | Grid | Bars, height: float, parts: Sequence[str]) -> str:
    """Return the whole picture; whose it is stands above its title."""
    title = _text(_LEFT, 15, _short(chart.title, 54), css="title")
    inner, extra = title + "".join(parts), 0
    if chart.subject:
        extra = 17
        subject = _text(_LEFT, 13, _short(chart.subject, 62), css="subject")
        inner = f'{subject}<g transform="translate(0 {extra})">{inner}</g>'
    says = escape(visible(f"{chart.subject}: {chart.title}" if chart.subject else chart.title))
    return f'<svg viewBox="0 0 {WIDTH} {height + extra:.0f}" role="img" aria-label="{says}">{inner}</svg>'
