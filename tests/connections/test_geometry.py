"""Connections by direction and length against their formulas, written out in fp64 from the papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_stack import Stack, make_input, make_stack, randomize
from torch import Tensor

from mainstem.connections import DeepDelta, NormConfig, OrthogonalUpdate, Scheme
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


def test_a_delta_write_replaces_what_the_stream_holds_along_the_update() -> None:
    def expected(x: Tensor, stack: Stack) -> Tensor:
        for each, branch in zip(stack.trunk.connections, stack.branches, strict=True):
            join: Any = each
            read = rms_norm(x, join.norm.weight)
            update = branch(read)
            k = update / update.norm(dim=-1, keepdim=True)
            beta = 2 / (1 + torch.exp(-(read @ join.gate_weight + join.gate_bias)))
            value = 4 / (1 + torch.exp(-(x @ join.value_weight + join.value_bias)))
            # Equation of the paper: (I - beta k k^T) x + beta k v, with the matrix written out.
            keep = torch.eye(64, dtype=x.dtype) - beta[..., None, None] * k[..., :, None] * k[..., None, :]
            x = (keep @ x[..., None])[..., 0] + (beta * value)[..., None] * k
        return final(stack, x)

    check(random_stack(DeepDelta()), expected)


@torch.no_grad()
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9])
def test_a_delta_write_moves_one_coordinate_and_leaves_the_rest(beta: float) -> None:
    join: Any = DeepDelta(beta_start=beta).build(width=64, num_sublayers=1).double().connections[0]
    join.gate_weight.zero_()
    x, update = make_input(0), make_input(1)
    k = update / update.norm(dim=-1, keepdim=True)
    _, gate = join.read(x)
    # The bias is a logarithm rounded to fp32.
    torch.testing.assert_close(gate, torch.full_like(gate, beta), rtol=1e-6, atol=0)
    written = join.write(x, update, gate)
    value = join.value_scale / (1 + torch.exp(-(x @ join.value_weight + join.value_bias)))
    held, holds = (x * k).sum(-1), (written * k).sum(-1)
    torch.testing.assert_close(holds, held + gate[..., 0] * (value - held), **CLOSE)
    torch.testing.assert_close(written - holds[..., None] * k, x - held[..., None] * k, **CLOSE)
    torch.testing.assert_close(join.write(x, 1e-3 * update, gate), written, rtol=1e-5, atol=1e-5)
    assert torch.equal(join.write(x, torch.zeros_like(x), gate), x)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"beta_start": 2.0}, r"beta_start=2\.0 must be between 0 and 2"),
        ({"value_scale": 0.0}, r"value_scale=0\.0 and eps=1e-05"),
    ],
)
def test_mistakes_of_a_delta_are_named(mistake: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeepDelta(**mistake)
