from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mainstem.measure import LossSums, loss_sums, next_token_loss, token_nll


def by_hand(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> tuple[float, int, int]:
    total, tokens, correct = 0.0, 0, 0
    for row in range(ids.shape[0]):
        for t in range(ids.shape[1] - 1):
            if mask[row, t] and mask[row, t + 1]:
                z = logits[row, t].double().numpy()
                target = int(ids[row, t + 1])
                total += math.log(np.exp(z - z.max()).sum()) + z.max() - z[target]
                tokens += 1
                correct += int(z.argmax() == target)
    return total, tokens, correct


@pytest.mark.parametrize("chunk", [1, 4, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_next_token_loss_by_hand(dtype: torch.dtype, chunk: int) -> None:
    logits, ids = 4 * torch.randn(3, 8, 20).to(dtype), torch.randint(0, 20, (3, 8))
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[0, :3] = False
    mask[1, 5:] = False
    logits[~mask] = torch.nan
    ids[~mask] = -100
    found = next_token_loss(logits, ids, mask, chunk_tokens=chunk)
    total, tokens, correct = by_hand(logits, ids, mask)
    assert (found.num_tokens, found.num_correct) == (tokens, correct) == (4 + 4 + 7, correct)
    assert found.nll_sum == pytest.approx(total, rel=1e-12 if dtype == torch.float64 else 1e-6)
    assert found.nll == pytest.approx(total / tokens, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert found.accuracy == correct / tokens


def test_padding_side_does_not_show() -> None:
    logits, ids = torch.randn(1, 6, 20), torch.randint(0, 20, (1, 6))
    plain = next_token_loss(logits, ids, torch.ones(1, 6, dtype=torch.bool))
    for left in (True, False):
        blank, pad = torch.full((1, 3, 20), torch.nan), torch.zeros(1, 3, dtype=torch.long)
        order = (lambda a, b: [a, b]) if left else (lambda a, b: [b, a])
        mask = torch.cat(order(pad.bool(), torch.ones(1, 6, dtype=torch.bool)), 1)
        padded = next_token_loss(torch.cat(order(blank, logits), 1), torch.cat(order(pad, ids), 1), mask)
        assert padded == plain


def test_masked_lm_scores_in_place() -> None:
    logits, targets = torch.randn(2, 5, 9), torch.randint(0, 9, (2, 5))
    scored = torch.zeros(2, 5, dtype=torch.bool)
    scored[0, 1] = scored[1, 4] = True
    found = loss_sums(logits, targets, scored)
    expected = torch.nn.functional.cross_entropy(logits[scored].double(), targets[scored], reduction="sum")
    assert (found.num_tokens, found.nll_sum) == (2, pytest.approx(expected.item(), rel=1e-6))


def test_closed_forms_and_sums() -> None:
    nll, correct = token_nll(torch.zeros(3, 8), torch.tensor([0, 1, 2]))
    assert nll.tolist() == pytest.approx([math.log(8)] * 3)
    assert correct.tolist() == [True, False, False]
    one, other = LossSums(3.0, 2, 1), LossSums(1.5, 1, 1)
    assert one + other == LossSums(4.5, 3, 2)
    assert (one + other).nll == 1.5
    empty = next_token_loss(
        torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1).bool()
    )
    assert (empty.num_tokens, math.isnan(empty.nll), math.isnan(empty.perplexity)) == (0, True, True)
    assert LossSums(1e6, 1, 0).perplexity == math.inf
