"""Whether the word, and the words before it, can be read off a state by a linear map."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.measure._host import ratio
from mainstem.measure._results import Result, require_positive
from mainstem.measure._state import storable
from mainstem.measure.events import Batch, BlockEvent, Reducer
from mainstem.measure.identity import nearest_of, unit_rows

OFFSETS = (0, 1, 2, 3)
"""How far back the tokens are that are asked for."""
TEXT_EVERY, TYPES_EVERY = 4, 10
"""Every 4th window and one token type in 10 are held out."""
MAX_HELD_OUT = 1024
"""Held-out tokens that are judged, at most."""
_GRID = tuple(10.0**power for power in range(-6, 3))


@dataclasses.dataclass(frozen=True)
class ProbeFigures(Result):
    """One probe.

    Attributes:
        state: ``l``: before block ``l``; the last one is after the last block.
        offset: the token asked for is this many places back.
        text: share of held-out tokens, of types that were trained on, that it names.
        types: share of held-out tokens of held-out types that it names.
        ridge: penalty that generalised cross-validation chose, in mean eigenvalues of the covariance.

    All nan for a state that is not finite everywhere, or without 2 training tokens and one to judge by.
    """

    state: int
    offset: int
    text: float
    types: float
    ridge: float


@dataclasses.dataclass(frozen=True)
class ProbeBaseline(Result):
    """What needs no state, for one offset, on the same held-out tokens.

    Attributes:
        offset: as of `ProbeFigures`.
        text, types: share that always naming the commonest of these held-out tokens would get.
        bigram: share of ``text`` that the likeliest token given the one in place gets, by the training
            tokens' counts; nan for offset 0.
    """

    offset: int
    text: float
    types: float
    bigram: float


@dataclasses.dataclass(frozen=True)
class ProbeResult(Result):
    """Linear probes of token identity.

    Attributes:
        figures: by state, then offset.
        baselines: one entry an offset.
        num_train: tokens trained on; ``num_text`` and ``num_types``: tokens judged, for offset 0.
    """

    figures: tuple[ProbeFigures, ...]
    baselines: tuple[ProbeBaseline, ...]
    num_train: int
    num_text: int
    num_types: int


class LinearProbe(Reducer):
    """Ridge regression from a state to the input embedding of its token and of the three before it.

    ``y = W (x - mean x) + mean y``, ``x`` the state divided by its root mean square, ``y`` the embedding at
    unit length; what is named is the word whose embedding has the largest cosine with the prediction
    (compare Feucht et al., arXiv 2406.20086). A probe over classes could not name a word that it was not
    trained on, so held-out types would say nothing of it: this one is asked for a direction, and all words
    are candidates. Every 4th window is held out, and one token type in 10: no training token has such a
    type in place or up to three before. The penalty is chosen by generalised cross-validation (Golub, Heath
    and Wahba 1979) from the same sums. Several streams are asked through their mean.

    Holds ``X'X`` and four ``X'Y`` in fp64, ``40 * width ** 2`` bytes a state, the states of the held-out
    sample and the training sample's ids, whatever the length of the text; costs ``10 * width ** 2`` FLOPs in
    fp64 a state and token.

    Args:
        embedding: ``[vocab, width]``, the model's input embedding.
        num_states: how many states, evenly spaced, the first and the last among them.
        max_held_out: held-out tokens that are judged, a sample by hash of place beyond that.
        max_counted: training tokens that the bigram counts, likewise.

    Raises:
        ConfigError: the embedding is no matrix, or a number is less than 1 (of states, 2).
    """

    name = "linear_probe"
    saved = ("_gram", "_cross", "_squares", "_held", "_counted")

    def __init__(
        self,
        embedding: Tensor,
        *,
        num_states: int = 5,
        max_held_out: int = MAX_HELD_OUT,
        max_counted: int = 1 << 18,
    ):
        if embedding.dim() != 2:
            raise ConfigError(f"An embedding is [vocab, width]; got {list(embedding.shape)}.")
        if num_states < 2:
            raise ConfigError(f"num_states is {num_states}; a probe is asked of at least 2.")
        self.num_states = num_states
        self.max_held_out = require_positive("max_held_out", max_held_out)
        self.max_counted = require_positive("max_counted", max_counted)
        self._unit = unit_rows(embedding.detach().float())
        self._gram: dict[int, Tensor] = {}
        self._cross: dict[tuple[int, int], Tensor] = {}
        self._squares: dict[int, float] = dict.fromkeys(OFFSETS, 0.0)
        self._held = _Sample.empty()
        self._counted = _Sample.empty()
        self._chosen: tuple[int, ...] = ()
        self._pass: _Places | None = None
        self._states: list[Tensor] = []

    def update(self, event: BlockEvent) -> None:
        """Take in the chosen states of one block.

        Raises:
            ConfigError: the model reads no tokens, or the states have another width than the embedding.
        """
        if event.batch.token_ids is None or event.after.shape[-1] != self._unit.shape[1]:
            raise ConfigError(
                f"A probe for embeddings of width {self._unit.shape[1]} was asked for; it needs token ids "
                f"and states of that width, and these are {list(event.after.shape)}."
            )
        if event.block == 0 or self._pass is None:
            spaced = (round(i * event.num_blocks / (self.num_states - 1)) for i in range(self.num_states))
            self._chosen = tuple(dict.fromkeys(spaced))
            self._pass, self._states = _Places.of(event.batch, self._held, self.max_held_out), []
        for state, x in event.states():
            if state in self._chosen:
                self._take(state, x.detach().flatten(0, 1), self._pass)

    def _take(self, state: int, x: Tensor, places: _Places) -> None:
        self._states.append(_scaled(x, places.held).cpu())
        rows = _scaled(x, places.train).cpu().double()
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], -1)
        gram = self._gram.setdefault(state, rows.new_zeros(rows.shape[1], rows.shape[1]))
        gram.addmm_(rows.T, rows)
        for column, offset in enumerate(OFFSETS):
            target = self._unit.cpu()[torch.from_numpy(places.train_ids[:, column])].double()
            cross = self._cross.setdefault(
                (state, offset), rows.new_zeros(rows.shape[1], self._unit.shape[1])
            )
            cross.addmm_(rows.T, target)
            if state == 0:
                self._squares[offset] += float(target.square().sum())

    def end_pass(self, batch: Batch) -> None:
        """Keep the held-out states of a complete pass, and its training tokens' ids."""
        if self._pass is None:
            return
        places, self._pass = self._pass, None
        held = _Sample(places.held_keys, places.held_ids, torch.stack(self._states, 1))
        self._held = self._held.joined(held, self.max_held_out)
        none = torch.zeros(len(places.train_ids), 0)
        counted = _Sample(places.train_keys, places.train_ids, none)
        self._counted = self._counted.joined(counted, self.max_counted)
        self._states = []

    def merge(self, other: Self) -> None:
        """Add what ``other`` has seen."""
        for key, value in other._gram.items():
            self._gram[key] = self._gram[key] + value if key in self._gram else value.clone()
        for key, value in other._cross.items():
            self._cross[key] = self._cross[key] + value if key in self._cross else value.clone()
        for offset, value in other._squares.items():
            self._squares[offset] += value
        self._held = self._held.joined(other._held, self.max_held_out)
        self._counted = self._counted.joined(other._counted, self.max_counted)

    def result(self) -> ProbeResult:
        """Fit the probes and judge them."""
        is_new = held_out_types(self._held.ids)
        figures: list[ProbeFigures] = []
        for number, (state, gram) in enumerate(sorted(self._gram.items())):
            is_fit = bool(torch.isfinite(gram).all()) and gram[-1, -1] >= 2
            if not is_fit or not len(self._held.keys):
                figures += [ProbeFigures(state, offset, math.nan, math.nan, math.nan) for offset in OFFSETS]
                continue
            fit = _Ridge(gram)
            for column, offset in enumerate(OFFSETS):
                ridge, guess = fit.predict(
                    self._cross[state, offset], self._squares[offset], self._held.states[:, number]
                )
                named = nearest_of(guess.to(self._unit), self._unit, 128).cpu().numpy()
                hit = named == self._held.ids[:, column]
                new = is_new[:, column]
                figures.append(ProbeFigures(state, offset, _mean(hit[~new]), _mean(hit[new]), ridge))
        return ProbeResult(
            figures=tuple(figures),
            baselines=tuple(self._baseline(c, is_new[:, c]) for c in range(len(OFFSETS))),
            num_train=int(next(iter(self._gram.values()))[-1, -1]) if self._gram else 0,
            num_text=int((~is_new[:, 0]).sum()),
            num_types=int(is_new[:, 0].sum()),
        )

    def _baseline(self, column: int, new: NDArray[np.bool_]) -> ProbeBaseline:
        wanted = self._held.ids[:, column]
        bigram = math.nan
        if OFFSETS[column]:
            pairs = Counter(map(tuple, self._counted.ids[:, [0, column]].tolist()))
            best: dict[int, tuple[int, int]] = {}
            for (given, token), count in pairs.items():
                best[given] = max(best.get(given, (0, 0)), (count, -token))
            totals = Counter(self._counted.ids[:, column].tolist())
            default = min(((-count, token) for token, count in totals.items()), default=(0, -1))[1]
            given = self._held.ids[~new, 0].tolist()
            guessed = [-best[g][1] if g in best else default for g in given]
            bigram = _mean(np.array(guessed) == wanted[~new])
        return ProbeBaseline(OFFSETS[column], _commonest(wanted[~new]), _commonest(wanted[new]), bigram)


