"""Norm placement against plain fp64 derivations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from reference_stack import TokenMixing, make_input, make_stack, randomize
from torch import Tensor, nn

from mainstem.connections import (
    B2T,
    Admin,
    Connection,
    DeepNorm,
    Keel,
    LayerNormScaling,
    MixNorm,
    NormConfig,
    ResiDual,
    Scheme,
    SiameseNorm,
    Stream,
    SubNorm,
    make_scheme,
)
from mainstem.errors import ConfigError
from mainstem.tower import Tower, TowerConfig

EPS = 1e-6
# fp64 rounds at 1.1e-16; a sublayer is up to four norms, two matrices and some additions over 64 channels.
FP64 = {"rtol": 1e-12, "atol": 1e-12}
# One step: (connection's weights by name, sublayer, stream, branch) -> stream.
Step = Callable[[dict[str, Tensor], int, Stream, nn.Module], Stream]


@pytest.fixture(autouse=True)
def _fp64_buffers() -> Iterator[None]:
    """Constants of depth are buffers in the default dtype; a derivation in fp64 wants them in fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def layer(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    """LayerNorm by its definition."""
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def tensors(stream: Stream) -> tuple[Tensor, ...]:
    return (stream,) if isinstance(stream, Tensor) else stream


@torch.no_grad()
def check(scheme: Scheme, step: Step, end: Callable[[dict[str, Tensor], Stream], Tensor]) -> None:
    """Every state of a randomized stack with LayerNorms is what ``step`` makes, and the output what ``end``
    does."""
    stack = make_stack(scheme, NormConfig(kind="layer", eps=EPS))
    randomize(stack.trunk)
    x = make_input(0)
    states = stack.states(x)
    assert all(torch.equal(t, x) for t in tensors(states[0])) or isinstance(scheme, ResiDual)
    for index, (join, branch) in enumerate(zip(stack.trunk.connections, stack.branches, strict=True)):
        expected = step(dict(join.named_parameters()), index, states[index], branch)
        for ours, theirs in zip(tensors(states[index + 1]), tensors(expected), strict=True):
            torch.testing.assert_close(ours, theirs, **FP64)
    torch.testing.assert_close(stack(x), end(dict(stack.trunk.named_parameters()), states[-1]), **FP64)


def final_layer(weights: dict[str, Tensor], stream: Stream) -> Tensor:
    assert isinstance(stream, Tensor)
    return layer(stream, weights, "final_norm")


def as_it_is(weights: dict[str, Tensor], stream: Stream) -> Tensor:
    return tensors(stream)[0]


def test_layer_norm_scaling_is_its_formula() -> None:
    def step(w: dict[str, Tensor], index: int, x: Stream, branch: nn.Module) -> Stream:
        (x,) = tensors(x)
        return x + branch(layer(x, w, "norm") / math.sqrt(1 + index // 2))

    check(LayerNormScaling(), step, final_layer)


def test_layer_norm_scaling_counts_parallel_blocks_once() -> None:
    options = {"vocab_size": 9, "width": 8, "num_blocks": 3, "num_heads": 2}
    for parallel in (False, True):
        tower = Tower(TowerConfig(connection="layer_norm_scaling", parallel=parallel, **options))
        roots = [join.get_buffer("depth_root").item() for _, join, _ in tower.sublayers()]
        assert roots == [b**0.5 for b in (1, 2, 3) for _ in range(1 if parallel else 2)]


@pytest.mark.parametrize(("share", "num_post"), [(0.0, 0), (0.25, 6), (0.3, 6), (1.0, 24)])
def test_mix_norm_is_post_below_and_pre_above(share: float, num_post: int) -> None:
    def step(w: dict[str, Tensor], index: int, x: Stream, branch: nn.Module) -> Stream:
        (x,) = tensors(x)
        if index < num_post:
            return layer(x + branch(x), w, "norm")
        return x + branch(layer(x, w, "norm"))

    check(MixNorm(post_share=share), step, final_layer)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_resi_dual_is_its_formula(scale: float) -> None:
    def step(w: dict[str, Tensor], index: int, stream: Stream, branch: nn.Module) -> Stream:
        x, summed = stream
        update = branch(x)
        return layer(x + update, w, "norm"), summed + scale * update

    def end(w: dict[str, Tensor], stream: Stream) -> Tensor:
        return stream[0] + layer(stream[1], w, "sum_norm")

    check(ResiDual(sum_scale=scale), step, end)


def test_resi_dual_sums_all_it_writes_on_top_of_the_embedding() -> None:
    stack = make_stack(ResiDual(sum_scale=0.5), NormConfig())
    states, x = stack.states(make_input(0)), make_input(0)
    updates = [branch(state[0]) for branch, state in zip(stack.branches, states, strict=False)]
    torch.testing.assert_close(states[-1][1], 0.5 * (x + torch.stack(updates).sum(0)), **FP64)


@pytest.mark.parametrize("span", [1, 2, 3])
def test_b2t_is_its_formula(span: int) -> None:
    def step(w: dict[str, Tensor], index: int, stream: Stream, branch: nn.Module) -> Stream:
        x, entered = stream
        entered = x if index % span == 0 else entered
        if index % span == span - 1:
            out = layer(x + branch(x) + entered, w, "norm")
            return out, out
        return layer(x + branch(x), w, "norm"), entered

    check(B2T(sublayers_per_block=span), step, as_it_is)


@pytest.mark.parametrize("trained", [False, True])
def test_admin_is_its_formula(trained: bool) -> None:
    def step(w: dict[str, Tensor], index: int, x: Stream, branch: nn.Module) -> Stream:
        (x,) = tensors(x)
        fixed = torch.tensor(math.sqrt(25 / math.log(25) - 1))
        return layer(w.get("carry_weight", fixed) * x + branch(x), w, "norm")

    check(Admin(trained=trained), step, as_it_is)


@pytest.mark.parametrize(("given", "scale"), [(None, 24.0), (3.0, 3.0)])
def test_keel_is_its_formula(given: float | None, scale: float) -> None:
    def step(w: dict[str, Tensor], index: int, x: Stream, branch: nn.Module) -> Stream:
        (x,) = tensors(x)
        return layer(scale * x + branch(layer(x, w, "norm")), w, "write_norm")

    check(Keel(carry_scale=given), step, as_it_is)


def test_keels_other_reading_is_the_same_up_to_epsilon() -> None:
    """``N(a x + (1 - a) F)`` is ``N(a / (1 - a) x + F)``: a norm takes out a factor, but for its epsilon."""
    join = Keel(carry_scale=0.9 / 0.1).build(width=8, num_sublayers=1).connections[0]
    assert isinstance(join, Connection)
    x, u = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    gate = nn.functional.rms_norm(0.9 * x + 0.1 * u, (8,), eps=1e-6 * 0.1**2)
    torch.testing.assert_close(join.write(x, u, None), gate, **FP64)


@pytest.mark.parametrize("span", [1, 2])
def test_siamese_norm_is_its_formula(span: int) -> None:
    def step(w: dict[str, Tensor], index: int, stream: Stream, branch: nn.Module) -> Stream:
        x, y = stream
        post = layer(x, w, "post_norm")
        update = branch(layer(post + layer(y, w, "pre_norm"), w, "norm"))
        return post + update / math.sqrt(2 * (index // span + 1)), y + update

    def end(w: dict[str, Tensor], stream: Stream) -> Tensor:
        both = layer(stream[0], w, "post_norm") + layer(stream[1], w, "pre_norm")
        return layer(both, w, "final_norm")

    check(SiameseNorm(sublayers_per_block=span), step, end)


def test_sub_norm_norms_inside_the_branch() -> None:
    def step(w: dict[str, Tensor], index: int, x: Stream, branch: nn.Module) -> Stream:
        (x,) = tensors(x)
        read, inner = layer(x, w, "norm"), dict(branch.named_parameters())
        if isinstance(branch, TokenMixing):
            n = x.shape[-2]
            causal = torch.ones(n, n, dtype=torch.bool).tril()
            shares = branch.scores.masked_fill(~causal, float("-inf")).softmax(-1)
            return x + layer(shares @ read, inner, "inner_norm") @ inner["out.weight"].T
        hidden = nn.functional.gelu(read @ inner["up.weight"].T)
        return x + layer(hidden, inner, "inner_norm") @ inner["down.weight"].T

    check(SubNorm(), step, final_layer)


def test_a_sub_norm_tower_has_its_inner_norms() -> None:
    tower = Tower(TowerConfig(vocab_size=9, width=8, num_blocks=2, num_heads=2, connection="sub_norm"))
    assert all(isinstance(block.attn.inner_norm, nn.RMSNorm) for block in tower.blocks)
    assert all(block.mlp.inner_norm.weight.shape == (24,) for block in tower.blocks)
    other = Tower(TowerConfig(vocab_size=9, width=8, num_blocks=2, num_heads=2))
    assert all(block.attn.inner_norm is block.mlp.inner_norm is None for block in other.blocks)


@pytest.mark.parametrize(
    ("scheme", "num_sublayers", "branch", "output"),
    [
        (SubNorm(), 64, math.sqrt(math.log(64)), 1.0),
        (SubNorm(), 2, 1.0, 1.0),
        (B2T(), 64, 32**-0.5, 1.0),
        (DeepNorm(), 64, 256**-0.25, 1.0),
        (LayerNormScaling(), 64, 1.0, 1.0),
        (LayerNormScaling(exact_start=True), 64, 1.0, 1 / 8),
        (MixNorm(), 64, 1.0, 1 / 8),
        (SiameseNorm(), 64, 1.0, 1 / 8),
        (Keel(), 64, 1.0, 1.0),
        (Admin(), 64, 1.0, 1.0),
        (ResiDual(), 64, 1.0, 1.0),
    ],
)
def test_initial_scales(scheme: Scheme, num_sublayers: int, branch: float, output: float) -> None:
    assert scheme.branch_init_scale(num_sublayers) == branch
    assert scheme.output_init_scale(num_sublayers) == output


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: MixNorm(post_share=1.5), "between 0 and 1"),
        (lambda: ResiDual(sum_scale=0.0), "must be greater than 0"),
        (lambda: Keel(carry_scale=-1.0), "must be greater than 0"),
        (lambda: make_scheme("admin", output_change="O(1)"), "choose 'log', 'constant' or 'linear'"),
        *((lambda s=s: s(sublayers_per_block=0), "at least 1") for s in (B2T, MixNorm, SiameseNorm)),
        (lambda: LayerNormScaling(sublayers_per_block=0), "at least 1"),
        *((lambda s=s: s(exact_start=True), "cannot start as plain Pre-LN") for s in (B2T, Keel, SubNorm)),
    ],
)
def test_mistakes_are_named(mistake: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mistake()


def test_a_towers_reset_folds_layer_norm_scaling_again() -> None:
    for norm in (NormConfig(), NormConfig(unit_offset=True)):
        config = TowerConfig(
            vocab_size=9,
            width=8,
            num_blocks=3,
            num_heads=2,
            norm=norm,
            connection="layer_norm_scaling",
            connection_options={"exact_start": True},
        )
        tower = Tower(config)
        randomize(tower)
        tower.reset_parameters()
        for block in range(3):
            gains = tower.get_parameter(f"blocks.{block}.connections.0.norm.weight").detach()
            assert torch.equal(gains + norm.unit_offset, torch.full((8,), (block + 1) ** 0.5))
