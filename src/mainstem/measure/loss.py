"""How well a model predicts: negative log-likelihood, perplexity, top-1 accuracy."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from mainstem.measure._results import Result, require_positive
from mainstem.measure.geometry import measuring_dtype


@dataclasses.dataclass(frozen=True)
class LossSums(Result):
    """Sums over scored tokens; ``a + b`` is what one run over both texts would give.

    Attributes:
        nll_sum: sum of ``-log p(target)`` in nats, fp64.
        num_tokens: tokens scored.
        num_correct: of these, how many had the largest logit.
    """

    nll_sum: float = 0.0
    num_tokens: int = 0
    num_correct: int = 0

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.nll_sum + other.nll_sum,
            self.num_tokens + other.num_tokens,
            self.num_correct + other.num_correct,
        )

    @property
    def nll(self) -> float:
        """Mean, nats a token; nan for no token."""
        return self.nll_sum / self.num_tokens if self.num_tokens else math.nan

    @property
    def perplexity(self) -> float:
        """``exp(nll)``; inf where that overflows."""
        return math.exp(self.nll) if not self.nll > 709.0 else math.inf

    @property
    def accuracy(self) -> float:
        """Share of tokens whose target had the largest logit; nan for no token."""
        return self.num_correct / self.num_tokens if self.num_tokens else math.nan


def token_nll(logits: Tensor, targets: Tensor, *, chunk_tokens: int = 256) -> tuple[Tensor, Tensor]:
    """Return ``(-log softmax(logits)[target], argmax == target)`` a token.

    Args:
        logits: ``[tokens, vocab]``, any float dtype; computed in fp32 (fp64 for fp64).
        targets: ``[tokens]`` int64.
        chunk_tokens: tokens held in fp32 at a time.

    Returns:
        ``[tokens]`` fp32 (fp64) nats, and ``[tokens]`` bool.
    """
    require_positive("chunk_tokens", chunk_tokens)
    losses: list[Tensor] = []
    correct: list[Tensor] = []
    for piece, target in zip(logits.detach().split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        scores = piece.to(measuring_dtype(piece.dtype))
        chosen = scores.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        losses.append(scores.logsumexp(-1) - chosen)
        correct.append(scores.argmax(-1) == target)
    return torch.cat(losses), torch.cat(correct)


def loss_sums(logits: Tensor, targets: Tensor, scored: Tensor, *, chunk_tokens: int = 256) -> LossSums:
    """Score logits against targets in the same places: a masked LM's masked tokens, or any other aligned
    pair.

    Args:
        logits: ``[batch, pos, vocab]``.
        targets: ``[batch, pos]`` int64; read only where scored.
        scored: ``[batch, pos]`` bool.
        chunk_tokens: tokens held in fp32 at a time.
    """
    places = scored.reshape(-1).nonzero().squeeze(-1)
    flat_logits, flat_targets = logits.detach().flatten(0, -2), targets.reshape(-1)
    total = LossSums()
    for piece in places.split(require_positive("chunk_tokens", chunk_tokens)):
        if piece.numel():
            nll, correct = token_nll(flat_logits[piece], flat_targets[piece], chunk_tokens=chunk_tokens)
            total += LossSums(float(nll.cpu().double().sum()), piece.numel(), int(correct.sum()))
    return total


def next_token_loss(logits: Tensor, token_ids: Tensor, mask: Tensor, *, chunk_tokens: int = 256) -> LossSums:
    """Score logits at ``t`` against the token at ``t + 1``, wherever both are real.

    Args:
        logits: ``[batch, pos, vocab]``.
        token_ids: ``[batch, pos]`` int64.
        mask: ``[batch, pos]`` bool, True for a real token, padding on either side.
        chunk_tokens: tokens held in fp32 at a time.
    """
    targets = torch.cat([token_ids[:, 1:], token_ids[:, :1]], 1)
    scored = torch.cat([mask[:, :-1] & mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
    return loss_sums(logits, targets, scored, chunk_tokens=chunk_tokens)
