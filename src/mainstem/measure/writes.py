"""How large each write is beside the stream it joins, and which way it points."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

from numpy.typing import NDArray
from torch import Tensor

from mainstem.measure._host import HostReducer, SplitSums, cosine, relative_size
from mainstem.measure._results import Result, Split
from mainstem.measure.events import BlockEvent, HostBatch
from mainstem.measure.geometry import token_dot, token_norm


def write_ratio(write: Tensor, carried: Tensor) -> Tensor:
    """Return ``|w_t| / max(|c_t|, 1e-6)``, ``[batch, pos]``, fp32 (fp64 for fp64).

    Csordas, Manning, Potts 2025 (arXiv 2505.13898), "relative contribution". Both ``[batch, pos(, n),
    width]``.
    """
    return (token_norm(write) / token_norm(carried).clamp_min(1e-6)).view(write.shape[:2])


def write_cosine(write: Tensor, carried: Tensor) -> Tensor:
    """Return ``<w_t, c_t> / (|w_t| |c_t|)``, ``[batch, pos]``, clamped to [-1, 1]; 0 where either is zero.

    About 0: a new feature; negative: erasing; positive: strengthening (arXiv 2505.13898). fp32 (fp64 for
    fp64).
    """
    norms = token_norm(write) * token_norm(carried)
    value = (token_dot(write, carried) / norms).masked_fill(norms == 0, 0.0)
    return value.clamp(-1.0, 1.0).view(write.shape[:2])


@dataclasses.dataclass(frozen=True)
class WriteFigures(Result):
    """One write of a block.

    Attributes:
        kind: ``"attn"``, ``"mlp"``, ...
        sublayer: place of its sublayer in the block, 0-based.
        ratio: mean over tokens of ``|w| / max(|c|, 1e-6)``, ``c`` what the sublayer carried of the stream:
            ``h`` for the first sublayer of a plain block, ``h + a`` for the second. nan where nothing was
            carried.
        cosine: mean over tokens of ``cos(w, c)``.
        norm: mean over tokens of ``|w|``.
    """

    kind: str
    sublayer: int
    ratio: Split
    cosine: Split
    norm: Split


@dataclasses.dataclass(frozen=True)
class BlockWrites(Result):
    """The writes of one block, and their sum against the state before the block.

    Attributes:
        block: number of the block.
        writes: each of them, in order.
        total_ratio: mean over tokens of ``|sum(w)| / max(|h|, 1e-6)``, ``h`` the state before the block.
        total_cosine: mean over tokens of ``cos(sum(w), h)``.
    """

    block: int
    writes: tuple[WriteFigures, ...]
    total_ratio: Split
    total_cosine: Split

    def of_kind(self, kind: str) -> WriteFigures | None:
        """The first write of a kind, or None."""
        return next((w for w in self.writes if w.kind == kind), None)


@dataclasses.dataclass(frozen=True)
class WriteSizeResult(Result):
    """One entry a block."""

    blocks: tuple[BlockWrites, ...]


class WriteSizes(HostReducer):
    """Size of every write relative to the stream, and its cosine with it. See `WriteFigures` and
    `BlockWrites`.

    Means of per-token ratios, not ratios of means. Several streams are measured as one vector of length ``n *
    width``.
    """

    name = "write_sizes"
    saved = ("_sums",)

    def __init__(self) -> None:
        super().__init__()
        self._sums = SplitSums()

    def collect(self, event: BlockEvent) -> None:
        """Send the figures of one block."""
        geometry, block = event.geometry, event.block
        for order, write in enumerate(geometry.writes):
            key = (order, write.sublayer, write.kind)
            if write.carried_norm is None or write.dot is None:
                self.send(block, key, [write.norm])
            else:
                self.send(block, key, [write.norm, write.carried_norm, write.dot])
        if geometry.total is not None:
            norm, dot = geometry.total
            self.send(block, "total", [norm, geometry.norm(event.before), dot])

    def take(self, indices: list[int], key: Any, arrays: list[NDArray[Any]], host: HostBatch) -> None:
        """Add ``[|w|, |c|, <w, c>]`` of one write of each block, or ``[|w|]`` where nothing was carried."""
        figures = {"norm": arrays[0]}
        if len(arrays) == 3:
            size, reference, dot = arrays
            figures["ratio"] = relative_size(size, reference)
            figures["cosine"] = cosine(dot, size, reference)
        for name, values in figures.items():
            self._sums.add([(index, key, name) for index in indices], values, host)

    def merge(self, other: Self) -> None:
        """Add what ``other`` has seen."""
        self._sums.merge(other._sums)

    def result(self) -> WriteSizeResult:
        """The figures so far."""
        by_block: dict[int, list[tuple[int, int, str]]] = {}
        for block, key, figure in self._sums.names:
            if figure == "norm":
                writes = by_block.setdefault(block, [])
                if key != "total":
                    writes.append(key)
        return WriteSizeResult(
            tuple(self._block(block, sorted(by_block[block])) for block in sorted(by_block))
        )

    def _block(self, block: int, keys: list[tuple[int, int, str]]) -> BlockWrites:
        mean = self._sums.mean
        return BlockWrites(
            block=block,
            writes=tuple(
                WriteFigures(
                    kind=key[2],
                    sublayer=key[1],
                    ratio=mean((block, key, "ratio")),
                    cosine=mean((block, key, "cosine")),
                    norm=mean((block, key, "norm")),
                )
                for key in keys
            ),
            total_ratio=mean((block, "total", "ratio")),
            total_cosine=mean((block, "total", "cosine")),
        )


def growth_per_block(norms: list[float]) -> float:
    """Return ``g`` of the least-squares line ``log |h_l| = c + l log g`` (Heimersheim and Turner 2023).

    ``norms`` are mean or median norms by state, position 0 excluded. nan for fewer than two finite positive
    ones.
    """
    points = [(i, math.log(v)) for i, v in enumerate(norms) if math.isfinite(v) and v > 0]
    if len(points) < 2:
        return math.nan
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return math.exp(slope)