class _Ridge:
    """Ridge regression from ``[X 1]'[X 1]`` and ``[X 1]'Y``, the penalty by generalised cross-validation."""

    def __init__(self, gram: Tensor):
        self.num = float(gram[-1, -1])
        self.mean = gram[-1, :-1] / max(self.num, 1.0)
        covariance = gram[:-1, :-1] - self.num * torch.outer(self.mean, self.mean)
        values, self._vectors = torch.linalg.eigh(covariance)
        self._values = values.clamp_min(0.0)

    def predict(self, cross: Tensor, squares: float, states: Tensor) -> tuple[float, Tensor]:
        """Return the chosen penalty, in mean eigenvalues, and ``[tokens, width]`` predictions in fp64."""
        mean = cross[-1] / max(self.num, 1.0)
        along = self._vectors.T @ (cross[:-1] - self.num * torch.outer(self.mean, mean))
        total = squares - self.num * float(mean @ mean)
        scale = float(self._values.mean()) or 1.0
        scored = [(self._score(along, total, scale * factor), factor) for factor in _GRID]
        ridge = min((s, f) for s, f in scored if not math.isnan(s))[1]
        weight = self._vectors @ (along / (self._values + scale * ridge).unsqueeze(-1))
        return ridge, (states.double() - self.mean) @ weight + mean

    def _score(self, along: Tensor, total: float, ridge: float) -> float:
        kept = self._values / (self._values + ridge)
        freedom = 1.0 + float(kept.sum())
        if freedom >= self.num:
            return math.inf
        explained = along.square().sum(-1) * (self._values + 2 * ridge) / (self._values + ridge).square()
        return (total - float(explained.sum())) / self.num / (1 - freedom / self.num) ** 2


