"""What tests that write a scheme out from its paper share: random weights, a norm, and the comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from reference_stack import NUM_SUBLAYERS, Stack, make_input, make_stack, randomize
from torch import Tensor

from mainstem.connections import NormConfig, Scheme

RMS = NormConfig()
# fp64: 24 sublayers of a few additions each, 1e-13 apart at the most; a wrong term is off by 1e-3 and more.
CLOSE: dict[str, float] = {"rtol": 1e-10, "atol": 1e-10}


def random_stack(scheme: Scheme, num_sublayers: int = NUM_SUBLAYERS) -> Stack:
    stack = make_stack(scheme, RMS, num_sublayers=num_sublayers)
    randomize(stack.trunk)
    return stack


def rms_norm(x: Tensor, weight: Tensor | float = 1.0, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def final(stack: Stack, x: Tensor) -> Tensor:
    weight: Any = stack.trunk.final_norm.weight
    return rms_norm(x, weight)


def check(stack: Stack, expected: Callable[[Tensor, Stack], Tensor]) -> None:
    """``expected(x, stack)`` gives the same output, and the same gradients for the input and every
    parameter."""
    x, direction = make_input(0).requires_grad_(), make_input(3)
    found, wanted = stack(x), expected(x, stack)
    torch.testing.assert_close(found, wanted, **CLOSE)
    inputs = [x, *stack.parameters()]
    gradients = torch.autograd.grad((found * direction).sum(), inputs)
    for a, b in zip(gradients, torch.autograd.grad((wanted * direction).sum(), inputs), strict=True):
        assert (a - b).norm() <= 1e-9 * b.norm()
