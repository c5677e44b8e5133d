"""How far apart two models' predictions are, on a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mainstem.errors import SourceError
from mainstem.measure._results import Result
from mainstem.measure.loss import token_nll
from mainstem.sources import WindowBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distance(Result):
    """What two models predict at the same places of a text.

    Attributes:
        max_logit_difference: largest ``|a - b|`` over all logits of real tokens; nan where one is.
        mean_kl: mean of ``KL(softmax(before) || softmax(after))`` over real tokens, nats, in fp64.
        loss_before, loss_after: mean ``-log p`` of the next token, nats.
        num_tokens: real tokens whose logits were compared.
        num_scored: of these, how many have a next token in their window.
    """

    max_logit_difference: float
    mean_kl: float
    loss_before: float
    loss_after: float
    num_tokens: int
    num_scored: int


@torch.no_grad()
def measure_distance(before: Any, after: Any, batches: Iterable[WindowBatch]) -> Distance:
    """Run two causal language models of ``transformers``' interface over the same windows.

    Args:
        before: the reference; its distribution is the first of the divergence.
        after: the model that is judged.
        batches: windows of a text; padding is not compared.

    Raises:
        SourceError: no window has two tokens.
    """
    largest, kl, losses = torch.zeros((), dtype=torch.float64), 0.0, [0.0, 0.0]
    num_tokens = num_scored = 0
    for batch in batches:
        real = batch.attention_mask.bool()
        pair = [model(**batch.inputs_for(model), use_cache=False).logits for model in (before, after)]
        for a, b in zip(pair[0][real].split(256), pair[1][real].split(256), strict=True):
            # torch.maximum hands nan on, which Python's max may drop.
            largest = torch.maximum(largest, (a.double() - b.double()).abs().max().cpu())
            kl += kl_sum(a, b)
        scored = real[:, :-1] & real[:, 1:]
        targets = batch.input_ids[:, 1:][scored]
        for index, logits in enumerate(pair):
            losses[index] += float(token_nll(logits[:, :-1][scored], targets)[0].double().sum())
        num_tokens += int(real.sum())
        num_scored += int(scored.sum())
    if not num_scored:
        raise SourceError("the text has no window of two tokens, so nothing is predicted; give more of it.")
    return Distance(
        max_logit_difference=float(largest),
        mean_kl=kl / num_tokens,
        loss_before=losses[0] / num_scored,
        loss_after=losses[1] / num_scored,
        num_tokens=num_tokens,
        num_scored=num_scored,
    )


def kl_sum(before: Tensor, after: Tensor) -> float:
    """Return the sum over tokens of ``KL(softmax(before) || softmax(after))``, fp64; ``[tokens, vocab]``."""
    log_p, log_q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum())
