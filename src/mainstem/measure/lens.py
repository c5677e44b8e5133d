"""When the answer forms: every state read out as if it were the last."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.measure._host import SplitSums
from mainstem.measure._results import Result, Split, require_positive
from mainstem.measure.events import Batch, BlockEvent, Reducer
from mainstem.measure.geometry import measuring_dtype


class Divergence(NamedTuple):
    """Two predictions compared, each ``[tokens]``: ``KL(p_final || p_lens)``, its reverse, same top-1."""

    kl: Tensor
    reverse_kl: Tensor
    agrees: Tensor


def lens_divergence(final_logits: Tensor, lens_logits: Tensor, *, chunk_tokens: int = 128) -> Divergence:
    """Compare a lens's predictions with the model's own.

    ``kl = KL(p_final || p_lens) = sum_v p_final (log p_final - log p_lens)`` is the direction of the tuned
    lens (Belrose et al., arXiv 2303.08112); ``reverse_kl = KL(p_lens || p_final)`` that of Csordas et al.
    (2505.13898). A logit of -inf is a probability of 0: its term is 0, or makes the divergence inf where the
    other is positive.

    Args:
        final_logits: ``[tokens, vocab]``, any float dtype; computed in fp32 (fp64 for fp64).
        lens_logits: ``[tokens, vocab]``.
        chunk_tokens: tokens held in fp32 at a time: five copies of ``[chunk, vocab]``.
    """
    require_positive("chunk_tokens", chunk_tokens)
    parts = [
        _divergence(final, lens)
        for final, lens in zip(final_logits.split(chunk_tokens), lens_logits.split(chunk_tokens), strict=True)
    ]
    return Divergence(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _divergence(final: Tensor, lens: Tensor) -> Divergence:
    dtype = measuring_dtype(final.dtype)
    final, lens = final.detach().to(dtype), lens.detach().to(dtype)
    log_p = final.log_softmax(-1)
    log_q = lens.log_softmax(-1)
    agrees = final.argmax(-1) == lens.argmax(-1)
    difference = log_p - log_q
    # p == 0 rather than ~(p > 0): a nan must come through. The clamp takes off rounding below zero, and keeps
    # nan.
    p, q = log_p.exp_(), log_q.exp_()
    kl = (p * difference).masked_fill_(p == 0, 0.0).sum(-1).clamp_min(0.0)
    reverse = (q * difference.neg_()).masked_fill_(q == 0, 0.0).sum(-1).clamp_min(0.0)
    return Divergence(kl, reverse, agrees)


class _Final:
    """The model's own prediction of a pass, ready to be compared with that of every state.

    With ``z`` the lens's logits, ``p`` the model's probabilities and ``w`` its logits,
    ``KL(p || q) = sum p log p - sum p z + lse(z)`` and ``KL(q || p) = sum q z - lse(z) - sum q w + lse(w)``:
    what belongs to ``p`` is worked out once a pass, and each state costs one exponential and three products.
    """

    def __init__(self, logits: Tensor, chunk_tokens: int):
        self.logits, self._chunk = logits, chunk_tokens
        wide = measuring_dtype(logits.dtype)
        parts = [w.to(wide) for w in logits.split(chunk_tokens)]
        self._lse = torch.cat([w.logsumexp(-1) for w in parts])
        self._p = torch.cat([w.softmax(-1) for w in parts])
        self._best = torch.cat([w.argmax(-1) for w in parts])
        # sum p log p, with 0 log 0 = 0
        self._own = torch.cat([torch.special.entr(p).sum(-1).neg() for p in self._p.split(chunk_tokens)])
        self._has_zero = bool(torch.isinf(logits).any())

    def divergence(self, lens: Tensor, places: Tensor) -> Divergence:
        """Compare at the tokens ``places``; ``lens`` is ``[tokens, vocab]``, all tokens of the pass."""
        parts = [self._some(lens, chunk) for chunk in places.split(self._chunk)]
        return Divergence(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _some(self, lens: Tensor, places: Tensor) -> Divergence:
        z, w = lens.index_select(0, places), self.logits.index_select(0, places)
        if self._has_zero or torch.equal(z, w) or not bool(torch.isfinite(z).all()):
            return _divergence(w, z)
        wide = measuring_dtype(w.dtype)
        z, w, p = z.to(wide), w.to(wide), self._p.index_select(0, places)
        top, best = z.max(-1)
        e = (z - top.unsqueeze(-1)).exp_()
        total = e.sum(-1)
        lse = total.log() + top
        kl = self._own[places] - torch.linalg.vecdot(p, z) + lse
        reverse = (torch.linalg.vecdot(e, z) - torch.linalg.vecdot(e, w)) / total - lse + self._lse[places]
        return Divergence(kl.clamp_min(0.0), reverse.clamp_min(0.0), best == self._best[places])


@dataclasses.dataclass(frozen=True)
class StateLens(Result):
    """What one state predicts, read out by the model's own tail.

    Attributes:
        state: ``l``: before block ``l``; the last one is after the last block, and must agree with the model
            itself.
        kl: mean over tokens of ``KL(p_final || p_lens)``, nats.
        reverse_kl: mean over tokens of ``KL(p_lens || p_final)``, nats.
        top1: share of tokens whose most likely word is the model's own.
    """

    state: int
    kl: Split
    reverse_kl: Split
    top1: Split


@dataclasses.dataclass(frozen=True)
class LensResult(Result):
    """One entry a state, ``0 .. num_blocks``."""

    states: tuple[StateLens, ...]


class LogitLens(Reducer):
    """The logit lens (nostalgebraist 2020) at every state, against the model's own logits. See `StateLens`.

    The final logits of a pass must be known before its first event: run the model once for its logits and its
    tail, hand them to ``begin_pass``, and record the second run. So nothing is held that grows with depth but
    three numbers a token and state, until the pass is complete.

    Args:
        chunk_tokens: tokens compared at a time.

    Raises:
        ConfigError: ``chunk_tokens`` is less than 1.
    """

    name = "logit_lens"
    saved = ("_sums",)

    def __init__(self, *, chunk_tokens: int = 16):
        self.chunk_tokens = require_positive("chunk_tokens", chunk_tokens)
        self._sums = SplitSums()
        self._pass: tuple[_Final, Callable[[Tensor], Tensor]] | None = None
        self._waiting: list[tuple[int, NDArray[np.float64]]] = []

    def __getstate__(self) -> dict[str, Any]:
        # A tail is a model: what travels to another rank or a file is the sums.
        return {**self.__dict__, "_pass": None, "_waiting": []}

    def begin_pass(self, final_logits: Tensor, tail: Callable[[Tensor], Tensor]) -> None:
        """Give what the pass that is about to be recorded is compared with.

        Args:
            final_logits: the model's own, ``[batch, pos, vocab]``.
            tail: everything of the model after the last block: final norm with its statistics recomputed,
                unembedding, soft-cap and scale; a state of this pass, ``[batch, pos, width]`` or
                ``[batch, pos, n, width]``, to ``[batch, pos, vocab]``.
        """
        self._waiting = []
        self._pass = (_Final(final_logits.detach().flatten(0, 1), self.chunk_tokens), tail)

    def update(self, event: BlockEvent) -> None:
        """Read out the states of one block.

        Raises:
            RuntimeError: ``begin_pass`` was not called for this pass.
        """
        if self._pass is None:
            raise RuntimeError(
                "The logit lens has nothing to compare with: call begin_pass before each pass."
            )
        final, tail = self._pass
        for state, x in event.states():
            with torch.no_grad():
                logits = tail(x.detach()).flatten(0, 1)
            figures = np.full((3, event.batch.mask.numel()), np.nan)
            places = event.batch.places("all", final.logits.device)
            found = final.divergence(logits.to(final.logits.device), places)
            figures[:, places.cpu().numpy()] = [t.cpu().double().numpy() for t in found]
            self._waiting.append((state, figures))

    def end_pass(self, batch: Batch) -> None:
        """Add what the states of the pass have given, and let go of its logits."""
        for state, figures in self._waiting:
            self._sums.add([(state, name) for name in Divergence._fields], figures, batch.host)
        self._pass, self._waiting = None, []

    def merge(self, other: Self) -> None:
        """Add what ``other`` has seen."""
        self._sums.merge(other._sums)

    def result(self) -> LensResult:
        """The figures so far."""
        mean = self._sums.mean
        return LensResult(
            tuple(
                StateLens(s, mean((s, "kl")), mean((s, "reverse_kl")), mean((s, "agrees")))
                for s in sorted({state for state, _ in self._sums.names})
            )
        )