@dataclasses.dataclass(frozen=True)
class _Places:
    """Flat places of one pass's training and held-out tokens, their ids by offset, and their keys."""

    train: Tensor
    train_ids: NDArray[np.int64]
    train_keys: NDArray[np.int64]
    held: Tensor
    held_ids: NDArray[np.int64]
    held_keys: NDArray[np.int64]

    @classmethod
    def of(cls, batch: Batch, kept: _Sample, most: int) -> _Places:
        """Choose among the tokens of a pass; of the held-out ones, those that a sample still wants."""
        host = batch.host
        assert host.token_ids is not None
        places = np.flatnonzero(host.position >= max(OFFSETS))
        ids = np.stack([host.token_ids[places - offset] for offset in OFFSETS], -1)
        keys = _hash(host.sequence[places] * (1 << 32) + host.position[places])
        is_held = host.sequence[places] % TEXT_EVERY == TEXT_EVERY - 1
        train = ~is_held & ~held_out_types(ids).any(-1)
        wanted = is_held.copy()
        wanted[is_held] = kept.wants(keys[is_held], most)
        return cls(
            torch.from_numpy(places[train]), ids[train], keys[train],
            torch.from_numpy(places[wanted]), ids[wanted], keys[wanted],
        )  # fmt: skip


@storable
@dataclasses.dataclass(frozen=True)
class _Sample:
    """The tokens with the smallest keys of all that were seen: the same in whatever order they came.

    Attributes:
        keys: ``[tokens]`` int64, ascending; ``ids``: ``[tokens, offsets]``; ``states``: ``[tokens, ...]``.
    """

    keys: NDArray[np.int64]
    ids: NDArray[np.int64]
    states: Tensor

    @classmethod
    def empty(cls) -> _Sample:
        """No tokens."""
        return cls(np.zeros(0, np.int64), np.zeros((0, len(OFFSETS)), np.int64), torch.zeros(0))

    def wants(self, keys: NDArray[np.int64], most: int) -> NDArray[np.bool_]:
        """Say which of new keys are among the smallest."""
        every = np.sort(np.concatenate([self.keys, keys]))
        return keys <= every[min(most, len(every)) - 1] if len(every) else np.zeros(len(keys), bool)

    def joined(self, other: _Sample, most: int) -> _Sample:
        """Return the smallest of both."""
        keys = np.concatenate([self.keys, other.keys])
        order = np.argsort(keys, kind="stable")[:most]
        parts = [s.states for s in (self, other) if len(s.keys)]
        states = torch.cat(parts)[torch.from_numpy(order)] if parts else self.states
        return _Sample(keys[order], np.concatenate([self.ids, other.ids])[order], states)

    def state_dict(self) -> dict[str, Any]:
        """Return the arrays."""
        return {"keys": self.keys, "ids": self.ids, "states": self.states}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> _Sample:
        """Return the sample that gave this state."""
        return cls(**state)


def held_out_types(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say which token ids are of types that no probe is trained on: one in 10, by hash."""
    return _hash(ids + 1) % TYPES_EVERY == 0


def _hash(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Mix the bits (the finaliser of splitmix64, Steele et al. 2014), to at least 0."""
    x = values.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def _scaled(x: Tensor, places: Tensor) -> Tensor:
    """Rows at some places over their root mean square, streams averaged, in fp32."""
    rows = x.index_select(0, places.to(x.device)).float()
    rows = rows.mean(1) if rows.dim() == 3 else rows
    size = rows.square().mean(-1, keepdim=True).sqrt()
    return torch.where(size == 0, 0.0, rows / size)


def _mean(hits: NDArray[np.bool_]) -> float:
    return ratio(float(hits.sum()), len(hits))


def _commonest(ids: NDArray[np.int64]) -> float:
    return ratio(float(np.bincount(ids).max()) if len(ids) else 0.0, len(ids))
