"""Gates against their formulas, written out in fp64 from the papers, and against other people's modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_stack import NUM_SUBLAYERS, Stack, make_input, make_stack, randomize
from torch import Tensor, nn
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextLaurelBlock

from mainstem.connections import (
    GRUGate,
    GRUGateConnection,
    Highway,
    Laurel,
    LaurelConnection,
    NormConfig,
    Scheme,
    X0Reinjection,
    parameter_groups,
)

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


def test_laurel_lr_is_gemma_3ns_block_without_its_norm() -> None:
    """Gemma 3n norms the low-rank term, which the paper does not."""
    width, rank = 64, 8
    theirs = Gemma3nTextLaurelBlock(Gemma3nTextConfig(hidden_size=width, laurel_rank=rank)).double()
    theirs.post_laurel_norm = nn.Identity()
    ours = LaurelConnection(nn.Identity(), "lr", width=width, rank=rank, num_past=0, keep=0).double()
    randomize(ours)
    assert ours.down is not None
    assert ours.up is not None
    with torch.no_grad():
        theirs.linear_left.weight.copy_(ours.down)
        theirs.linear_right.weight.copy_(ours.up)
    x, update = make_input(0).requires_grad_(), make_input(1)
    found, wanted = ours.write(x, update, None), theirs(x) + update
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, wanted, **CLOSE)
    direction = make_input(2)
    mine = torch.autograd.grad((found * direction).sum(), [x, ours.down, ours.up])
    others = [x, theirs.linear_left.weight, theirs.linear_right.weight]
    for a, b in zip(mine, torch.autograd.grad((wanted * direction).sum(), others), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


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


def test_gru_gate_is_torchs_cell_where_the_two_mean_the_same() -> None:
    """nn.GRUCell resets after the matrix, GTrXL before: the same for a diagonal one. Its z is kept."""
    width = 16
    ours = GRUGateConnection(nn.Identity(), width=width, bias_start=2.0, relu=False).double()
    randomize(ours)
    cell = nn.GRUCell(width, width).double()
    with torch.no_grad():
        ours.state_maps[2 * width :] = torch.diag(ours.state_maps[2 * width :].diagonal())
        for bias in (cell.bias_ih, cell.bias_hh):
            bias.zero_()
        cell.bias_ih[width : 2 * width] = ours.carry_bias
        sign = torch.ones(3, 1, 1, dtype=torch.float64)
        sign[1] = -1
        for mine, theirs in ((ours.update_maps, cell.weight_ih), (ours.state_maps, cell.weight_hh)):
            theirs.copy_((mine.unflatten(0, (3, width)) * sign).flatten(0, 1))
    x, y = make_input(0, width=width), make_input(1, width=width)
    found = ours.write(x, y, None)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.flatten(0, 1), cell(y.flatten(0, 1), x.flatten(0, 1)), **CLOSE)
