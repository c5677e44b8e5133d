"""What is added up of one training step's stream: on its device during the step, then over ranks."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Peak(NamedTuple):
    """The entry of largest absolute value of a state: signed, with its position, channel and stream."""

    value: float
    position: int
    channel: int
    stream: int

    def is_beyond(self, other: Peak | None) -> bool:
        """Whether this is the larger; NaN is beyond every number."""
        if other is None or math.isnan(self.value):
            return True
        return abs(self.value) > abs(other.value)  # False where the other is NaN


WriteKey = tuple[int, str]
"""Number of the sublayer, and the kind of what it writes."""


@dataclasses.dataclass
class StepSums:
    """The sums of one step; they add up over micro-batches and ranks exactly.

    Attributes:
        tokens: real tokens.
        passes: forward passes: micro-batches times ranks.
        states: number of a state -> sum of squares of its entries over real tokens, and how many entries.
        peaks: number of a state -> its largest entry.
        writes: sublayer and kind -> sum of squares over real tokens.
        gradients: number of a state -> sum of squares of the gradient with respect to it.
        additivity, continuity: largest errors of the books.
    """

    tokens: int = 0
    passes: int = 0
    states: dict[int, tuple[float, int]] = dataclasses.field(default_factory=dict)
    peaks: dict[int, Peak] = dataclasses.field(default_factory=dict)
    writes: dict[WriteKey, float] = dataclasses.field(default_factory=dict)
    gradients: dict[int, float] = dataclasses.field(default_factory=dict)
    additivity: float = 0.0
    continuity: float = 0.0

    def merge(self, other: StepSums) -> None:
        """Add what another rank has seen."""
        self.tokens += other.tokens
        self.passes += other.passes
        for state, (square, entries) in other.states.items():
            known = self.states.get(state, (0.0, 0))
            self.states[state] = (known[0] + square, known[1] + entries)
        for state, peak in other.peaks.items():
            if peak.is_beyond(self.peaks.get(state)):
                self.peaks[state] = peak
        for key, square in other.writes.items():
            self.writes[key] = self.writes.get(key, 0.0) + square
        for state, square in other.gradients.items():
            self.gradients[state] = self.gradients.get(state, 0.0) + square
        self.additivity = max(self.additivity, other.additivity)
        self.continuity = max(self.continuity, other.continuity)

    def rms(self, state: int) -> float:
        """Root mean square of the entries of a state."""
        square, entries = self.states.get(state, (math.nan, 1))
        return math.sqrt(square / max(entries, 1))

    def outlier(self, state: int) -> float:
        """Largest absolute value over the root mean square."""
        rms = self.rms(state)
        return abs(self.peaks[state].value) / rms if rms > 0 else math.nan

    def write_ratio(self, key: WriteKey) -> float:
        """``|write| / |stream|``: of the norms over all tokens, the stream being what the sublayer found."""
        square, _ = self.states.get(key[0], (0.0, 0))
        return math.sqrt(self.writes[key] / square) if square > 0 else math.nan

    def gradient(self, state: int) -> float | None:
        """Norm of the gradient of the step's loss over all tokens; None where none was seen."""
        return math.sqrt(self.gradients[state]) if state in self.gradients else None


class _Known(NamedTuple):
    """A tensor that was measured at some version, with its norm, largest entry and the place of it."""

    tensor: Tensor
    version: int
    figures: tuple[Tensor, Tensor, Tensor]


