"""Per-token figures are made where the tensor lives and summed on the host in fp64."""

from __future__ import annotations

import abc
import math
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mainstem.measure._results import Split
from mainstem.measure.events import Batch, HostBatch, Reducer

Floats: TypeAlias = NDArray[np.floating[Any]]


class HostReducer(Reducer):
    """A reducer whose ``update`` makes small per-token tensors and whose ``take`` sums them on the host.

    On a CPU they are taken at once. On an accelerator they wait until the pass is complete, so that no block
    waits for a device synchronisation; what waits is a few numbers a token and block.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Hashable, Sequence[Tensor]]] = []

    def send(self, index: int, key: Hashable, tensors: Sequence[Tensor], batch: Batch) -> None:
        """Hand small tensors of block or state ``index`` to ``take``, now or at the end of the pass."""
        if _on_host(tensors):
            self.take(index, key, [t.numpy() for t in tensors], batch.host)
        else:
            self._waiting.append((index, key, tensors))

    def end_pass(self, batch: Batch) -> None:
        """Take in what waits."""
        for index, key, tensors in self._waiting:
            self.take(index, key, [t.cpu().numpy() for t in tensors], batch.host)
        self._waiting.clear()

    @abc.abstractmethod
    def take(self, index: int, key: Any, arrays: list[NDArray[Any]], host: HostBatch) -> None:
        """Add arrays of block or state ``index``, each ``[batch * pos]`` unless the class says otherwise."""


def _on_host(tensors: Sequence[Tensor]) -> bool:
    return all(t.device.type == "cpu" for t in tensors)


class SplitSums:
    """Sums and counts in fp64, the first tokens and the rest apart, for any number of named figures."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, NDArray[np.float64]] = {}

    def add(self, key: Hashable, values: Floats, host: HostBatch) -> None:
        """Add a per-token figure ``[batch * pos]``; padding is left out, nan and inf are kept."""
        rest, first = values[host.rest], values[host.first]
        self.add_sums(key, _sum(rest), rest.size, _sum(first), first.size)

    def add_sums(self, key: Hashable, rest: float, num_rest: float, first: float, num_first: float) -> None:
        """Add ready sums with the weights they are to be divided by."""
        sums = self._sums.setdefault(key, np.zeros(4))
        sums += (rest, num_rest, first, num_first)

    def merge(self, other: SplitSums) -> None:
        """Add another's sums."""
        for key, sums in other._sums.items():
            mine = self._sums.setdefault(key, np.zeros(4))
            mine += sums

    @property
    def names(self) -> list[Any]:
        """Names of the figures, in the order in which they first came."""
        return list(self._sums)

    def mean(self, key: Hashable) -> Split:
        """The means; nan where there was no token."""
        if key not in self._sums:
            return Split.undefined()
        rest, num_rest, first, num_first = (float(v) for v in self._sums[key])
        total, num = rest + first, num_rest + num_first
        return Split(ratio(rest, num_rest), ratio(first, num_first), ratio(total, num))


def _sum(values: Floats) -> float:
    # inf - inf among the values is a nan to be reported, not a fault of the sum.
    with np.errstate(invalid="ignore", over="ignore"):
        return float(values.sum(dtype=np.float64))


def ratio(total: float, weight: float) -> float:
    """``total / weight``, nan for no weight."""
    return total / weight if weight else math.nan


def cosine(dot: Floats, one: Floats, other: Floats) -> NDArray[np.float64]:
    """``dot / (|one| |other|)`` in fp64, clamped to [-1, 1]; 0 for a zero vector, nan for one not finite."""
    product = one.astype(np.float64) * other
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        value = np.where(product == 0, 0.0, dot / product)
        # inf / inf is nan already; a finite product under an infinite dot would otherwise be clamped to 1.
        value = np.where(np.isfinite(dot) & np.isfinite(product), value, np.nan)
    return np.clip(value, -1.0, 1.0)


def relative_size(size: Floats, reference: Floats) -> NDArray[np.float64]:
    """``size / max(reference, 1e-6)`` in fp64 (the clamp of Csordas et al. 2025, arXiv 2505.13898)."""
    with np.errstate(invalid="ignore"):
        return size.astype(np.float64) / np.maximum(reference.astype(np.float64), 1e-6)
