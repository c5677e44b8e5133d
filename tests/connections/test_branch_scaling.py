"""Branch scaling against plain fp64 derivations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from reference_stack import FeedForward, Stack, make_input, make_stack, randomize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mainstem.connections import (
    Connection,
    DepthScaled,
    LayerScale,
    MVSplit,
    NormConfig,
    PreNorm,
    ReZero,
    Scheme,
    StochasticDepth,
    make_scheme,
    parameter_groups,
)
from mainstem.errors import ConfigError
from mainstem.tower import Tower, TowerConfig

EPS = 1e-6
# fp64 rounds at 1.1e-16; a sublayer is two norms, two matrices and some additions over 64 channels.
FP64 = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _fp64_buffers() -> Iterator[None]:
    """Constants of depth are buffers in the default dtype; a derivation in fp64 wants them in fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * gain


def run(scheme: Scheme, seed: int = 0) -> tuple[Stack, list[Tensor]]:
    """A randomized reference stack and its states."""
    stack = make_stack(scheme, NormConfig(eps=EPS), seed=seed)
    randomize(stack.trunk)
    with torch.no_grad():
        states = stack.states(make_input(seed))
    return stack, [s for s in states if isinstance(s, Tensor)]


def check_steps(scheme: Scheme, step: Callable[[Connection, int, Tensor, nn.Module], Tensor]) -> None:
    """Every state is what ``step`` makes of the one before."""
    stack, states = run(scheme)
    for index, (join, branch) in enumerate(zip(stack.trunk.connections, stack.branches, strict=True)):
        assert isinstance(join, Connection)
        with torch.no_grad():
            expected = step(join, index, states[index], branch)
        torch.testing.assert_close(states[index + 1], expected, **FP64)


def weight(module: nn.Module, name: str) -> Tensor:
    found = module.get_parameter(name)
    return found.detach()


def test_layer_scale_is_its_formula() -> None:
    def step(join: Connection, index: int, x: Tensor, branch: nn.Module) -> Tensor:
        gains = torch.diag(weight(join, "write_weight"))
        return x + branch(rms(x, weight(join, "norm.weight"))) @ gains

    check_steps(LayerScale(), step)


@pytest.mark.parametrize(("num_blocks", "value"), [(12, 0.1), (18, 0.1), (24, 1e-5), (36, 1e-6), (96, 1e-6)])
def test_layer_scale_starts_by_depth(num_blocks: int, value: float) -> None:
    trunk = LayerScale().build(width=4, num_sublayers=2 * num_blocks)
    assert all((weight(join, "write_weight") == value).all() for join in trunk.connections)


def test_layer_scale_zero_is_a_value() -> None:
    stack = make_stack(LayerScale(initial_value=0.0), NormConfig())
    x = make_input(0)
    assert torch.equal(stack.states(x)[-1], x)


def test_rezero_is_its_formula() -> None:
    check_steps(ReZero(), lambda join, _, x, branch: x + weight(join, "write_weight").item() * branch(x))

    def normed(join: Connection, index: int, x: Tensor, branch: nn.Module) -> Tensor:
        return x + weight(join, "write_weight").item() * branch(rms(x, weight(join, "norm.weight")))

    check_steps(ReZero(norm_reads=True), normed)


def test_rezero_starts_as_the_identity_without_any_norm() -> None:
    stack = make_stack(ReZero(), NormConfig())
    x = make_input(0)
    assert torch.equal(stack(x), x)
    assert not any(isinstance(m, nn.RMSNorm) for m in stack.modules())
    assert all(not g.weight_decay for g in parameter_groups(stack.trunk))


