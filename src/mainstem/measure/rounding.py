"""How much of each write a low-precision stream would swallow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.measure._host import HostReducer, SplitSums
from mainstem.measure._results import Result, Split, require_positive
from mainstem.measure.events import Batch, BlockEvent, HostBatch
from mainstem.measure.geometry import flat_streams


class Absorption(NamedTuple):
    """Per token, ``[tokens]``: ``num_absorbed`` of ``num_nonzero`` entries, ``error`` relative to ``|w|``."""

    num_absorbed: Tensor
    num_nonzero: Tensor
    error: Tensor


def absorption(carried: Tensor, write: Tensor, dtype: torch.dtype) -> Absorption:
    """Add a write to a stream in ``dtype`` and return what the rounding swallows.

    With ``x`` and ``w`` rounded to ``dtype`` and ``fl`` the sum rounded to it: an entry is absorbed where ``w
    != 0`` and ``fl(x + w) == x``; the error is ``|fl(x + w) - x - w| / |w|``, by norms over the token. bf16
    has 8 significant bits, fp16 11. Where an entry of ``x``, ``w`` or the sum does not fit ``dtype``, the
    token has no counts and its error is nan; where ``w`` is zero the error is nan. A definition of this
    library's.

    Args:
        carried: ``x``, ``[tokens, width]``.
        write: ``w``, ``[tokens, width]``.
        dtype: ``torch.bfloat16``, ``torch.float16`` or ``torch.float32``.

    Raises:
        ConfigError: another dtype.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(f"Absorption is known for bfloat16, float16 and float32 streams; got {dtype}.")
    # Twice the bits and two more: rounding the wide sum is then the same as rounding the exact one.
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    x, w = carried.to(dtype).to(wide), write.to(dtype).to(wide)
    change = (x + w).to(dtype).to(wide).sub_(x)
    # Where w is zero nothing changes, so what changes are non-zero entries: 94 us for [64, 576] against 211
    # us # with comparisons in dtype and their conjunction.
    num_nonzero = torch.count_nonzero(w, -1)
    num_absorbed = num_nonzero - torch.count_nonzero(change, -1)
    # The change is exact, or as large as w: what this order rounds away is at most 2^-24 |w|.
    error = torch.linalg.vector_norm(change.sub_(w), dim=-1) / torch.linalg.vector_norm(w, dim=-1)
    fits = error.isfinite()
    return Absorption(num_absorbed * fits, num_nonzero * fits, error.masked_fill(~fits, torch.nan))


@dataclasses.dataclass(frozen=True)
class AbsorptionFigures(Result):
    """What one dtype would swallow of one write.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``.
        absorbed: share of the write's non-zero entries that would not change the stream.
        error: mean over tokens of ``|fl(x + w) - x - w| / |w|``; tokens that overflow or write nothing are
            left out.
        num_left_out: tokens looked at whose sum does not fit the dtype (or was not finite to begin with), or
            that wrote nothing.
    """

    dtype: str
    absorbed: Split
    error: Split
    num_left_out: int


@dataclasses.dataclass(frozen=True)
class WriteAbsorption(Result):
    """One write of a block: its kind, its sublayer's place in the block, and the figures by dtype."""

    block: int
    kind: str
    sublayer: int
    figures: tuple[AbsorptionFigures, ...]


@dataclasses.dataclass(frozen=True)
class AbsorptionResult(Result):
    """One entry a write, in order, and the sampling.

    Attributes:
        every: positions that are a multiple of this were looked at; 1: all.
        num_tokens: how many tokens that were.
        writes: by block and order in the block.
    """

    every: int
    num_tokens: int
    writes: tuple[WriteAbsorption, ...]


class RoundingAbsorption(HostReducer):
    """Share of each write that a bf16 or fp16 stream would absorb. See `absorption` and `AbsorptionFigures`.

    Args:
        every: look at every k-th position of a sequence, 0 always included; 1 is exact.
        dtypes: which stream dtypes to try, whatever the model's own.

    Raises:
        ConfigError: ``every`` is less than 1.
    """

    name = "rounding_absorption"

    def __init__(self, every: int = 32, dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16)):
        super().__init__()
        self.every = require_positive("every", every)
        self.dtypes = tuple(dtypes)
        self._sums = SplitSums()
        self._left_out: dict[tuple[int, Any], int] = {}
        self._num_tokens = 0

    def update(self, event: BlockEvent) -> None:
        """Take in one block."""
        order = 0
        for place, sublayer in enumerate(event.sublayers):
            if sublayer.carried is None:
                order += len(sublayer.writes)
                continue
            tokens = event.batch.places("all", sublayer.carried.device, self.every)
            x = flat_streams(sublayer.carried).index_select(0, tokens)
            for write in sublayer.writes:
                w = flat_streams(write.value).index_select(0, tokens)
                for dtype in self.dtypes:
                    key = (order, place, write.kind, str(dtype).removeprefix("torch."))
                    self.send(event.block, key, absorption(x, w, dtype), event.batch)
                order += 1

    def end_pass(self, batch: Batch) -> None:
        """Take in what waits."""
        super().end_pass(batch)
        self._num_tokens += self._chosen(batch.host).size

    def take(self, index: int, key: Any, arrays: list[NDArray[Any]], host: HostBatch) -> None:
        """Add ``[num_absorbed, num_nonzero, error]`` of the chosen tokens."""
        absorbed, nonzero, error = arrays
        position = self._chosen(host)
        first = position == 0
        shares: list[float] = []
        errors: list[float] = []
        for group in (~first, first):
            good = group & ~np.isnan(error)
            shares += [float(absorbed[group].sum()), float(nonzero[group].sum())]
            errors += [float(error[good].sum(dtype=np.float64)), float(good.sum())]
        self._sums.add_sums((index, key, "absorbed"), *shares)
        self._sums.add_sums((index, key, "error"), *errors)
        self._left_out[index, key] = self._left_out.get((index, key), 0) + int(np.isnan(error).sum())

    def _chosen(self, host: HostBatch) -> NDArray[np.int64]:
        """Positions of the tokens that are looked at."""
        return host.position[(host.position >= 0) & (host.position % self.every == 0)]

    def merge(self, other: Self) -> None:
        """Add what ``other`` has seen."""
        self._sums.merge(other._sums)
        self._num_tokens += other._num_tokens
        for key, count in other._left_out.items():
            self._left_out[key] = self._left_out.get(key, 0) + count

    def result(self) -> AbsorptionResult:
        """The figures so far."""
        found: dict[tuple[int, int, int, str], list[AbsorptionFigures]] = {}
        for index, key in sorted(self._left_out):
            order, place, kind, dtype = key
            found.setdefault((index, order, place, kind), []).append(
                AbsorptionFigures(
                    dtype=dtype,
                    absorbed=self._sums.mean((index, key, "absorbed")),
                    error=self._sums.mean((index, key, "error")),
                    num_left_out=self._left_out[index, key],
                )
            )
        writes = (
            WriteAbsorption(block, kind, place, tuple(figures))
            for (block, _, place, kind), figures in found.items()
        )
        return AbsorptionResult(self.every, self._num_tokens, tuple(writes))
