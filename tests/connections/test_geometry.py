"""Connections by direction and length against their formulas, written out in fp64 from the papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_stack import Stack, make_input, make_stack
from torch import Tensor, nn
from written_out import CLOSE, RMS, check, final, random_stack, rms_norm

from mainstem.connections import (
    NGPT,
    DeepDelta,
    OrthogonalUpdate,
    Reversible,
    normalize_matrices,
)
from mainstem.errors import ConfigError


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


def unit(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def test_ngpt_moves_along_the_sphere() -> None:
    def expected(x: Tensor, stack: Stack) -> Tensor:
        h = unit(x)
        for each, branch in zip(stack.trunk.connections, stack.branches, strict=True):
            join: Any = each
            alpha = (join.stored_alpha * 0.05 / (1 / 8)).abs()  # width 64, alpha_init / alpha_scale
            h = unit(h + alpha * (unit(branch(8 * h)) - h))
        return 8 * h

    check(random_stack(NGPT()), expected)


@torch.no_grad()
def test_ngpt_starts_at_its_alpha_and_keeps_unit_length() -> None:
    trunk = NGPT(alpha_start=0.2).build(width=64, num_sublayers=1).double()
    join: Any = trunk.connections[0]
    x, update = make_input(0), make_input(1)
    written = join.write(x, update, None)
    torch.testing.assert_close(written, unit(0.8 * unit(x) + 0.2 * unit(update)), **CLOSE)
    torch.testing.assert_close(written.norm(dim=-1), torch.ones(x.shape[:2], dtype=x.dtype), **CLOSE)
    torch.testing.assert_close(join.write(1e-3 * x, 1e3 * update, None), written, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_vector_has_no_direction_and_finite_gradients(dtype: torch.dtype) -> None:
    join: Any = NGPT().build(width=64, num_sublayers=1).to(dtype).connections[0]
    some, zero = make_input(0, dtype=dtype), make_input(0, dtype=dtype) * 0
    for x, update, wanted in ((some, zero, unit(some)), (zero, some, unit(some)), (zero, zero, zero)):
        x, update = x.clone().requires_grad_(), update.clone().requires_grad_()
        written = join.write(x, update, None)
        torch.testing.assert_close(written, wanted)
        (written * make_input(3, dtype=dtype)).sum().backward()
        assert x.grad is not None
        assert update.grad is not None
        assert x.grad.isfinite().all()
        assert update.grad.isfinite().all()
        assert join.stored_alpha.grad.isfinite().all()


@torch.no_grad()
def test_matrices_get_unit_length_along_the_stream() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(10, 8),
            "up_proj": nn.Linear(8, 24),
            "down_proj": nn.Linear(24, 8, bias=False),
            "out_proj": nn.Linear(8, 8, bias=False),
        }
    ).double()
    weights: dict[str, Any] = {name: part.weight for name, part in model.items()}
    weights["embedding"][3] = 0.0
    bias = model["up_proj"].bias.clone()  # pyright: ignore
    before = {name: weight.clone() for name, weight in weights.items()}
    normalize_matrices(model)
    for name, weight in weights.items():
        along = 0 if name in ("down_proj", "out_proj") else 1
        ones = weight.norm(dim=along)
        if name == "embedding":
            assert torch.equal(weight[3], torch.zeros(8, dtype=weight.dtype))
            ones = ones[ones > 0]
        torch.testing.assert_close(ones, torch.ones_like(ones), **CLOSE)
        scale = before[name].norm(dim=along, keepdim=True)
        torch.testing.assert_close(weight * scale, before[name], **CLOSE)
    assert torch.equal(bias, model["up_proj"].bias)  # pyright: ignore


def test_ngpt_needs_a_step_between_nothing_and_all() -> None:
    with pytest.raises(ConfigError, match=r"alpha_start=0\.0 must be greater than 0 and at most 1"):
        NGPT(alpha_start=0.0)


def test_reversible_halves_take_turns() -> None:
    def expected(x: Tensor, stack: Stack) -> Tensor:
        x1 = x2 = x
        joins: Any = stack.trunk.connections
        for i in range(0, len(joins), 2):
            x1 = x1 + stack.branches[i](rms_norm(x2, joins[i].norm.weight))
            x2 = x2 + stack.branches[i + 1](rms_norm(x1, joins[i + 1].norm.weight))
        return final(stack, (x1 + x2) / 2)

    check(random_stack(Reversible()), expected)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_96_blocks_are_inverted(dtype: torch.dtype, error: float) -> None:
    """From the last state alone: every branch runs again on what it reads in the stream after its write."""
    stack = make_stack(Reversible(), RMS, num_sublayers=192, dtype=dtype)
    states = stack.states(make_input(0, dtype=dtype))
    joins: Any = stack.trunk.connections
    stream = states[-1]
    for join, branch, before in zip(joins[::-1], reversed(list(stack.branches)), states[-2::-1], strict=True):
        stream = join.invert(stream, branch(join.read(stream)[0]))
        for half, wanted in zip(stream, before, strict=True):
            assert (half - wanted).norm() <= error * wanted.norm()


@torch.no_grad()
def test_a_reversible_sum_is_twice_the_mean_and_narrow_streams_are_refused() -> None:
    x = make_input(0)
    mean, summed = (Reversible(collapse=kind).build(width=64, num_sublayers=2) for kind in ("mean", "sum"))
    torch.testing.assert_close(mean.collapse(mean.expand(x)), x, **CLOSE)
    torch.testing.assert_close(summed.collapse(summed.expand(x)), 2 * x, **CLOSE)
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ConfigError, match=r"cannot be torch\..*float16: what rounding takes"):
            mean.expand(x.to(dtype))
    kept = Reversible().build(width=64, num_sublayers=2, stream_dtype=torch.float32).bfloat16()
    assert [half.dtype for half in kept.enter(x.bfloat16())] == [torch.float32] * 2


def test_a_reversible_collapse_is_mean_or_sum() -> None:
    unknown: Any = "cat"
    with pytest.raises(ConfigError, match=r"collapse='cat' is not known; choose 'mean' or 'sum'"):
        Reversible(collapse=unknown)
