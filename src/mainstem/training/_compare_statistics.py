"""Means, spreads and paired tests of a comparison's cells."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from mainstem.sources import require

LEVEL = 0.01
"""A difference is called one below this p."""

Verdict = Literal["lower", "higher", "no difference", "too few"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """The seeds of one connection at one depth.

    Attributes:
        losses: held-out loss at the end by seed, of those that did not diverge.
        mean, std: of the losses; the sample's, with n - 1. None where there are too few.
        diverged: seeds that stopped at a number that was not finite, or ended above the loss they began with.
        failed: seeds without a result.
    """

    connection: str
    depth: int
    losses: Mapping[int, float]
    mean: float | None
    std: float | None
    diverged: int
    failed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paired:
    """A connection against the baseline at the same depth, seed by seed.

    Attributes:
        differences: loss of the connection minus that of the baseline, by seed, where neither diverged.
        mean, std: of the differences.
        t, p: of the two-sided paired t-test that their mean is 0. None with fewer than two pairs.
        interval: in which the mean lies with a confidence of 1 - LEVEL.
        detectable: the smallest mean that would have been called a difference with this many pairs and this
            spread: half the interval.
        verdict: ``"lower"`` or ``"higher"`` where p < LEVEL, ``"no difference"`` where not, ``"too few"``
            where there is no test.
    """

    connection: str
    baseline: str
    depth: int
    differences: Mapping[int, float]
    mean: float | None
    std: float | None
    t: float | None
    p: float | None
    interval: tuple[float, float] | None
    detectable: float | None
    verdict: Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """How far seeds alone move the loss at one depth.

    Attributes:
        std: pooled over the connections: the root of the mean variance, weighed by degrees of freedom.
        degrees_of_freedom: seeds that did not diverge, less one for each connection.
    """

    depth: int
    std: float
    degrees_of_freedom: int


def spread(connection: str, depth: int, losses: Mapping[int, float], *, diverged: int, failed: int) -> Spread:
    """Summarise the seeds of one connection at one depth; ``losses`` holds those that did not diverge."""
    values = list(losses.values())
    return Spread(
        connection=connection,
        depth=depth,
        losses=dict(losses),
        mean=statistics.fmean(values) if values else None,
        std=statistics.stdev(values) if len(values) > 1 else None,
        diverged=diverged,
        failed=failed,
    )


def paired(one: Spread, baseline: Spread) -> Paired:
    """Test a connection against the baseline on the seeds that both finished.

    Seeds give both the same text in the same order and the same branches to begin with, so what a seed does
    to both cancels in the difference.
    Source: Student 1908; the distribution is that of :mod:`scipy.stats`.
    """
    found = {
        seed: loss - baseline.losses[seed] for seed, loss in one.losses.items() if seed in baseline.losses
    }
    values = list(found.values())
    n = len(values)
    mean = statistics.fmean(values) if values else None
    std = statistics.stdev(values) if n > 1 else None
    t = p = detectable = None
    interval: tuple[float, float] | None = None
    if mean is not None and std is not None:
        student = require("scipy.stats", feature="Comparing seeds", extra="train").t(n - 1)
        error = std / math.sqrt(n)
        if error > 0:
            t = mean / error
            p = float(2 * student.sf(abs(t)))
        else:  # all differences are the same number: surely none where it is 0, surely one where it is not
            p = 1.0 if mean == 0 else 0.0
        detectable = float(student.isf(LEVEL / 2)) * error
        interval = (mean - detectable, mean + detectable)
    return Paired(
        connection=one.connection,
        baseline=baseline.connection,
        depth=one.depth,
        differences=found,
        mean=mean,
        std=std,
        t=t,
        p=p,
        interval=interval,
        detectable=detectable,
        verdict=_verdict(mean, p),
    )


def _verdict(mean: float | None, p: float | None) -> Verdict:
    if mean is None or p is None:
        return "too few"
    if p >= LEVEL:
        return "no difference"
    return "lower" if mean < 0 else "higher"


def seed_noise(spreads: Sequence[Spread]) -> Noise | None:
    """Pool the spreads of one depth; None where no connection has two seeds that did not diverge."""
    parts = [(one.std, len(one.losses) - 1) for one in spreads if one.std is not None]
    degrees = sum(freedom for _, freedom in parts)
    if not degrees:
        return None
    variance = sum(std**2 * freedom for std, freedom in parts) / degrees
    return Noise(depth=spreads[0].depth, std=math.sqrt(variance), degrees_of_freedom=degrees)