@pytest.mark.parametrize(
    ("scheme", "factor"),
    [
        (DepthScaled(rule="gpt2"), 1.0),
        (DepthScaled(rule="depth_mup", base_num_sublayers=1, multiplier=2.0), 2.0 / math.sqrt(24)),
        (DepthScaled(rule="depth_mup"), 1 / math.sqrt(6)),
        (DepthScaled(), 1 / 6),
        (DepthScaled(base_num_sublayers=24, multiplier=3.0), 3.0),
    ],
)
def test_depth_scaled_is_its_formula(scheme: Scheme, factor: float) -> None:
    def step(join: Connection, index: int, x: Tensor, branch: nn.Module) -> Tensor:
        return x + factor * branch(rms(x, weight(join, "norm.weight")))

    check_steps(scheme, step)


def test_dividing_the_writing_matrices_by_branch_scale_gives_plain_pre_norm() -> None:
    scheme = DepthScaled()
    scaled, plain = make_stack(scheme, NormConfig()), make_stack(PreNorm(), NormConfig())
    with torch.no_grad():
        for branch in scaled.branches:
            writing = branch.down if isinstance(branch, FeedForward) else branch.out
            assert isinstance(writing, nn.Linear)
            writing.weight /= scheme.training_rules(24).branch_scale
    torch.testing.assert_close(scaled(make_input(0)), plain(make_input(0)), **FP64)


def test_training_rules_are_those_of_the_reference_code() -> None:
    """nanoGPT-mup, branch completep, with m_L = 8 and m_N = 4, exponents 1 and 1/2."""
    complete = DepthScaled(base_num_sublayers=4).training_rules(32, width_ratio=4.0)
    assert complete.branch_scale == 1 / 8
    assert complete.hidden_matrix_lr == 1 / 4  # width alone: m_L ** 0
    assert complete.hidden_vector_lr == 1.0
    assert complete.hidden_weight_decay == 4.0  # learning rate times decay stays
    assert complete.adam_eps == 1 / 32
    assert complete.hidden_init_std == 1 / 2
    assert complete.logits == 1 / 4
    root = DepthScaled(rule="depth_mup", base_num_sublayers=4).training_rules(64, width_ratio=4.0)
    assert root.branch_scale == 1 / 4
    assert root.hidden_matrix_lr == 1 / 16
    assert root.hidden_vector_lr == 1 / 4
    assert root.adam_eps == 1 / 16
    groups = parameter_groups(
        DepthScaled(rule="depth_mup", base_num_sublayers=4).build(width=4, num_sublayers=64)
    )
    assert {g.lr_multiplier for g in groups} == {1 / 4, 1.0}  # connections' norms, and the final norm
    plain = DepthScaled(rule="gpt2").training_rules(64)
    assert plain.branch_scale == plain.hidden_matrix_lr == plain.hidden_vector_lr == plain.adam_eps == 1.0


@pytest.mark.parametrize(("rule", "factor"), [("gpt2", 128**-0.5), ("depth_mup", 1.0), ("completep", 1.0)])
def test_only_gpt2_scales_initial_values(rule: str, factor: float) -> None:
    assert make_scheme("depth_scaled", rule=rule).output_init_scale(128) == factor


def test_survival_falls_linearly() -> None:
    trunk = StochasticDepth(final_survival=0.2).build(width=4, num_sublayers=8)
    survivals = [join.get_buffer("survival").item() for join in trunk.connections]
    assert survivals == pytest.approx([1 - 0.8 * (i + 1) / 8 for i in range(8)], rel=1e-15)


def test_a_sequence_gets_all_of_a_branch_or_nothing_and_the_mean_is_kept() -> None:
    join = StochasticDepth(final_survival=0.25).build(width=4, num_sublayers=1).train().connections[0]
    assert isinstance(join, Connection)
    torch.manual_seed(0)
    x, u = torch.randn(4000, 3, 4), torch.randn(1, 3, 4).expand(4000, 3, 4)
    _, context = join.read(x)
    written = join.write(x, u, context) - x
    factors = (written / u).flatten(1)
    kept = factors.mean(1).round().bool()
    torch.testing.assert_close(factors[kept], torch.full_like(factors[kept], 4.0), rtol=1e-9, atol=0)
    assert (factors[~kept].abs() < 1e-12).all()
    # 4000 draws at 1/4: the share's standard deviation is 0.007, and three of them are 0.021.
    assert abs(kept.double().mean().item() - 0.25) < 0.021