class StepTally:
    """Measures states, writes and gradients, and leaves every figure where it was made until asked.

    Nothing here waits for the device. A state of several tensors is measured as one long vector a token.
    """

    def __init__(self) -> None:
        self.sums = StepSums()
        self._states: defaultdict[int, list[tuple[list[tuple[Tensor, Tensor, Tensor]], list[torch.Size]]]] = (
            defaultdict(list)
        )
        self._writes: defaultdict[WriteKey, list[Tensor]] = defaultdict(list)
        self._gradients: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._tokens: defaultdict[int, list[int]] = defaultdict(list)
        self._mask: Tensor | None = None
        self._known: dict[int, _Known] = {}

    def begin_pass(self, mask: Tensor) -> None:
        """Begin a forward pass.

        Args:
            mask: ``[batch, pos]``, True for real tokens; states of another shape count as real throughout.
        """
        self._mask = mask if mask.numel() and not bool(mask.all()) else None
        self.sums.passes += 1

    def end_pass(self) -> None:
        """Let go of the tensors of the pass."""
        self._known, self._mask = {}, None

    def state(self, state: int, parts: Sequence[Tensor], hooked: Sequence[Tensor]) -> None:
        """Measure a state, and its gradient when that arrives.

        Args:
            state: its number: the stream before sublayer ``state``.
            parts: ``[batch, pos, ...]`` each.
            hooked: the tensors of the graph whose gradient is meant.
        """
        known = {id(part): self._measured(part) for part in parts}
        self._known = known
        figures = [known[id(part)].figures for part in parts]
        self._states[state].append((figures, [part.shape for part in parts]))
        mask = self._mask_for(parts[0])
        self._tokens[state].append(parts[0].shape[0] * parts[0].shape[1] if mask is None else int(mask.sum()))
        for tensor in hooked:
            if tensor.requires_grad:
                tensor.register_hook(self._on_gradient(state))

    def write(self, key: WriteKey, value: Tensor) -> None:
        """Measure what a sublayer writes, ``[batch, pos, ...]``."""
        self._writes[key].append(_norm(self._real(value)))

    def _on_gradient(self, state: int) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            self._gradients[state].append(_norm(gradient.detach()))

        return note

    def _mask_for(self, t: Tensor) -> Tensor | None:
        return self._mask if self._mask is not None and t.shape[:2] == self._mask.shape else None

    def _real(self, t: Tensor) -> Tensor:
        """Return a tensor with zeros in place of padding."""
        t, mask = t.detach(), self._mask_for(t)
        return t if mask is None else t.masked_fill(~mask.reshape(*mask.shape, *[1] * (t.ndim - 2)), 0.0)

    def _measured(self, part: Tensor) -> _Known:
        version = part._version  # pyright: ignore[reportPrivateUsage]
        known = self._known.get(id(part))
        if known is not None and known.tensor is part and known.version == version:
            return known
        flat = self._real(part).reshape(-1)
        place = flat.abs().argmax()
        return _Known(part, version, (_norm(flat), flat[place].float(), place))

    # ---- after the step ----

    def finish(self, gradient_scale: float) -> StepSums:
        """Bring all figures to the host and return the sums.

        Args:
            gradient_scale: what the loss was multiplied by before it went backward.
        """
        figures = [f for seen in self._states.values() for one, _ in seen for f in one]
        norms = iter(_to_host([norm for norm, _, _ in figures]))
        values = iter(_to_host([value for _, value, _ in figures]))
        places = iter(_to_host([place for _, _, place in figures]))
        for state, seen in self._states.items():
            square, entries = 0.0, 0
            for (one, shapes), tokens in zip(seen, self._tokens[state], strict=True):
                for _, shape in zip(one, shapes, strict=True):
                    square += next(norms) ** 2
                    entries += tokens * math.prod(shape[2:])
                    peak = _peak(next(values), int(next(places)), shape)
                    if peak.is_beyond(self.sums.peaks.get(state)):
                        self.sums.peaks[state] = peak
            self.sums.states[state] = (square, entries)
        for key, tensors in self._writes.items():
            self.sums.writes[key] = sum(norm**2 for norm in _to_host(tensors))
        for state, tensors in self._gradients.items():
            self.sums.gradients[state] = sum((norm / gradient_scale) ** 2 for norm in _to_host(tensors))
        self.sums.tokens = sum(self._tokens[0])
        return self.sums


def _norm(t: Tensor) -> Tensor:
    wide = torch.promote_types(t.dtype, torch.float32)
    return torch.linalg.vector_norm(t, dtype=wide)


def _to_host(tensors: Sequence[Tensor]) -> list[float]:
    """Return numbers from 0-d tensors, with one wait for each device."""
    if not tensors:
        return []
    return torch.stack([t.to(tensors[0].device, non_blocking=True) for t in tensors]).tolist()


def _peak(value: float, place: int, shape: torch.Size) -> Peak:
    width = shape[-1]
    streams = math.prod(shape[2:-1])
    token, inside = divmod(place, width * streams)
    return Peak(value, token % shape[1], inside % width, inside // width)
