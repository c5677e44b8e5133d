"""How much a block, or several in a row, turns the stream."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.measure._host import HostReducer, SplitSums, cosine, ratio
from mainstem.measure._results import Result, Split
from mainstem.measure.events import Batch, BlockEvent, HostBatch, Reducer
from mainstem.measure.geometry import flat_streams
from mainstem.measure.writes import write_cosine


def block_influence(before: Tensor, after: Tensor) -> Tensor:
    """Return ``1 - cos(h_l,t, h_{l+1},t)``, ``[batch, pos]``, in [0, 2].

    ShortGPT (arXiv 2403.03853, eq. 1) is its mean over tokens, ``after`` taken before the final norm.
    fp32 (fp64 for fp64): below 1e-6 it is rounding. A zero vector has cosine 0.
    """
    return 1.0 - write_cosine(before, after)


def angular_distance(x: Tensor, y: Tensor) -> Tensor:
    """Return ``arccos(cos(x_t, y_t)) / pi``, ``[batch, pos]``, in [0, 1].

    Gromov et al. (arXiv 2403.17887, eq. 6). fp32 (fp64 for fp64): arccos turns a cosine's rounding of 1e-7
    near 1 into 2e-4 of distance. A zero vector is at 0.5.
    """
    return write_cosine(x, y).arccos() / math.pi


@dataclasses.dataclass(frozen=True)
class BlockInfluenceFigures(Result):
    """One block.

    Attributes:
        block: its number.
        influence: mean over tokens of ``1 - cos(h_l, h_{l+1})``. ShortGPT's figure is ``influence.all``.
        angle: mean over tokens of ``arccos(cos(h_l, h_{l+1})) / pi``.
    """

    block: int
    influence: Split
    angle: Split


@dataclasses.dataclass(frozen=True)
class BlockInfluenceResult(Result):
    """One entry a block."""

    blocks: tuple[BlockInfluenceFigures, ...]


class BlockInfluence(HostReducer):
    """Block influence and the angular distance over one block, over all tokens, streaming.

    See `block_influence` and `angular_distance`. The last block is judged by its own output, before any final
    norm.
    """

    name = "block_influence"
    saved = ("_sums",)

    def __init__(self) -> None:
        super().__init__()
        self._sums = SplitSums()

    def collect(self, event: BlockEvent) -> None:
        """Send the figures of one block."""
        geometry = event.geometry
        norms = [geometry.norm(event.before), geometry.norm(event.after)]
        self.send(event.block, None, [geometry.before_dot_after, *norms])

    def take(self, indices: list[int], key: Any, arrays: list[NDArray[Any]], host: HostBatch) -> None:
        """Add ``[<h, h'>, |h|, |h'|]`` of each block."""
        cosines = cosine(*arrays)
        self._sums.add([(index, "influence") for index in indices], 1.0 - cosines, host)
        self._sums.add([(index, "angle") for index in indices], np.arccos(cosines) / math.pi, host)

    def merge(self, other: Self) -> None:
        """Add what ``other`` has seen."""
        self._sums.merge(other._sums)

    def result(self) -> BlockInfluenceResult:
        """The figures so far."""
        blocks = sorted({block for block, _ in self._sums.names})
        mean = self._sums.mean
        return BlockInfluenceResult(
            tuple(BlockInfluenceFigures(b, mean((b, "influence")), mean((b, "angle"))) for b in blocks)
        )


@dataclasses.dataclass(frozen=True)
class AngularDistanceResult(Result):
    """Mean angular distances between states.

    Attributes:
        tokens: over which tokens the mean is: ``"last"`` of each sequence, or ``"rest"``.
        num_tokens: how many those were.
        distances: ``distances[n - 1][l]`` is ``d(l, n)``, between the states before block ``l`` and before
            block ``l + n``, for ``n`` from 1 and ``l`` from 0. nan where a state was not finite.
    """

    tokens: str
    num_tokens: int
    distances: tuple[tuple[float, ...], ...]

    def best_start(self, num_removed: int) -> int:
        """``argmin_l d(l, n)``: dropping blocks ``l .. l + n - 1`` turns the stream least.

        Raises:
            ConfigError: there is no run of that many blocks, or no finite distance for it.
        """
        if not 1 <= num_removed <= len(self.distances):
            raise ConfigError(f"No run of {num_removed} blocks in a model of {len(self.distances)}.")
        row = [math.inf if math.isnan(d) else d for d in self.distances[num_removed - 1]]
        if min(row) == math.inf:
            raise ConfigError(f"No finite angular distance over {num_removed} blocks.")
        return row.index(min(row))


class AngularDistances(Reducer):
    """Angular distance between every two states. See `angular_distance` and `AngularDistanceResult`.

    Cosines in fp64 from the states as they are (in fp32 where the device has no fp64).

    Args:
        tokens: ``"last"``: the last real token of each sequence, as in the paper; a pass holds
            ``[num_blocks + 1, batch, width]``. ``"rest"``: all real tokens but the first of each sequence; a
            pass holds every state in the model's dtype, so memory grows with depth: for small texts only. The
            distance over one block for all tokens, streaming, is in `BlockInfluence`.

    Raises:
        ConfigError: neither of the two.
    """

    name = "angular_distances"
    saved = ("_sum", "_num_tokens")

    def __init__(self, tokens: Literal["last", "rest"] = "last"):
        if tokens not in ("last", "rest"):
            raise ConfigError(f'tokens is "{tokens}"; it must be "last" or "rest".')
        self.tokens = tokens
        self._held: list[Tensor] = []
        self._sum: NDArray[np.float64] | None = None
        self._num_tokens = 0

    def __getstate__(self) -> dict[str, Any]:
        # What is held belongs to a pass that is not complete.
        return {**self.__dict__, "_held": []}

    def update(self, event: BlockEvent) -> None:
        """Hold the chosen tokens of one block's states."""
        if event.block == 0:
            self._held.clear()
        for _, x in event.states():
            self._held.append(flat_streams(x).index_select(0, event.batch.places(self.tokens, x.device)))

    def end_pass(self, batch: Batch) -> None:
        """Turn what is held into distances and let go of it."""
        held, self._held = self._held, []
        num_tokens = held[0].shape[0] if held else 0
        if not num_tokens:
            return
        if self._sum is None:
            self._sum = np.zeros((len(held), len(held)))
        device = held[-1].device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        # 64 tokens at a time: the fp64 copy of all states of one pass would be twice the states.
        for start in range(0, num_tokens, 64):
            x = torch.stack([h[start : start + 64].to(device, dtype) for h in held], 1)
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            x = torch.where(norm == 0, 0.0, x / norm)
            angles = (x @ x.transpose(1, 2)).clamp(-1.0, 1.0).arccos() / math.pi
            self._sum += angles.sum(0).cpu().double().numpy()
        self._num_tokens += num_tokens

    def merge(self, other: Self) -> None:
        """Add what ``other`` has seen."""
        if other._sum is not None:
            self._sum = other._sum.copy() if self._sum is None else self._sum + other._sum
            self._num_tokens += other._num_tokens

    def result(self) -> AngularDistanceResult:
        """The figures so far."""
        if self._sum is None:
            return AngularDistanceResult(self.tokens, 0, ())
        size = self._sum.shape[0]
        return AngularDistanceResult(
            tokens=self.tokens,
            num_tokens=self._num_tokens,
            distances=tuple(
                tuple(
                    ratio(float(self._sum[start, start + n]), self._num_tokens) for start in range(size - n)
                )
                for n in range(1, size)
            ),
        )
