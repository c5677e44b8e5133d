"""Quantiles of a stream of numbers with a promised relative error, from counts that merge exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import ConfigError
from mainstem.measure._state import storable

_LARGEST_LOG = np.nextafter(math.log(np.finfo(np.float64).max), 0)


@storable
class QuantileSketch:
    """Counts in logarithmic buckets, for several independent lanes of non-negative numbers.

    With error ``e`` and ``g = (1 + e) / (1 - e)``, a value ``x > 0`` is counted in bucket ``ceil(log_g x)``
    and stands for ``2 g^i / (g + 1)``, which differs from every value of bucket ``i`` by at most ``e``
    relative. Zeros, infinities and nans are counted apart, so that none of them is hidden. Buckets are fixed
    in advance: merging adds counts, and any order of updates and merges gives the same sketch.
    Memory: 8 bytes a bucket between the smallest and the largest value of a lane (``log(max / min) / 2e``
    buckets, 4,600 for a spread of ten at the default error).

    Masson, Rim, Lee, "DDSketch" (VLDB 2019, arXiv 1908.10693), section 2.1. Departures: no collapsing of the
    lowest buckets, and quantiles interpolate linearly between neighbours as ``numpy.quantile`` does, which
    keeps the error.

    Args:
        lanes: number of independent sketches.
        relative_error: the promised error, between 0 and 1.

    Raises:
        ConfigError: no lanes, or an error out of range.
    """

    def __init__(self, lanes: int = 1, relative_error: float = 2.5e-4):
        if lanes < 1 or not 0 < relative_error < 1:
            raise ConfigError(
                f"A sketch needs lanes >= 1 and 0 < error < 1; got {lanes} and {relative_error}."
            )
        self.relative_error = relative_error
        self._log_base = math.log1p(relative_error) - math.log1p(-relative_error)
        self._special = np.zeros((lanes, 3), dtype=np.int64)
        self._offsets = [0] * lanes
        self._counts: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64) for _ in range(lanes)]

    @property
    def lanes(self) -> int:
        """Number of independent sketches."""
        return len(self._counts)

    def grow(self, lanes: int) -> None:
        """Add empty lanes until there are ``lanes``."""
        extra = lanes - self.lanes
        if extra > 0:
            self._special = np.concatenate([self._special, np.zeros((extra, 3), dtype=np.int64)])
            self._offsets += [0] * extra
            self._counts += [np.zeros(0, dtype=np.int64) for _ in range(extra)]

    def update(self, values: NDArray[np.floating[Any]], lane: int = 0) -> None:
        """Count values of any shape in one lane.

        Raises:
            ValueError: a value is negative.
        """
        self.update_lanes(values.reshape(1, -1), [lane])

    def update_lanes(self, values: NDArray[np.floating[Any]], lanes: Sequence[int]) -> None:
        """Count values ``[len(lanes), any]``, each row in a lane of its own; faster than one after another.

        Raises:
            ValueError: a value is negative.
        """
        if values.size == 0:
            return
        # One fp32 logarithm is off by 1e-6 at |log x| = 16, half a percent of a bucket: fp64 keeps the
        # promise.
        with np.errstate(divide="ignore", invalid="ignore"):
            exponents = np.log(values, dtype=np.float64)
        finite: NDArray[np.bool_] = np.all(np.isfinite(exponents), axis=1)
        if not finite.all():
            negative = np.extract(values < 0, values)
            if negative.size:
                raise ValueError(f"A quantile sketch counts non-negative values; got {negative[0]}.")
        exponents /= self._log_base
        np.ceil(exponents, out=exponents)
        for row, lane in enumerate(lanes):
            whole = exponents[row]
            if not finite[row]:
                x = values[row]
                self._special[lane] += ((x == 0).sum(), np.isposinf(x).sum(), np.isnan(x).sum())
                whole = whole[np.isfinite(whole)]
            if whole.size:
                buckets = whole.astype(np.int64)
                low = int(buckets.min())
                buckets -= low
                self._add(lane, low, np.bincount(buckets))

    def _add(self, lane: int, low: int, counts: NDArray[np.int64]) -> None:
        mine, offset = self._counts[lane], self._offsets[lane]
        if mine.size == 0:
            self._counts[lane], self._offsets[lane] = counts.astype(np.int64), low
            return
        start = min(offset, low)
        stop = max(offset + mine.size, low + counts.size)
        if (start, stop) != (offset, offset + mine.size):
            wider = np.zeros(stop - start, dtype=np.int64)
            wider[offset - start : offset - start + mine.size] = mine
            self._counts[lane], self._offsets[lane] = wider, start
        self._counts[lane][low - start : low - start + counts.size] += counts

    def merge(self, other: Self) -> None:
        """Add another sketch's counts, lane by lane.

        Raises:
            ConfigError: the errors differ, so that buckets do not line up.
        """
        if other.relative_error != self.relative_error:
            raise ConfigError(
                f"Sketches of relative error {self.relative_error} and {other.relative_error} do not merge."
            )
        self.grow(other.lanes)
        self._special[: other.lanes] += other._special
        for lane, counts in enumerate(other._counts):
            if counts.size:
                self._add(lane, other._offsets[lane], counts)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of all lanes behind each other, where each begins, and its first bucket."""
        return {
            "relative_error": self.relative_error,
            "special": self._special,
            "offsets": self._offsets,
            "sizes": [counts.size for counts in self._counts],
            "counts": np.concatenate(self._counts),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the sketch that gave this state."""
        made = cls(len(state["offsets"]), state["relative_error"])
        made._special, made._offsets = state["special"], list(state["offsets"])
        ends = np.cumsum(state["sizes"])[:-1]
        made._counts = [counts.copy() for counts in np.split(state["counts"], ends)]
        return made

    def count(self, lane: int = 0) -> int:
        """Number of values that have a rank: all but nans."""
        return int(self._special[lane, :2].sum() + self._counts[lane].sum())

    def num_zero(self, lane: int = 0) -> int:
        """Number of zeros."""
        return int(self._special[lane, 0])

    def num_infinite(self, lane: int = 0) -> int:
        """Number of infinities."""
        return int(self._special[lane, 1])

    def num_nan(self, lane: int = 0) -> int:
        """Number of nans."""
        return int(self._special[lane, 2])

    def quantile(self, q: float, lane: int = 0) -> float:
        """The q-quantile, linear between ranks, within the relative error; nan without values.

        Raises:
            ValueError: q is not within [0, 1].
        """
        if not 0 <= q <= 1:
            raise ValueError(f"A quantile lies in [0, 1]; got {q}.")
        total = self.count(lane)
        if total == 0:
            return math.nan
        rank = q * (total - 1)
        cumulative = np.cumsum(self._counts[lane])
        low, high = (self._at_rank(r, lane, cumulative) for r in (math.floor(rank), math.ceil(rank)))
        return low if low == high else low + (rank - math.floor(rank)) * (high - low)

    def _at_rank(self, rank: int, lane: int, cumulative: NDArray[np.int64]) -> float:
        rank -= self.num_zero(lane)
        if rank < 0:
            return 0.0
        place = int(np.searchsorted(cumulative, rank, side="right"))
        if place == cumulative.size:
            return math.inf
        return float(self._values(np.array(self._offsets[lane] + place)))

    def _values(self, buckets: NDArray[np.int64]) -> NDArray[np.float64]:
        middle = buckets * self._log_base + math.log(2 / (1 + math.exp(self._log_base)))
        return np.exp(np.minimum(middle, _LARGEST_LOG))  # the last bucket's middle may lie beyond fp64

    def above(self, threshold: float, lane: int = 0) -> tuple[int, float]:
        """Number and sum of the finite values above a threshold, to the relative error of each."""
        counts = self._counts[lane]
        values = self._values(self._offsets[lane] + np.arange(counts.size))
        chosen = values > threshold
        return int(counts[chosen].sum()), float((counts[chosen] * values[chosen]).sum())
