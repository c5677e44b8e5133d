"""Places and labels along an axis of a chart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from mainstem.report.figure import Axis, Number

MOST_TICKS = 6
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclasses.dataclass(frozen=True)
class Scale:
    """A range of figures laid onto a range of pixels.

    Attributes:
        low, high: the figures at both ends, both above zero on a log scale.
        start, end: pixels there; ``end`` is below ``start`` on an axis that goes up.
        kind: how figures are spaced.
    """

    low: float
    high: float
    start: float
    end: float
    kind: Literal["linear", "log"] = "linear"

    def at(self, value: float) -> float:
        """Return the pixel of a figure; beyond the ends it is that of the end."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.kind == "log":
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (self.end - self.start) * (value - low) / (high - low)


def domain_of(axis: Axis, values: Iterable[Number]) -> tuple[float, float]:
    """Return the limits of an axis: its own, or those of the figures that can be placed on it."""
    if axis.domain is not None:
        return axis.domain
    found = [v for v in values if v is not None and math.isfinite(v) and (axis.scale == "linear" or v > 0)]
    if not found:
        return (0.1, 1.0) if axis.scale == "log" else (0.0, 1.0)
    low, high = min(found), max(found)
    if axis.scale == "log":
        return (low / 1.25, high * 1.25)
    if axis.floors:
        return (low, max(high, low + 1))
    margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return (0.0 if 0 <= low < margin else low - margin, high + margin)


def ticks(axis: Axis, scale: Scale) -> list[float]:
    """Return the figures that get a label, at most about six."""
    if axis.floors:
        return _floors(scale.low, scale.high)
    return _decades(scale.low, scale.high) if scale.kind == "log" else _even(scale.low, scale.high)


def _floors(low: float, high: float) -> list[float]:
    number = high - low
    steps = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
    step = next((s for s in steps if number / s <= 9), math.ceil(number / 9))
    first = math.ceil(low / step) * step
    return [float(v) for v in range(first, math.floor(high) + 1, step)]


def _even(low: float, high: float) -> list[float]:
    rough = (high - low) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 2:
        step = math.ceil((last - first + 1) / MOST_TICKS)
        return [10.0**n for n in range(first, last + 1, step)]
    fine = [m * 10.0**n for n in range(first - 1, last + 1) for m in (1, 2, 5)]
    within = [v for v in fine if low <= v <= high]
    return within if len(within) >= 2 else _even(low, high)


def label(value: float) -> str:
    """Return a figure as an axis has it: ``0``, ``0.001``, ``10⁻⁵``, ``2,000``."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{round(value, 10):,g}" if abs(value) < 1000 else f"{value:,.0f}"
    digits, _, power = f"{value:.1e}".partition("e")
    times = "" if digits == "1.0" else f"{digits.removesuffix('.0')}·"
    return f"{times}10{str(int(power)).translate(_RAISED)}"


def shared_domain(axis: Axis, columns: Sequence[Sequence[Number]]) -> tuple[float, float] | None:
    """Return limits that hold all columns; None where none of them can be placed on the axis."""
    values = [v for column in columns for v in column]
    placed = [v for v in values if v is not None and math.isfinite(v) and (axis.scale == "linear" or v > 0)]
    return domain_of(axis, values) if placed else None
