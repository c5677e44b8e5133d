"""The mean of every write over a corpus, for mean ablation."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from mainstem.intervene.kinds import Place
from mainstem.measure import BlockEvent, Reducer


class WriteMeans(Reducer):
    """Means over all real tokens of what each block and sublayer adds and of each state, streaming.

    Sums in fp64 (fp32 where the device has no fp64). Give it to `mainstem.observe.record` for every batch of
    a corpus, and its result to `Mean`.
    """

    name = "write_means"
    saved = ("_sums", "_counts")

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str, int], Tensor] = {}
        self._counts: dict[tuple[int, str, int], int] = {}

    def update(self, event: BlockEvent) -> None:
        """Add one block: its update, its state, and every write."""
        self._add((event.block, "block", 0), event.after - event.before, event)
        self._add((event.block, "state", 0), event.after, event)
        for number, sublayer in enumerate(event.sublayers):
            for write in sublayer.writes:
                self._add((event.block, write.kind, number), write.value, event)

    def merge(self, other: Self) -> None:
        """Add what ``other`` has seen."""
        for key, total in other._sums.items():
            self._sums[key] = self._sums[key] + total.to(self._sums[key]) if key in self._sums else total
            self._counts[key] = self._counts.get(key, 0) + other._counts[key]

    def result(self) -> dict[Place, Tensor]:
        """Return the means so far, ``[(n,) width]``, by place."""
        return {
            Place(*key): total / self._counts[key] for key, total in self._sums.items() if self._counts[key]
        }

    def _add(self, key: tuple[int, str, int], value: Tensor, event: BlockEvent) -> None:
        value = value.detach().expand_as(event.after)
        rows = value.flatten(0, 1)[event.batch.places("all", value.device)]
        total = rows.sum(0, dtype=torch.float32 if value.device.type == "mps" else torch.float64)
        self._sums[key] = self._sums[key] + total.to(self._sums[key]) if key in self._sums else total
        self._counts[key] = self._counts.get(key, 0) + rows.shape[0]
