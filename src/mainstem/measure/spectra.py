"""How many directions a state uses, and how alike two states are as clouds of tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Self

import torch
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.measure._host import ratio
from mainstem.measure._results import Result, require_positive
from mainstem.measure.events import Batch, BlockEvent, Reducer
from mainstem.measure.geometry import flat_streams

OUTLIER_MEDIANS = 5.0
"""A token is an outlier where its norm is beyond so many medians of its window's norms."""

CKA_TOKENS = 128
"""Tokens of a window that CKA looks at, at most."""


@dataclasses.dataclass(frozen=True)
class Spectrum(Result):
    """Figures of the centred token matrix, s its singular values and lam = s^2 / N.

    Attributes:
        participation_ratio: ``(sum lam)^2 / sum lam^2``; a few large tokens decide it.
        effective_rank: ``exp(H(p))``, ``p = s / sum s`` (Roy and Vetterli 2007).
        eigenvalue_rank: the same with ``p = lam / sum lam``.
        stable_rank: ``sum s^2 / max s^2``.
        num_tokens: N; no figure can be larger than N - 1.
    """

    participation_ratio: float
    effective_rank: float
    eigenvalue_rank: float
    stable_rank: float
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class StateSpectra(Result):
    """One state.

    Attributes:
        state: ``l``: before block ``l``; the last one is after the last block.
        whole: over all tokens but the first of each sequence; ``typical``: without outlier tokens too.
        cka_next, cka_last: debiased linear CKA with the next state that is looked at, and with the last;
            ``typical_cka_next``, ``typical_cka_last`` without tokens that are outliers of any of these
            states. nan for the last state's next.
    """

    state: int
    whole: Spectrum
    typical: Spectrum
    cka_next: float
    cka_last: float
    typical_cka_next: float
    typical_cka_last: float


@dataclasses.dataclass(frozen=True)
class SpectraResult(Result):
    """The states that were looked at."""

    states: tuple[StateSpectra, ...]


class StreamSpectra(Reducer):
    """Effective rank, participation ratio, stable rank and CKA of evenly spaced states. See `StateSpectra`.

    The covariance is summed in fp64 over all tokens but the first of each sequence, so its memory does not
    grow with the text: ``16 * width ** 2`` bytes a state; ``2 * width ** 2`` FLOPs a state and token, and an
    eigenvalue problem a state for the result. CKA is that of Kornblith et al. (arXiv 1905.00414) with the
    unbiased HSIC_1 of Nguyen et al. (arXiv 2010.15327, eq. 2) averaged over windows, each a minibatch, so
    that it depends on neither the batch size nor, but for noise, the window's length. Several streams are
    one vector.

    Args:
        num_states: how many states, evenly spaced, the first and the last among them; None for all.
        cka_tokens: tokens of a window that CKA looks at, evenly spaced.

    Raises:
        ConfigError: a number is too small.
    """

    name = "stream_spectra"
    saved = ("_grams", "_hsic")

    def __init__(self, num_states: int | None = 9, *, cka_tokens: int = CKA_TOKENS):
        if num_states is not None and num_states < 2:
            raise ConfigError(f"num_states is {num_states}; it must be at least 2.")
        self.num_states = num_states
        self.cka_tokens = require_positive("cka_tokens", cka_tokens)
        self._grams: dict[tuple[int, str], Tensor] = {}
        self._hsic: dict[tuple[int, int, str], list[float]] = {}
        self._windows: list[Tensor] = []
        self._clouds: dict[int, list[Tensor]] = {}
        self._odd: dict[int, list[Tensor]] = {}

    def update(self, event: BlockEvent) -> None:
        """Take in the chosen states of one block."""
        if event.block == 0:
            self._clouds, self._odd = {}, {}
            places = [mask.nonzero().flatten() for mask in event.batch.is_rest.cpu()]
            columns = event.batch.mask.shape[1]
            self._windows = [row * columns + found for row, found in enumerate(places) if len(found)]
        chosen = _evenly(event.num_blocks, self.num_states)
        for state, x in event.states():
            if state in chosen:
                self._take(state, flat_streams(x.detach()))

    def _take(self, state: int, x: Tensor) -> None:
        clouds: list[Tensor] = []
        odd: list[Tensor] = []
        for places in self._windows:
            rows = x.index_select(0, places.to(x.device)).cpu().double()
            norm = torch.linalg.vector_norm(rows, dim=-1)
            outlier = norm > OUTLIER_MEDIANS * norm.median()
            self._add(state, "whole", rows)
            self._add(state, "outliers", rows[outlier])
            some = _spread(len(rows), self.cka_tokens)
            clouds.append(_kernel(rows[some]))
            odd.append(outlier[some])
        self._clouds[state], self._odd[state] = clouds, odd

    def _add(self, state: int, which: str, rows: Tensor) -> None:
        gram = self._grams.setdefault((state, which), rows.new_zeros(rows.shape[1] + 1, rows.shape[1] + 1))
        if len(rows):
            wide = torch.cat([rows, rows.new_ones(len(rows), 1)], -1)
            gram.addmm_(wide.T, wide)

    def end_pass(self, batch: Batch) -> None:
        """Compare the states of every window of a complete pass."""
        states = sorted(self._clouds)
        following = zip(states, [*states[1:], *states[-1:]], strict=True)
        pairs = {pair for s, t in following for pair in ((s, s), (s, t), (s, states[-1]))}
        for window in range(len(self._windows) if states else 0):
            odd = torch.stack([self._odd[state][window] for state in states]).any(0)
            for which, kept in (("whole", torch.ones_like(odd)), ("typical", ~odd)):
                clouds = {s: self._clouds[s][window][kept][:, kept] for s in states}
                if (num := int(kept.sum())) >= 4:
                    for s, t in pairs:
                        entry = self._hsic.setdefault((s, t, which), [0.0, 0.0])
                        entry[0] += num * hsic(clouds[s], clouds[t])
                        entry[1] += num
        self._clouds, self._odd, self._windows = {}, {}, []

    def merge(self, other: Self) -> None:
        """Add what ``other`` has seen."""
        for key, gram in other._grams.items():
            self._grams[key] = self._grams[key] + gram if key in self._grams else gram.clone()
        for key, entry in other._hsic.items():
            mine = self._hsic.get(key, [0.0, 0.0])
            self._hsic[key] = [a + b for a, b in zip(mine, entry, strict=True)]

    def result(self) -> SpectraResult:
        """The figures so far."""
        states = sorted({state for state, _ in self._grams})
        last = states[-1] if states else 0
        found: list[StateSpectra] = []
        for state, following in zip(states, [*states[1:], None], strict=True):
            whole, outliers = self._grams[state, "whole"], self._grams[state, "outliers"]
            everything = spectrum(whole)
            found.append(
                StateSpectra(
                    state,
                    everything,
                    spectrum(whole - outliers) if outliers[-1, -1] else everything,
                    self._cka(state, following, "whole"),
                    self._cka(state, last, "whole"),
                    self._cka(state, following, "typical"),
                    self._cka(state, last, "typical"),
                )
            )
        return SpectraResult(tuple(found))

    def _cka(self, state: int, other: int | None, which: str) -> float:
        if other is None:
            return math.nan
        cross, one, two = (
            ratio(*self._hsic.get((s, t, which), (math.nan, 1.0)))
            for s, t in ((state, other), (state, state), (other, other))
        )
        return cross / math.sqrt(one * two) if one > 0 and two > 0 else math.nan


