"""How large the stream is at every depth."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mainstem.measure._host import HostReducer, SplitSums
from mainstem.measure._results import Result, Split
from mainstem.measure.events import BlockEvent, HostBatch
from mainstem.measure.sketch import QuantileSketch

OUTLIER_FACTOR = 5.0
"""A token is an outlier of a state where its norm exceeds this many times the median norm of the rest."""

NUM_NAMED = 8
"""Of the outlier tokens, how many are named for each state."""


@dataclasses.dataclass(frozen=True, order=True)
class NamedNorm(Result):
    """Norm of one token of a state.

    Attributes:
        norm: ``|h_t|``.
        sequence: number of its sequence in the text.
        position: its place in the sequence, 0-based, padding not counted.
        token_id: its id, None for a model that reads no tokens.
    """

    norm: float
    sequence: int
    position: int
    token_id: int | None


@dataclasses.dataclass(frozen=True)
class StateNorm(Result):
    """Norms ``|h_t|`` of one state, over real tokens; the first token of each sequence apart.

    Attributes:
        state: ``l``: before block ``l``; the last one is after the last block, before any final norm.
        mean: exact, fp64 sums.
        median: of the rest, within 2.5e-4 relative, as are all quantiles.
        p5: 5th percentile of the rest.
        p95: 95th percentile of the rest.
        first_median: median over the first tokens.
        num_nonfinite: real tokens whose norm is nan or inf. nan has no rank; inf ranks last.
        num_outliers: tokens of the rest beyond 5 x the median.
        mean_without_outliers: mean over the other tokens of the rest, within 2.5e-4 relative.
        outliers: the largest of them, at most 8, largest first.
    """

    state: int
    mean: Split
    median: float
    p5: float
    p95: float
    first_median: float
    num_nonfinite: int
    num_outliers: int
    mean_without_outliers: float
    outliers: tuple[NamedNorm, ...]


@dataclasses.dataclass(frozen=True)
class StreamNormResult(Result):
    """One entry a state, ``0 .. num_blocks``."""

    states: tuple[StateNorm, ...]


class StreamNorms(HostReducer):
    """Distribution over tokens of the stream's norm, for every state. See `StateNorm`.

    Several streams are measured as one vector of length ``n * width``.
    """

    name = "stream_norms"
    saved = ("_sums", "_sketch", "_largest")

    def __init__(self) -> None:
        super().__init__()
        self._sums = SplitSums()
        self._sketch = QuantileSketch()  # lanes 2l: rest of state l; 2l + 1: first tokens
        self._largest: dict[int, list[NamedNorm]] = {}

    def collect(self, event: BlockEvent) -> None:
        """Send the norms of one block's states."""
        for state, x in event.states():
            self.send(state, None, [event.geometry.norm(x)])

    def take(self, indices: list[int], key: Any, arrays: list[NDArray[Any]], host: HostBatch) -> None:
        """Add the ``[norm]`` of each state."""
        (norms,) = arrays
        self._sums.add(indices, norms, host)
        self._sketch.grow(2 * max(indices) + 2)
        rest = norms.take(host.rest, axis=1)
        self._sketch.update_lanes(rest, [2 * index for index in indices])
        self._sketch.update_lanes(norms.take(host.first, axis=1), [2 * index + 1 for index in indices])
        if rest.shape[1] > NUM_NAMED:
            chosen = np.argpartition(-rest, NUM_NAMED, axis=1)[:, :NUM_NAMED]
        else:
            chosen = np.broadcast_to(np.arange(rest.shape[1]), rest.shape)
        places, sizes = host.rest[chosen], np.take_along_axis(rest, chosen, axis=1)
        for index, place, size in zip(indices, places.tolist(), sizes.tolist(), strict=True):
            self._name(index, place, size, host)

    def _name(self, state: int, places: list[int], norms: list[float], host: HostBatch) -> None:
        """Offer some tokens as the largest of a state."""
        named = self._largest.setdefault(state, [])
        floor = named[-1].norm if len(named) == NUM_NAMED else -math.inf
        found = [
            NamedNorm(norm, int(host.sequence[p]), int(host.position[p]), host.token_id(p))
            for p, norm in zip(places, norms, strict=True)
            if norm >= floor
        ]
        if found:
            self._largest[state] = _largest(named + found)

    def merge(self, other: Self) -> None:
        """Add what ``other`` has seen."""
        self._sums.merge(other._sums)
        self._sketch.merge(other._sketch)
        for state, named in other._largest.items():
            self._largest[state] = _largest(self._largest.get(state, []) + named)

    def result(self) -> StreamNormResult:
        """The figures so far."""
        return StreamNormResult(tuple(self._state(state) for state in sorted(self._sums.names)))

    def _state(self, state: int) -> StateNorm:
        rest, first, sketch = 2 * state, 2 * state + 1, self._sketch
        median = sketch.quantile(0.5, rest)
        num_outliers, _ = sketch.above(OUTLIER_FACTOR * median, rest)
        num_all, total = sketch.above(0.0, rest)
        outliers, outlier_total = sketch.above(OUTLIER_FACTOR * median, rest)
        others = num_all + sketch.num_zero(rest) - outliers
        return StateNorm(
            state=state,
            mean=self._sums.mean(state),
            median=median,
            p5=sketch.quantile(0.05, rest),
            p95=sketch.quantile(0.95, rest),
            first_median=sketch.quantile(0.5, first),
            num_nonfinite=sum(sketch.num_nan(lane) + sketch.num_infinite(lane) for lane in (rest, first)),
            num_outliers=num_outliers + sketch.num_infinite(rest),
            mean_without_outliers=(total - outlier_total) / others if others else math.nan,
            outliers=tuple(n for n in self._largest[state] if n.norm > OUTLIER_FACTOR * median)
            if state in self._largest
            else (),
        )


def _largest(named: list[NamedNorm]) -> list[NamedNorm]:
    # Ties go to the earlier token, so that the order of merging does not show.
    return sorted(named, key=lambda n: (-n.norm, n.sequence, n.position))[:NUM_NAMED]
