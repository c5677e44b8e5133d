"""Per-token figures are made where the tensor lives and summed on the host in fp64."""

from __future__ import annotations

import abc
import math
import pickle
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.measure._results import Split
from mainstem.measure._state import storable
from mainstem.measure.events import Batch, BlockEvent, HostBatch, Reducer

Floats: TypeAlias = NDArray[np.floating[Any]]


BLOCKS_TOGETHER = 16
"""Blocks whose figures are summed together: what waits for it does not grow with depth."""


class HostReducer(Reducer):
    """A reducer whose ``collect`` makes small per-token tensors and whose ``take`` sums them on the host.

    They wait for ``BLOCKS_TOGETHER`` blocks, or the end of the pass, and are then taken together, stacked:
    few blocks wait for a device synchronisation, and what numpy costs is paid rarely. What waits is a few
    numbers a token and block, however wide the stream is and however deep the model: 10 for the default
    reducers together, which share them, 0.65 MB for 1,024 tokens in fp32. A pass that breaks off leaves no
    trace once the next begins, nor in a pickle; asked before that, the figures of a model deeper than those
    blocks hold what was summed of it.
    """

    def __init__(self) -> None:
        self._undo: bytes | None = None
        self._waiting: dict[Hashable, tuple[Hashable, list[int], list[Sequence[Tensor]]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # What waits belongs to a pass that is not complete: what travels to another rank or a file is the
        # sums.
        whole = vars(self) if self._undo is None else vars(pickle.loads(self._undo))
        return {**whole, "_waiting": {}, "_undo": None}

    def state_dict(self) -> dict[str, Any]:
        """Return what complete passes have left; see `Reducer.state_dict`."""
        return super().state_dict() if self._undo is None else pickle.loads(self._undo).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what was seen; a pass that is under way is dropped."""
        super().load_state_dict(state)
        self._undo, self._waiting = None, {}

    def update(self, event: BlockEvent) -> None:
        """Take in one block; block 0 begins a pass and drops what one that broke off has left."""
        if event.block == 0:
            self.forget_pass()
        self.collect(event)
        if (event.block + 1) % BLOCKS_TOGETHER == 0 and event.block + 1 < event.num_blocks:
            if self._undo is None:
                self._undo = pickle.dumps(self)
            self._take_waiting(event.batch)

    def forget_pass(self) -> None:
        """Drop what a pass has left that did not come to its end."""
        self._waiting = {}
        if self._undo is not None:
            vars(self).update(vars(pickle.loads(self._undo)))

    @abc.abstractmethod
    def collect(self, event: BlockEvent) -> None:
        """Make the small tensors of one block and ``send`` them."""

    def send(self, index: int, key: Hashable, tensors: Sequence[Tensor]) -> None:
        """Leave small tensors of block or state ``index`` for ``take`` at the end of the pass.

        Those of one key must be alike but for their dtype, or differ in number or in the last one's shape.
        """
        kind = (key, len(tensors), tensors[-1].shape)
        _, indices, rows = self._waiting.setdefault(kind, (key, [], []))
        indices.append(index)
        rows.append(tensors)

    def end_pass(self, batch: Batch) -> None:
        """Take in what waits."""
        self._take_waiting(batch)
        self._undo = None

    def _take_waiting(self, batch: Batch) -> None:
        waiting, self._waiting = self._waiting, {}
        for key, indices, rows in waiting.values():
            columns = [_stack(column) for column in zip(*rows, strict=True)]
            self.take(indices, key, columns, batch.host)

    @abc.abstractmethod
    def take(self, indices: list[int], key: Any, arrays: list[NDArray[Any]], host: HostBatch) -> None:
        """Add what was sent under one key: arrays ``[len(indices), batch * pos]``, the row ``i`` of each that
        of block or state ``indices[i]``. The last axis is another where the class says so.
        """


def _stack(tensors: Sequence[Tensor]) -> NDArray[Any]:
    if len({t.device for t in tensors}) > 1:
        tensors = [t.cpu() for t in tensors]
    return torch.stack(list(tensors)).cpu().numpy()


@storable
class SplitSums:
    """Sums and counts in fp64, the first tokens and the rest apart, for any number of named figures."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, list[float]] = {}

    def add(self, keys: Sequence[Hashable], values: Floats, host: HostBatch) -> None:
        """Add per-token figures ``[len(keys), batch * pos]``; padding is left out, nan and inf are kept."""
        rest, first = (_sum(values.take(places, axis=1)) for places in (host.rest, host.first))
        for key, of_rest, of_first in zip(keys, rest, first, strict=True):
            self.add_sums(key, of_rest, host.rest.size, of_first, host.first.size)

    def add_sums(self, key: Hashable, rest: float, num_rest: float, first: float, num_first: float) -> None:
        """Add ready sums with the weights they are to be divided by."""
        self._add(key, (rest, num_rest, first, num_first))

    def _add(self, key: Hashable, new: Sequence[float]) -> None:
        old = self._sums.get(key, (0.0, 0.0, 0.0, 0.0))
        self._sums[key] = [a + b for a, b in zip(old, new, strict=True)]

    def merge(self, other: SplitSums) -> None:
        """Add another's sums."""
        for key, sums in other._sums.items():
            self._add(key, sums)

    def state_dict(self) -> dict[str, Any]:
        """Return the names and ``[names, 4]`` fp64 sums and weights."""
        return {"names": self.names, "sums": np.array(list(self._sums.values())).reshape(-1, 4)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the sums that gave this state."""
        made = cls()
        made._sums = dict(zip(state["names"], state["sums"].tolist(), strict=True))
        return made

    @property
    def names(self) -> list[Any]:
        """Names of the figures, in the order in which they first came."""
        return list(self._sums)

    def mean(self, key: Hashable) -> Split:
        """The means; nan where there was no token."""
        if key not in self._sums:
            return Split.undefined()
        rest, num_rest, first, num_first = self._sums[key]
        total, num = rest + first, num_rest + num_first
        return Split(ratio(rest, num_rest), ratio(first, num_first), ratio(total, num))


def _sum(values: Floats) -> list[float]:
    # inf - inf among the values is a nan to be reported, not a fault of the sum.
    with np.errstate(invalid="ignore", over="ignore"):
        return values.sum(axis=1, dtype=np.float64).tolist()


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
