"""The reversible residual against RevTorch 0.2.4, whose backward inverts its blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from agreement import Row, Run
from around import side, some
from reference_stack import make_stack, randomize
from torch import nn

from mainstem.connections import NormConfig, Reversible

pytestmark = pytest.mark.oracle


def test_sequence(agree: Callable[..., None]) -> None:
    """Gradients of theirs come from recomputed states, ours from kept ones."""
    revtorch = pytest.importorskip("revtorch", reason="needs revtorch; `make test-oracle` installs it")
    stack = make_stack(Reversible(), NormConfig(kind="layer"), num_sublayers=6)
    randomize(stack.trunk)
    other = copy.deepcopy(stack)
    norms = [join.norm for join in other.trunk.connections]
    blocks = [nn.Sequential(n, b) for n, b in zip(norms, other.branches, strict=True)]
    sequence = revtorch.ReversibleSequence(
        nn.ModuleList(
            revtorch.ReversibleBlock(blocks[i], blocks[i + 1], split_along_dim=2) for i in range(0, 6, 2)
        )
    )
    halves = some(2, 7, 128).requires_grad_()
    stream = halves.chunk(2, dim=-1)
    for join, branch in zip(stack.trunk.connections, stack.branches, strict=True):
        stream = join(stream, branch)
    weights = {k: p for k, p in stack.named_parameters() if "final_norm" not in k}
    out = torch.cat(list(stream), dim=-1)
    ours = side(out, halves, **weights)
    again = halves.detach().clone().requires_grad_()
    expected = sequence(again)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
    (expected * direction).sum().backward()
    gradients = {"input": again.grad} | {k: other.get_parameter(k).grad for k in weights}
    row = Row("reversible", "revtorch", "ReversibleSequence", "three blocks, every weight")
    agree(row, ours, Run([expected.detach()], gradients))
