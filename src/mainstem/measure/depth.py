"""How much of the depth is used, with how far the answer depends on the threshold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from mainstem.errors import ConfigError
from mainstem.measure._results import Result


@dataclasses.dataclass(frozen=True)
class Crossing(Result):
    """Where a curve falls below a share of its largest value.

    Attributes:
        threshold: the share.
        first: first block after which it is below, as Hu et al. (arXiv 2512.14064) count their ED_KL; one
            early dip is enough.
        settled: first block from which on it stays below.
    """

    threshold: float
    first: int | None
    settled: int | None


@dataclasses.dataclass(frozen=True)
class EffectiveDepth(Result):
    """A curve over the blocks in a few figures.

    Attributes:
        area: ``mean_l (k_l / max k)``: 0 where all but nothing is left to do from the first block on, near 1
            where the answer comes only at the end. It needs no threshold.
        crossings: one a threshold.
    """

    area: float
    crossings: tuple[Crossing, ...]


def effective_depth(
    curve: Sequence[float], thresholds: Sequence[float] = (0.1, 0.25, 0.5, 0.75)
) -> EffectiveDepth:
    """Say where ``curve`` (such as the lens's KL after each block, ending at 0) has fallen.

    Args:
        curve: at least one value, none negative; where one is not finite every figure is nan or None.
        thresholds: shares of the largest value, between 0 and 1.

    Raises:
        ConfigError: the curve is empty or a threshold is not between 0 and 1.
    """
    if not curve or not all(0 < t < 1 for t in thresholds):
        raise ConfigError(
            f"A curve of {len(curve)} values with thresholds {tuple(thresholds)} was given; it needs a value "
            "and thresholds between 0 and 1."
        )
    top = max(curve)
    if not all(map(math.isfinite, curve)) or top <= 0:
        return EffectiveDepth(math.nan, tuple(Crossing(t, None, None) for t in thresholds))
    return EffectiveDepth(
        area=math.fsum(curve) / top / len(curve),
        crossings=tuple(_crossing(curve, t, top) for t in thresholds),
    )


def _crossing(curve: Sequence[float], threshold: float, top: float) -> Crossing:
    below = [value < threshold * top for value in curve]
    first = below.index(True) if any(below) else None
    settled = len(below)
    while settled and below[settled - 1]:
        settled -= 1
    return Crossing(threshold, first, settled if settled < len(below) else None)


def random_walk_angle(write_ratio: float) -> float:
    """Return ``arctan(|w| / |h|) / pi``: the angle between ``h`` and ``h + w`` for a write at right angles.

    What a random write of this size gives in a wide stream (two random directions are at right angles but for
    ``1 / sqrt(width)``). Accumulation alone makes later states alike: an angular distance means something
    only beside this one.
    """
    return math.atan(write_ratio) / math.pi