def spectrum(gram: Tensor) -> Spectrum:
    """Return the figures of a token matrix X from ``[X 1]'[X 1]``, ``[width + 1, width + 1]`` fp64."""
    num = round(float(gram[-1, -1]))
    if num < 2 or not bool(torch.isfinite(gram).all()):
        return Spectrum(math.nan, math.nan, math.nan, math.nan, num)
    mean = gram[-1, :-1] / num
    values = torch.linalg.eigvalsh(gram[:-1, :-1] / num - torch.outer(mean, mean)).clamp_min(0.0)
    # Of fewer tokens than entries, what is beyond the rank is rounding, which a square root would blow up.
    values = values.flip(0)[: num - 1]
    if not float(values[0]) > 0:
        return Spectrum(math.nan, math.nan, math.nan, math.nan, num)
    return Spectrum(
        participation_ratio=float(values.sum().square() / values.square().sum()),
        effective_rank=_perplexity(values.sqrt()),
        eigenvalue_rank=_perplexity(values),
        stable_rank=float(values.sum() / values[0]),
        num_tokens=num,
    )


def hsic(one: Tensor, other: Tensor) -> float:
    """Return the unbiased HSIC_1 of two kernels ``[n, n]``, n at least 4, their diagonals zero.

    ``(tr(KL) + 1'K1 1'L1 / ((n-1)(n-2)) - 2 / (n-2) 1'KL1) / (n (n-3))`` (Song et al. 2012, eq. 5; arXiv
    2010.15327, eq. 3).
    """
    n = len(one)
    k, m = one.sum(0), other.sum(0)
    total = (one * other).sum() + k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k @ m)
    return float(total) / (n * (n - 3))


def _kernel(rows: Tensor) -> Tensor:
    kernel = rows @ rows.T
    return kernel.fill_diagonal_(0.0)


def _perplexity(weights: Tensor) -> float:
    share = weights / weights.sum()
    return float(torch.special.entr(share).sum().exp())


def _evenly(num_blocks: int, num: int | None) -> set[int]:
    if num is None:
        return set(range(num_blocks + 1))
    return {round(i * num_blocks / (num - 1)) for i in range(num)}


def _spread(num: int, most: int) -> Tensor:
    """Up to ``most`` places of ``num``, evenly spaced."""
    return torch.arange(num) if num <= most else (torch.arange(most) * num) // most
