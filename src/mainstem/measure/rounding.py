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
    # Where w is zero nothing changes, so what changes are non-zero entries.
    num_nonzero = _count_nonzero(w)
    num_absorbed = num_nonzero - _count_nonzero(change)
    # The change is exact, or as large as w: what this order rounds away is at most 2^-24 |w|.
    error = torch.linalg.vector_norm(change.sub_(w), dim=-1) / torch.linalg.vector_norm(w, dim=-1)
    fits = error.isfinite()
    return Absorption(num_absorbed * fits, num_nonzero * fits, error.masked_fill(~fits, torch.nan))


def _count_nonzero(x: Tensor) -> Tensor:
    # count_nonzero 54 us, (x != 0).sum 56 us, this 13 us on [224, 576]. Exact below 2^24 entries a row; a
    # nan's row is not counted by the caller.
    return torch.linalg.vector_norm(x.sign(), 1, dim=-1).long()


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


_CALL_ENTRIES = 1 << 17
"""Entries of writes that are rounded in one call: few enough for a core's cache, many enough that what a call
costs is not seen ([32, 576]: 77 us; eight of them together: 200 us)."""


class _Rows(NamedTuple):
    """Sampled tokens of one write, ``[tokens, width]`` each, and where it is: block and key."""

    block: int
    key: tuple[int, int, str]
    x: Tensor
    w: Tensor


class RoundingAbsorption(HostReducer):
    """Share of each write that a bf16 or fp16 stream would absorb. See `absorption` and `AbsorptionFigures`.

    Args:
        every: look at every k-th position of a sequence, 0 always included; 1 is exact.
        dtypes: which stream dtypes to try, whatever the model's own.

    Raises:
        ConfigError: ``every`` is less than 1.
    """

    name = "rounding_absorption"
    saved = ("_sums", "_left_out", "_num_tokens")

    def __init__(self, every: int = 32, dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16)):
        super().__init__()
        self.every = require_positive("every", every)
        self.dtypes = tuple(dtypes)
        self._sums = SplitSums()
        self._left_out: dict[tuple[int, Any], int] = {}
        self._num_tokens = 0
        self._rows: list[_Rows] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rows": []}

    def collect(self, event: BlockEvent) -> None:
        """Copy the sampled tokens of one block's writes; when there are enough, round them."""
        order = 0
        for place, sublayer in enumerate(event.sublayers):
            if sublayer.carried is None:
                order += len(sublayer.writes)
                continue
            tokens = event.batch.places("all", sublayer.carried.device, self.every)
            x = flat_streams(sublayer.carried).index_select(0, tokens)
            for write in sublayer.writes:
                w = flat_streams(write.value).index_select(0, tokens)
                self._gather(_Rows(event.block, (order, place, write.kind), x, w))
                order += 1

    def _gather(self, new: _Rows) -> None:
        if self._rows and not _go_together(self._rows, new):
            self._round()
        self._rows.append(new)

    def _round(self) -> None:
        """Round the sampled tokens gathered so far, all writes in one call."""
        rows, self._rows = self._rows, []
        x, w = torch.cat([r.x for r in rows]), torch.cat([r.w for r in rows])
        pieces = max(1, _CALL_ENTRIES // w.shape[1])
        for dtype in self.dtypes:
            parts = [
                absorption(*piece, dtype) for piece in zip(x.split(pieces), w.split(pieces), strict=True)
            ]
            found = [torch.cat(column).split([len(r.w) for r in rows]) for column in zip(*parts, strict=True)]
            for row, figures in zip(rows, zip(*found, strict=True), strict=True):
                self.send(row.block, (*row.key, str(dtype).removeprefix("torch.")), figures)

    def forget_pass(self) -> None:
        """Drop what waits for the end of a pass."""
        super().forget_pass()
        self._rows = []

    def end_pass(self, batch: Batch) -> None:
        """Round what is left and take in what waits."""
        if self._rows:
            self._round()
        super().end_pass(batch)
        self._num_tokens += self._chosen(batch.host).size

    def take(self, indices: list[int], key: Any, arrays: list[NDArray[Any]], host: HostBatch) -> None:
        """Add ``[num_absorbed, num_nonzero, error]``, ``[len(indices), chosen tokens]`` each."""
        absorbed, nonzero, error = arrays
        first = self._chosen(host) == 0
        undefined = np.isnan(error)
        error = np.where(undefined, 0.0, error)
        shares: list[NDArray[Any]] = []
        errors: list[NDArray[Any]] = []
        for group in (~first, first):
            shares += [absorbed[:, group].sum(1), nonzero[:, group].sum(1)]
            errors += [error[:, group].sum(1, dtype=np.float64), (~undefined[:, group]).sum(1)]
        for name, sums in (("absorbed", shares), ("error", errors)):
            for index, row in zip(indices, np.stack(sums, 1).astype(np.float64).tolist(), strict=True):
                self._sums.add_sums((index, key, name), *row)
        for index, count in zip(indices, undefined.sum(1).tolist(), strict=True):
            self._left_out[index, key] = self._left_out.get((index, key), 0) + count

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


def _go_together(rows: list[_Rows], new: _Rows) -> bool:
    first = rows[0]
    alike = all(
        (one.shape[1], one.dtype, one.device) == (other.shape[1], other.dtype, other.device)
        for one, other in ((first.x, new.x), (first.w, new.w))
    )
    return alike and sum(r.w.numel() for r in rows) + new.w.numel() <= _CALL_ENTRIES
