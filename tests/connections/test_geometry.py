"""Connections by direction and length against their formulas, written out in fp64 from the papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_stack import Stack, make_input, make_stack, randomize
from torch import Tensor

from mainstem.connections import NormConfig, OrthogonalUpdate, Scheme
from mainstem.errors import ConfigError

RMS = NormConfig()
# fp64: 24 sublayers of a few additions each, 1e-13 apart at the most; a wrong term is off by 1e-3 and more.
CLOSE: dict[str, float] = {"rtol": 1e-10, "atol": 1e-10}


def random_stack(scheme: Scheme) -> Stack:
    stack = make_stack(scheme, RMS)
    randomize(stack.trunk)
    return stack


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def final(stack: Stack, x: Tensor) -> Tensor:
    weight: Any = stack.trunk.final_norm.weight
    return rms_norm(x, weight)


def check(stack: Stack, expected: Any) -> None:
    """``expected(x, stack)`` gives the same output, and the same gradients for every parameter."""
    x, direction = make_input(0), make_input(3)
    found = torch.autograd.grad((stack(x) * direction).sum(), list(stack.parameters()))
    wanted = expected(x, stack)
    torch.testing.assert_close(stack(x), wanted, **CLOSE)
    gradients = torch.autograd.grad((wanted * direction).sum(), list(stack.parameters()))
    for a, b in zip(found, gradients, strict=True):
        assert (a - b).norm() <= 1e-9 * b.norm()


def test_only_what_is_orthogonal_to_the_stream_is_added() -> None:
    def expected(x: Tensor, stack: Stack) -> Tensor:
        for join, branch in zip(stack.trunk.connections, stack.branches, strict=True):
            weight: Any = join.norm.weight
            update = branch(rms_norm(x, weight))
            # The projector onto the token's direction, as a matrix of its own.
            onto = x[..., :, None] * x[..., None, :] / (x.square().sum(-1)[..., None, None] + 1e-6)
            x = x + update - (onto @ update[..., None])[..., 0]
        return final(stack, x)

    check(random_stack(OrthogonalUpdate()), expected)


@torch.no_grad()
def test_an_orthogonal_update_adds_squares_and_keeps_all_where_the_stream_is_zero() -> None:
    join: Any = OrthogonalUpdate().build(width=64, num_sublayers=1).double().connections[0]
    x, update = make_input(0), make_input(1)
    written = join.write(x, update, None)
    # Epsilon is 1e-6 of a sum of squares of about 64, and so is what is left of the parallel part.
    assert ((written - x) * x).sum(-1).abs().max() <= 1e-5
    torch.testing.assert_close(
        written.square().sum(-1), x.square().sum(-1) + (written - x).square().sum(-1), rtol=1e-6, atol=0
    )
    assert torch.equal(join.write(torch.zeros_like(x), update, None), update)


def test_an_orthogonal_update_needs_an_epsilon() -> None:
    with pytest.raises(ConfigError, match=r"eps=0\.0 must be greater than 0"):
        OrthogonalUpdate(eps=0.0)
