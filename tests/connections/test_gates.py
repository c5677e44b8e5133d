"""Gates against their formulas, written out in fp64 from the papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_stack import NUM_SUBLAYERS, Stack
from torch import Tensor
from written_out import check, final, random_stack, rms_norm

from mainstem.connections import (
    GRUGate,
    Highway,
    Laurel,
    X0Reinjection,
    parameter_groups,
)


def test_x0_is_fed_in_again_before_every_block() -> None:
    stack = random_stack(X0Reinjection(carry_start=(1.1, 0.9), embed_start=(0.2, 0.1)))

    def expected(x0: Tensor, stack: Stack) -> Tensor:
        x = x0
        for i, (c, branch) in enumerate(zip(stack.trunk.connections, stack.branches, strict=True)):
            if i % 2 == 0:
                x = c.carry_weight * x + c.embed_weight * x0
            x = x + branch(rms_norm(x, c.norm.weight))
        return final(stack, x)

    check(stack, expected)


def test_x0_starts_between_its_ends_and_carries_learn_slowly() -> None:
    scheme = X0Reinjection(carry_start=(1.15, 1.05), embed_start=(0.2, 0.05))
    trunk = scheme.build(width=8, num_sublayers=NUM_SUBLAYERS)
    mixing = list(trunk.connections)[::2]
    for name, first, last in (("carry_weight", 1.15, 1.05), ("embed_weight", 0.2, 0.05)):
        found = torch.cat([getattr(c, name).detach() for c in mixing])
        torch.testing.assert_close(found, torch.linspace(first, last, NUM_SUBLAYERS // 2))
    assert all(c.carry_weight is None for c in list(trunk.connections)[1::2])
    slow = {id(p) for g in parameter_groups(trunk) if g.lr_multiplier == 0.01 for p in g.parameters}
    assert slow == {id(c.carry_weight) for c in mixing}


@pytest.mark.parametrize("variant", ["rw", "lr", "rw+lr", "pa"])
def test_laurel_is_its_formula(variant: Any) -> None:
    stack = random_stack(Laurel(variant=variant, rank=4, num_previous=2))

    def expected(x: Tensor, stack: Stack) -> Tensor:
        states = [x]
        for c, branch in zip(stack.trunk.connections, stack.branches, strict=True):
            x = states[-1]
            update = branch(rms_norm(x, c.norm.weight))
            new = c.update_weight * update + c.carry_weight * x if "rw" in variant else update + x
            if "lr" in variant:
                new = new + torch.einsum("cr,rd,bpd->bpc", c.up, c.down, x)
            if variant == "pa":  # the state before, and the one before that
                for back, earlier in enumerate(states[:-1][::-1][:2]):
                    new = new + c.past_weights[back] * earlier
            states.append(new)
        return final(stack, states[-1])

    check(stack, expected)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def test_highway_is_its_formula() -> None:
    stack = random_stack(Highway())

    def expected(x: Tensor, stack: Stack) -> Tensor:
        for c, branch in zip(stack.trunk.connections, stack.branches, strict=True):
            read = rms_norm(x, c.norm.weight)
            gate = sigmoid(torch.einsum("cd,bpd->bpc", c.gate, read) + c.gate_bias)
            x = (1 - gate) * x + gate * branch(read)
        return final(stack, x)

    check(stack, expected)


@pytest.mark.parametrize("relu", [True, False])
def test_gru_gate_is_its_formula(relu: bool) -> None:
    stack = random_stack(GRUGate(relu=relu))

    def expected(x: Tensor, stack: Stack) -> Tensor:
        for c, branch in zip(stack.trunk.connections, stack.branches, strict=True):
            y = branch(rms_norm(x, c.norm.weight))
            y = y.clamp(min=0) if relu else y
            w_r, w_z, w_g = c.update_maps.unflatten(0, (3, -1))
            u_r, u_z, u_g = c.state_maps.unflatten(0, (3, -1))
            r = sigmoid(y @ w_r.T + x @ u_r.T)
            z = sigmoid(y @ w_z.T + x @ u_z.T - c.carry_bias)
            h = torch.tanh(y @ w_g.T + (r * x) @ u_g.T)
            x = (1 - z) * x + z * h
        return final(stack, x)

    check(stack, expected)
