"""The largest activation of every state, and the first place where a figure is not finite."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.measure._host import Floats, HostReducer, ratio
from mainstem.measure._results import Result, require_positive
from mainstem.measure.events import Batch, BlockEvent, HostBatch
from mainstem.measure.geometry import flat_streams, measuring_dtype
from mainstem.measure.sketch import QuantileSketch

MASSIVE_VALUE = 100.0
"""A massive activation exceeds this (Sun et al., arXiv 2402.17762, section 2)."""

MASSIVE_RATIO = 1000.0
"""A massive activation is at least this many times the median of the absolute activations of its state."""


@dataclasses.dataclass(frozen=True)
class Activation(Result):
    """One entry of the stream.

    Attributes:
        value: signed.
        sequence: number of its sequence in the text.
        position: of its token in the sequence, 0-based, padding not counted.
        channel: within the stream's width.
        stream: which of several streams; 0 for one.
        token_id: None for a model that reads no tokens.
    """

    value: float
    sequence: int
    position: int
    channel: int
    stream: int
    token_id: int | None


@dataclasses.dataclass(frozen=True)
class StateExtremes(Result):
    """The largest activations of one state, over real tokens whose entries are all finite.

    Attributes:
        state: ``l``: before block ``l``; the last one is after the last block, before any final norm.
        largest: by absolute value, over all tokens; None where no token is finite.
        largest_rest: over all tokens but the first of each sequence.
        median: of ``|h|`` over all entries of real tokens, from samples or exact: see `LargestActivations`.
        median_ratio: ``|largest| / median``.
        massive: ``|largest| > 100`` and ``>= 1000 x median``. Where the ratio is within the median's error of
            1000, ask for the exact median.
        headroom_bits: ``log2(limit / |largest|)`` for the largest finite number of ``"float16"``,
            ``"bfloat16"`` and the dtype the stream was in: how many more doublings it can take; negative: it
            does not fit.
    """

    state: int
    largest: Activation | None
    largest_rest: Activation | None
    median: float
    median_ratio: float
    massive: bool
    headroom_bits: dict[str, float]


@dataclasses.dataclass(frozen=True)
class ExtremesResult(Result):
    """One entry a state, ``0 .. num_blocks``, and the dtype the stream was in."""

    states: tuple[StateExtremes, ...]
    dtype: str


class _Plan(NamedTuple):
    """What the states of a pass have in common: the mask it was made for, a token's entries, which tokens
    ``[2, batch * pos]`` are of the rest and which are first, and the flat places of the sampled entries.
    """

    mask: Tensor
    width: int
    groups: Tensor
    sample: Tensor | None


class LargestActivations(HostReducer):
    """The largest activation of every state: value, sequence, position, channel, token. See `StateExtremes`.

    Args:
        median_samples: entries drawn for the median of ``|h|``, a state and pass, evenly over the entries of
            real tokens. The exact median of ``[4, 256, 576]`` takes 3.3 ms a state; 4,096 samples 0.05 ms,
            with a standard error of ``1.2 / sqrt(samples)``: 1.8 % after one pass, 0.6 % after ten. They wait
            until the pass is complete, as do two tokens' entries a state. None counts every entry.
        median_error: promised relative error of the sketch that holds the samples; with
            ``median_samples=None`` this is all the error there is.

    Raises:
        ConfigError: fewer than one sample, or an error out of range.
    """

    name = "largest_activations"
    saved = ("_sketch", "_largest", "_num_states", "_width", "_dtype")

    def __init__(self, median_samples: int | None = 4096, median_error: float = 2e-3):
        super().__init__()
        if median_samples is not None:
            require_positive("median_samples", median_samples)
        self.median_samples = median_samples
        self._sketch = QuantileSketch(relative_error=median_error)
        self._largest: dict[tuple[int, str], Activation] = {}
        self._num_states = 0
        self._width = 1
        self._dtype: torch.dtype | None = None
        self._plan: _Plan | None = None
        self._counted: QuantileSketch | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_plan": None, "_counted": None}

    def collect(self, event: BlockEvent) -> None:
        """Find the largest entries of one block's states and draw samples."""
        for state, x in event.states():
            self._num_states = max(self._num_states, state + 1)
            self._width, self._dtype = x.shape[-1], x.dtype
            flat, plan = flat_streams(x), self._plan_for(x, event.batch)
            # A token with a nan or an inf is counted by `StreamNorms`; here it must not mask the others.
            sizes = event.geometry.largest(x).nan_to_num(nan=-1.0, posinf=-1.0)
            place = torch.where(plan.groups, sizes, -2.0).argmax(-1)
            rows = flat.index_select(0, place).to(measuring_dtype(x.dtype))
            self.send(state, "largest", [place, rows])
            if plan.sample is not None:
                sample = flat.reshape(-1).index_select(0, plan.sample)
                self.send(state, "sample", [sample.to(measuring_dtype(x.dtype))])
            else:
                self._count(state, flat.index_select(0, event.batch.places("all", x.device)))

    def _plan_for(self, x: Tensor, batch: Batch) -> _Plan:
        width = x.shape[2:].numel()
        plan = self._plan
        if (
            plan is None
            or plan.mask is not batch.mask
            or (plan.width, plan.groups.device) != (width, x.device)
        ):
            groups = torch.stack([batch.is_rest.reshape(-1), batch.is_first.reshape(-1)]).to(x.device)
            plan = self._plan = _Plan(batch.mask, width, groups, self._draw(width, x.device, batch))
        return plan

    def _draw(self, width: int, device: torch.device, batch: Batch) -> Tensor | None:
        """Return flat places of entries of real tokens, evenly spread, the same ones whatever the padding."""
        if self.median_samples is None:
            return None
        places = batch.places("all", device)
        total = places.numel() * width
        # Odd, so that it meets every channel of an even width.
        stride = max(1, total // self.median_samples) | 1
        entry = torch.arange(0, total, stride, device=device)[: self.median_samples]
        return places[entry // width] * width + entry % width

    def _count(self, state: int, x: Tensor) -> None:
        """Count every entry, apart from those of earlier passes: held they would be a copy of every state."""
        if self._counted is None:
            self._counted = QuantileSketch(relative_error=self._sketch.relative_error)
        self._counted.grow(state + 1)
        self._counted.update(x.to(measuring_dtype(x.dtype)).abs().cpu().numpy(), state)

    def forget_pass(self) -> None:
        """Drop what waits for the end of a pass."""
        super().forget_pass()
        self._plan = self._counted = None

    def end_pass(self, batch: Batch) -> None:
        """Take in what waits and let go of the pass."""
        super().end_pass(batch)
        if self._counted is not None:
            self._sketch.merge(self._counted)
        self._plan = self._counted = None

    def take(self, indices: list[int], key: Any, arrays: list[NDArray[Any]], host: HostBatch) -> None:
        """Add the tokens of the largest activation, of the rest and of the first, ``[len(indices), 2]``, and
        their entries, ``[len(indices), 2, n * width]``; or a sample of entries, ``[len(indices), samples]``.
        """
        if key == "sample":
            self._sketch.grow(max(indices) + 1)
            self._sketch.update_lanes(np.abs(arrays[0]), indices)
            return
        places, rows = arrays
        channels = np.abs(rows).argmax(-1)
        values = np.take_along_axis(rows, channels[..., None], -1).squeeze(-1)
        # Without such a token, or with none of finite entries only, the place is not one of them.
        position = host.position[places]
        found = np.isfinite(values) & np.stack([position[:, 0] > 0, position[:, 1] == 0], 1)
        for i, group in np.argwhere(found).tolist():
            where = (indices[i], ("rest", "first")[group])
            self._find(where, float(values[i, group]), int(places[i, group]), int(channels[i, group]), host)

    def _find(self, key: tuple[int, str], value: float, place: int, channel: int, host: HostBatch) -> None:
        old = self._largest.get(key)
        if old is None or abs(value) >= abs(old.value):
            activation = Activation(
                value=value,
                sequence=int(host.sequence[place]),
                position=int(host.position[place]),
                channel=channel % self._width,
                stream=channel // self._width,
                token_id=host.token_id(place),
            )
            self._offer(key, activation)

    def _offer(self, key: tuple[int, str], new: Activation) -> None:
        old = self._largest.get(key)
        if old is None or _rank(new) < _rank(old):
            self._largest[key] = new

    def merge(self, other: Self) -> None:
        """Add what ``other`` has seen."""
        self._sketch.merge(other._sketch)
        self._num_states = max(self._num_states, other._num_states)
        self._dtype = self._dtype or other._dtype
        for key, activation in other._largest.items():
            self._offer(key, activation)

    def result(self) -> ExtremesResult:
        """The figures so far."""
        dtype = "" if self._dtype is None else _dtype_name(self._dtype)
        return ExtremesResult(tuple(self._state(state) for state in range(self._num_states)), dtype)

    def _state(self, state: int) -> StateExtremes:
        rest = self._largest.get((state, "rest"))
        candidates = [a for a in (rest, self._largest.get((state, "first"))) if a is not None]
        largest = min(candidates, key=_rank, default=None)
        size = math.nan if largest is None else abs(largest.value)
        median = self._sketch.quantile(0.5, state) if state < self._sketch.lanes else math.nan
        median_ratio = math.inf if median == 0 and size > 0 else ratio(size, median)
        dtypes = dict.fromkeys([torch.float16, torch.bfloat16, self._dtype or torch.bfloat16])
        return StateExtremes(
            state=state,
            largest=largest,
            largest_rest=rest,
            median=median,
            median_ratio=median_ratio,
            massive=size > MASSIVE_VALUE and median_ratio >= MASSIVE_RATIO,
            headroom_bits={_dtype_name(d): headroom_bits(size, d) for d in dtypes},
        )


def _rank(a: Activation) -> tuple[float, int, int, int, int]:
    # Ties go to the earlier token, so that the order of merging does not show.
    return (-abs(a.value), a.sequence, a.position, a.stream, a.channel)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def headroom_bits(size: float, dtype: torch.dtype) -> float:
    """Return ``log2(largest finite number of dtype / size)``; inf for size 0, nan for nan.

    float16: 65,504; bfloat16: 3.39e38.
    """
    return math.inf if size == 0 else math.log2(torch.finfo(dtype).max) - math.log2(size)


@dataclasses.dataclass(frozen=True)
class NonFiniteSite(Result):
    """Where a nan or an inf came first: block, then place in the block, then sequence and position.

    Attributes:
        block: number of the block.
        site: ``"before"`` (only of block 0), a write's kind and place (``"attn[0]"``, ``"mlp[1]"``: the
            sublayer in brackets), or ``"after"``.
        sequence: number of the sequence in the text.
        position: of the token in the sequence, 0-based, padding not counted.
        token_id: None for a model that reads no tokens.
    """

    block: int
    site: str
    sequence: int
    position: int
    token_id: int | None


@dataclasses.dataclass(frozen=True)
class NonFiniteResult(Result):
    """The first site, None where all is finite, and how many (token, site) pairs were not."""

    first: NonFiniteSite | None
    num_tokens_at_sites: int


class FirstNonFinite(HostReducer):
    """The first site whose norm at a real token is not finite. See `NonFiniteSite`.

    A norm beyond fp32 (entries of 1e19) counts as not finite.
    """

    name = "first_nonfinite"
    saved = ("_first", "_num")

    def __init__(self) -> None:
        super().__init__()
        self._first: tuple[tuple[int, int, int, int], NonFiniteSite] | None = None
        self._num = 0

    def collect(self, event: BlockEvent) -> None:
        """Send the norms at one block's sites."""
        geometry = event.geometry
        sites = [("before", geometry.norm(event.before))] if event.block == 0 else []
        sites += [(f"{w.kind}[{w.sublayer}]", w.norm) for w in geometry.writes]
        sites.append(("after", geometry.norm(event.after)))
        for order, (site, norm) in enumerate(sites):
            self.send(event.block, (order, site), [norm])

    def take(self, indices: list[int], key: Any, arrays: list[NDArray[Any]], host: HostBatch) -> None:
        """Add the ``[norm]`` of one site of each block."""
        # nan and inf survive a sum; padding may hold them too, so the slow look decides.
        with np.errstate(invalid="ignore", over="ignore"):
            suspect = ~np.isfinite(arrays[0].sum(1))
        for row in np.flatnonzero(suspect):
            self._look(indices[row], key, arrays[0][row], host)

    def _look(self, block: int, key: tuple[int, str], norm: Floats, host: HostBatch) -> None:
        places = np.concatenate([host.first, host.rest])
        bad = places[~np.isfinite(norm[places])]
        self._num += bad.size
        if bad.size:
            order, site = key
            # The lowest flat place is the first position of the first sequence.
            p = int(bad.min())
            sequence, position = int(host.sequence[p]), int(host.position[p])
            found = NonFiniteSite(block, site, sequence, position, host.token_id(p))
            self._offer(((block, order, sequence, position), found))

    def _offer(self, found: tuple[tuple[int, int, int, int], NonFiniteSite]) -> None:
        if self._first is None or found[0] < self._first[0]:
            self._first = found

    def merge(self, other: Self) -> None:
        """Add what ``other`` has seen."""
        self._num += other._num
        if other._first is not None:
            self._offer(other._first)

    def result(self) -> NonFiniteResult:
        """The figures so far."""
        return NonFiniteResult(None if self._first is None else self._first[1], self._num)
