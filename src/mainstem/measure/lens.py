"""When the answer forms: every state read out as if it were the last."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
import torch
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

    The final logits of a pass must be known before its first event: run the model once for its logits, hand
    them to ``set_final``, and record the second run. So nothing is held that grows with depth.

    Args:
        tail: everything of the model after the last block: final norm with its statistics recomputed,
            unembedding, soft-cap and scale. ``[1, tokens, width]`` or ``[1, tokens, n, width]`` in the
            stream's dtype to ``[1, tokens, vocab]``; it must treat every token alone, for it sees real tokens
            in arbitrary groups.
        chunk_tokens: tokens read out at a time.

    Raises:
        ConfigError: ``chunk_tokens`` is less than 1.
    """

    name = "logit_lens"

    def __init__(self, tail: Callable[[Tensor], Tensor] | None, *, chunk_tokens: int = 128):
        self._tail = tail
        self.chunk_tokens = require_positive("chunk_tokens", chunk_tokens)
        self._sums = SplitSums()
        self._final: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A tail is a model: what travels to another rank or a file is the sums.
        return {**self.__dict__, "_tail": None, "_final": None}

    def set_final(self, final_logits: Tensor) -> None:
        """Give the model's own logits, ``[batch, pos, vocab]``, of the pass that is about to be recorded."""
        self._final = final_logits.detach()

    def update(self, event: BlockEvent) -> None:
        """Read out the states of one block.

        Raises:
            RuntimeError: the pass has no final logits, or this copy has no tail.
        """
        if self._final is None or self._tail is None:
            missing = "final logits: call set_final before each pass" if self._tail is not None else "tail"
            raise RuntimeError(f"The logit lens has no {missing}.")
        host = event.batch.host
        size = event.batch.mask.numel()
        for state, x in event.states():
            flat, final = x.detach().flatten(0, 1), self._final.flatten(0, 1)
            figures = np.full((3, size), np.nan)
            for places in event.batch.places("all", x.device).split(self.chunk_tokens):
                with torch.no_grad():
                    logits = self._tail(flat.index_select(0, places).unsqueeze(0)).flatten(0, -2)
                own = final.index_select(0, places.to(final.device))
                found = _divergence(own, logits.to(final.device))
                figures[:, places.cpu().numpy()] = [t.cpu().double().numpy() for t in found]
            for name, values in zip(Divergence._fields, figures, strict=True):
                self._sums.add((state, name), values, host)

    def end_pass(self, batch: Batch) -> None:
        """Let go of the pass's logits."""
        self._final = None

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
