"""Stream gradients against finite differences, in fp64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mainstem.errors import ConfigError
from mainstem.measure import Batch, BlockEvent, StreamGradients, SublayerEvent, Write

WIDTH, VOCAB, BLOCKS = 4, 7, 3


class Stack(nn.Module):
    """Residual blocks that hand their events on; ``at`` adds ``shift`` to one state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)

    def forward(self, batch: Batch, reducer: StreamGradients | None, at: int = -1, shift: float | Tensor = 0):
        assert batch.token_ids is not None
        h = self.embed(batch.token_ids)
        h = h + shift if at == 0 else h
        for i, block in enumerate(self.blocks):
            before, write = h, torch.tanh(block(h)).cumsum(1)
            h = before + write
            h = h + shift if at == i + 1 else h
            if reducer is not None:
                sublayer = SublayerEvent(i, before, (Write("mlp", write),), h)
                reducer.update(BlockEvent(i, BLOCKS, before, (sublayer,), h, batch))
        losses = nn.functional.cross_entropy(
            self.head(h).flatten(0, 1), batch.token_ids.flatten(), reduction="none"
        )
        return (losses * batch.mask.flatten()).sum()


def a_batch(seed: int = 1) -> Batch:
    ids = torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    return Batch(mask, ids)


def test_norms_are_those_of_finite_differences_and_parameters_stay_as_they_were() -> None:
    model, batch, reducer = Stack(), a_batch(), StreamGradients()
    before = copy.deepcopy(model.state_dict())
    reducer.backward(model(batch, reducer), batch)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    result = reducer.result()
    assert (len(result.states), result.num_tokens) == (BLOCKS + 1, 8)
    norms = []
    for state in range(BLOCKS + 1):
        grad = torch.zeros(2, 5, WIDTH, dtype=torch.float64)
        for place in np.ndindex(2, 5, WIDTH):
            shift = torch.zeros_like(grad)
            shift[place] = 1e-6
            with torch.no_grad():
                up, down = (model(batch, None, state, s) for s in (shift, -shift))
            grad[place] = (up - down) / 2e-6
        norm = grad.norm(dim=-1)
        rest = torch.cat([norm[0, 1:], norm[1, 1:3]]).mean().item()
        norms.append(rest)
        assert result.states[state].norm.rest == pytest.approx(rest, rel=1e-7)
        assert result.states[state].norm.first == pytest.approx(norm[:, 0].mean().item(), rel=1e-7)
    assert result.bottom_to_top == pytest.approx(norms[0] / norms[-1], rel=1e-7)


def test_a_gradient_that_was_there_stays() -> None:
    model, batch, reducer = Stack(), a_batch(), StreamGradients()
    model(batch, None).backward()
    kept = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    reducer.backward(model(batch, reducer), batch)
    assert all(torch.equal(p.grad, kept[k]) for k, p in model.named_parameters() if p.grad is not None)
    assert len(kept) == 9


def test_merged_parts_are_the_whole() -> None:
    model, whole, parts = Stack(), StreamGradients(), [StreamGradients(), StreamGradients()]
    for seed, part in enumerate(parts):
        for reducer in (whole, part):
            reducer.backward(model(a_batch(seed), reducer), a_batch(seed))
    parts[0].merge(parts[1])
    assert parts[0].result() == whole.result()


def test_no_gradients_no_figures() -> None:
    model, batch = Stack(), a_batch()
    with pytest.raises(ConfigError, match="record the pass under"), torch.no_grad():
        model(batch, StreamGradients())
    with pytest.raises(ConfigError, match="record one first"):
        StreamGradients().backward(torch.ones(()), batch)


def test_a_copy_of_a_state_is_noticed() -> None:
    model, batch, reducer = Stack(), a_batch(), StreamGradients()
    loss = model(batch, reducer)
    copied = model.embed(a_batch().token_ids).clone() * 1.0
    reducer.update(BlockEvent(BLOCKS, BLOCKS + 1, copied, (), copied, batch))
    with pytest.raises(ConfigError, match=r"states \[4\] of 5"):
        reducer.backward(loss, batch)
