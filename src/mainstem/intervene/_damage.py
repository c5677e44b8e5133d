"""What a break does to the states above it and to the prediction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.measure import Batch, HostBatch, Result, Split, token_dot, token_norm
from mainstem.measure._host import SplitSums, cosine, relative_size

_CHUNK_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class StateDamage(Result):
    """One state above the break.

    Attributes:
        state: ``l``: before block ``l``; the last one is after the last block.
        change: mean over tokens of ``|h' - h| / |h|``, ``h`` the state of the whole model.
        cosine: mean over tokens of ``cos(h', h)``.
    """

    state: int
    change: Split
    cosine: Split


@dataclasses.dataclass(frozen=True)
class FloorDamage(Result):
    """What breaking one block does.

    Attributes:
        floor: number of the block, or whatever the sweep's ``floors`` named.
        states: every state above the lowest block that the break acts at; none where the top alone is
            measured.
        kl: mean over tokens of ``KL(p || p')``, nats, ``p`` the whole model's prediction.
        top1: share of tokens whose most likely word stays the same.
        nll: mean loss of the next token, nats; ``nll_delta`` is that minus the whole model's, on the same
            tokens.
        num_tokens: tokens that the loss was taken at.
    """

    floor: int
    states: tuple[StateDamage, ...]
    kl: Split
    top1: Split
    nll: float
    nll_delta: float
    num_tokens: int


class Clean:
    """The whole model's states and prediction on one batch, ready to be compared with broken ones."""

    def __init__(self, states: dict[int, Tensor], logits: Tensor | None, batch: Batch):
        self.states, self.batch = states, batch
        self.norms = {n: token_norm(s) for n, s in states.items()}
        self.top = None if logits is None else _Prediction(logits.flatten(0, 1), batch)


class Damage:
    """Figures of all floors, summed over batches."""

    def __init__(self) -> None:
        self._sums = SplitSums()
        self._loss: dict[int, list[float]] = {}
        self._states: dict[int, dict[int, None]] = {}

    def plus(self, other: Damage) -> Damage:
        """Return the sums of both; neither is changed, so that a pass counts whole or not at all."""
        both = Damage()
        for one in (self, other):
            both._sums.merge(one._sums)
            for floor, sums in one._loss.items():
                both._loss[floor] = [
                    a + b for a, b in zip(both._loss.get(floor, [0.0] * 3), sums, strict=True)
                ]
            for floor, states in one._states.items():
                both._states.setdefault(floor, {}).update(states)
        return both

    def add_state(self, floor: int, number: int, broken: Tensor, clean: Clean, host: HostBatch) -> None:
        """Add the state ``number`` of a broken pass."""
        whole = clean.states[number]
        figures = [token_norm(broken - whole), clean.norms[number], token_norm(broken)]
        size, norm, other = (f.cpu().numpy()[None] for f in figures)
        dot = token_dot(broken, whole).cpu().numpy()[None]
        self._sums.add([(floor, number, "change")], relative_size(size, norm), host)
        self._sums.add([(floor, number, "cosine")], cosine(dot, other, norm), host)
        self._states.setdefault(floor, {})[number] = None

    def add_top(self, floor: int, logits: Tensor | None, clean: Clean, host: HostBatch, after: int) -> None:
        """Add the prediction of a broken pass; the loss at positions beyond ``after``."""
        self._states.setdefault(floor, {})
        if clean.top is None or logits is None:
            return
        kl, agrees, nll = clean.top.compare(logits.flatten(0, 1))
        self._sums.add([(floor, "kl")], kl[None], host)
        self._sums.add([(floor, "top1")], agrees[None], host)
        if nll is None:
            return
        place = np.arange(nll.size) % clean.batch.mask.shape[1]
        scored = clean.top.scored & (place > after)
        delta = (nll - clean.top.nll)[scored].sum()
        new = [float(nll[scored].sum()), float(delta), float(scored.sum())]
        self._loss[floor] = [a + b for a, b in zip(self._loss.get(floor, [0.0] * 3), new, strict=True)]

    def result(self, floors: Sequence[int]) -> tuple[FloorDamage, ...]:
        """The figures so far, of those floors that any were seen of."""
        return tuple(self._floor(f) for f in floors if f in self._states)

    def _floor(self, floor: int) -> FloorDamage:
        mean = self._sums.mean
        nll, delta, count = self._loss.get(floor, (math.nan, math.nan, 0.0))
        return FloorDamage(
            floor=floor,
            states=tuple(
                StateDamage(n, mean((floor, n, "change")), mean((floor, n, "cosine")))
                for n in sorted(self._states[floor])
            ),
            kl=mean((floor, "kl")),
            top1=mean((floor, "top1")),
            nll=nll / count if count else math.nan,
            nll_delta=delta / count if count else math.nan,
            num_tokens=int(count),
        )


class _Prediction:
    """The whole model's prediction at every token: probabilities, best word, loss.

    ``KL(p || q) = sum p log p - sum p z + lse(z)`` with ``z`` the broken model's logits: what belongs to
    ``p`` is worked out once; each break costs one exponential and one product of ``[tokens, vocab]``.
    """

    def __init__(self, logits: Tensor, batch: Batch):
        wide = torch.promote_types(logits.dtype, torch.float32)
        parts = [piece.to(wide) for piece in logits.split(_CHUNK_TOKENS)]
        self.p = torch.cat([piece.softmax(-1) for piece in parts])
        self._own = torch.cat([torch.special.entr(p).sum(-1).neg() for p in self.p.split(_CHUNK_TOKENS)])
        self._best = torch.cat([piece.argmax(-1) for piece in parts])
        self.scored: NDArray[np.bool_] = np.zeros(logits.shape[0], dtype=bool)
        self._targets: Tensor | None = None
        if batch.token_ids is not None:
            ids = batch.token_ids.to(logits.device)
            self._targets = torch.cat([ids[:, 1:], ids[:, :1]], 1).flatten()
            real = torch.cat([batch.mask[:, :-1] & batch.mask[:, 1:], torch.zeros_like(batch.mask[:, :1])], 1)
            self.scored = real.flatten().cpu().numpy()
        _, _, nll = self.compare(logits)
        self.nll = np.zeros(logits.shape[0]) if nll is None else nll

    @property
    def num_bytes(self) -> int:
        """What is held."""
        return self.p.numel() * self.p.element_size()

    def compare(
        self, logits: Tensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64] | None]:
        """Return KL, whether the best word is the same, and the loss of each token's next one."""
        columns: list[list[Tensor]] = [[], [], []]
        wide = self.p.dtype
        for start in range(0, logits.shape[0], _CHUNK_TOKENS):
            z = logits[start : start + _CHUNK_TOKENS].to(wide)
            p = self.p[start : start + _CHUNK_TOKENS]
            lse = z.logsumexp(-1)
            cross = torch.linalg.vecdot(p, z)
            if not bool(torch.isfinite(cross).all()):  # a logit of -inf where p is 0 counts nothing
                cross = (p * z).masked_fill(p == 0, 0.0).sum(-1)
            columns[0].append((self._own[start : start + len(z)] - cross + lse).clamp_min(0))
            columns[1].append(z.argmax(-1) == self._best[start : start + len(z)])
            if self._targets is not None:
                target = self._targets[start : start + len(z), None]
                columns[2].append(lse - z.gather(-1, target).squeeze(-1))
        kl, agrees, *nll = (torch.cat(c).double().cpu().numpy() for c in columns if c)
        return kl, agrees, nll[0] if nll else None