def test_every_parameter_has_a_gradient_even_where_all_is_dropped() -> None:
    stack = make_stack(StochasticDepth(final_survival=1e-9), NormConfig()).train()
    torch.manual_seed(0)
    stack(make_input(0)).square().sum().backward()
    assert all(p.grad is not None for p in stack.parameters())


def test_stochastic_depth_replays_its_masks_under_checkpointing() -> None:
    stack = make_stack(StochasticDepth(), NormConfig()).train()
    x = make_input(0).requires_grad_()

    def whole(x: Tensor) -> Tensor:
        return stack(x)

    results: list[list[Tensor]] = []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        stack.zero_grad()
        y = checkpoint(whole, x, use_reentrant=False) if checkpointed else whole(x)
        assert isinstance(y, Tensor)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        results.append([y.detach(), grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_mv_split_is_its_formula_with_means_over_what_was_read() -> None:
    def mean_so_far(x: Tensor) -> Tensor:
        return torch.stack([x[:, : t + 1].mean(1) for t in range(x.shape[1])], dim=1)

    def step(join: Connection, index: int, x: Tensor, branch: nn.Module) -> Tensor:
        u = branch(x)
        centred, mean = weight(join, "centred_weight"), weight(join, "mean_weight")
        mixed = x + centred * (u - mean_so_far(u)) + mean * (mean_so_far(u) - mean_so_far(x))
        return rms(mixed, weight(join, "norm.weight"))

    check_steps(MVSplit(), step)


def test_at_the_last_position_mv_split_is_the_published_one() -> None:
    """There the running mean is the mean over all tokens, which the reference code takes everywhere."""
    join = MVSplit(centred_weight=0.7, mean_weight=0.2).build(width=8, num_sublayers=1).connections[0]
    assert isinstance(join, Connection)
    x, u = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    mean_x, mean_u = x.mean(1, keepdim=True), u.mean(1, keepdim=True)
    expected = rms(x + 0.7 * (u - mean_u) + 0.2 * (mean_u - mean_x), torch.ones(8))
    torch.testing.assert_close(join.write(x, u, None)[:, -1], expected[:, -1], **FP64)


def test_mv_split_refuses_a_cache_and_padding_on_the_left() -> None:
    tower = Tower(TowerConfig(vocab_size=9, width=8, num_blocks=1, num_heads=2, connection="mv_split"))
    mask = torch.tensor([[0, 1, 1]])
    with pytest.raises(ConfigError, match="cannot take padding on the left"):
        tower(torch.tensor([[1, 2, 3]]), attention_mask=mask)
    tower(torch.tensor([[1, 2, 3]]), attention_mask=mask.flip(1))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: StochasticDepth(final_survival=0.0), "must be greater than 0 and at most 1"),
        (lambda: make_scheme("depth_scaled", rule="mup"), "choose 'gpt2', 'depth_mup' or 'completep'"),
        (lambda: DepthScaled(rule="gpt2", multiplier=2.0), "has no effect with rule 'gpt2'"),
        (lambda: DepthScaled(exact_start=True), "cannot start as plain Pre-LN: its factor is a constant"),
        (lambda: DepthScaled(base_num_sublayers=0), "must be at least 1"),
    ],
)
def test_mistakes_are_named(mistake: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mistake()


@pytest.mark.parametrize("connection", ["layer_scale", "rezero", "mv_split"])
def test_a_towers_reset_gives_back_the_initial_values(connection: str) -> None:
    tower = Tower(TowerConfig(vocab_size=9, width=8, num_blocks=2, num_heads=2, connection=connection))
    joins = [m for m in tower.modules() if isinstance(m, Connection)]
    before = [p.detach().clone() for join in joins for p in join.parameters()]
    randomize(tower)
    tower.reset_parameters()
    assert all(
        torch.equal(a, b) for a, b in zip(before, (p for j in joins for p in j.parameters()), strict=True)
    )
