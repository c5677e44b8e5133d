"""What every scheme must prove. A new scheme is listed in CASES and is done when this file passes."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_stack import (
    NUM_POSITIONS,
    NUM_SUBLAYERS,
    WIDTH,
    FeedForward,
    Stack,
    TokenMixing,
    make_input,
    make_stack,
    plain_distance,
    randomize,
    start_distance,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mainstem.connections import (
    B2T,
    MUDD,
    NGPT,
    Admin,
    AttentionResiduals,
    Backout,
    Connection,
    DeepDelta,
    DeepNorm,
    DeltaAttentionResiduals,
    DenseFormer,
    DepthScaled,
    FracConnections,
    GatedStreams,
    GRUGate,
    Highway,
    HyperConnections,
    IdentityHC,
    IndependentHC,
    Keel,
    Laurel,
    LayerNormScaling,
    LayerScale,
    Mhc,
    MixNorm,
    MVSplit,
    NoResidual,
    NormConfig,
    OrthogonalUpdate,
    PostNorm,
    PreNorm,
    ReorderedNorm,
    ResiDual,
    Reversible,
    ReZero,
    SandwichNorm,
    Scheme,
    SiameseNorm,
    StochasticDepth,
    Stream,
    SubNorm,
    UNetSkips,
    UnitOffsetRMSNorm,
    X0Reinjection,
    parameter_groups,
    scheme_names,
)
from mainstem.connections.mhc import CONVENTIONS

CASES: list[Scheme] = [
    NoResidual(),
    PreNorm(),
    PostNorm(),
    SandwichNorm(),
    ReorderedNorm(),
    DeepNorm(),
    HyperConnections(),
    HyperConnections(dynamic=False, num_streams=2),
    HyperConnections(exact_start=True),
    X0Reinjection(),
    X0Reinjection(sublayers_per_block=1, carry_start=(1.01, 0.99), embed_start=(0.2, 0.05)),
    X0Reinjection(exact_start=True),
    Laurel(),
    Laurel(variant="rw"),
    Laurel(variant="rw+lr", rank=4),
    Laurel(variant="pa"),
    Laurel(exact_start=True),
    Highway(),
    GRUGate(),
    GRUGate(relu=False, bias_start=0.0),
    LayerScale(),
    LayerScale(initial_value=0.0),
    LayerScale(exact_start=True),
    ReZero(),
    ReZero(norm_reads=True, initial_value=0.5),
    ReZero(exact_start=True),
    LayerNormScaling(),
    LayerNormScaling(exact_start=True),
    DepthScaled(),
    DepthScaled(rule="depth_mup", base_num_sublayers=1),
    DepthScaled(rule="gpt2"),
    StochasticDepth(),
    StochasticDepth(final_survival=0.2, exact_start=True),
    MixNorm(),
    MixNorm(post_share=0.5),
    ResiDual(),
    ResiDual(sum_scale=0.1),
    B2T(),
    B2T(sublayers_per_block=3),
    SubNorm(),
    Admin(),
    Admin(trained=True),
    Admin(output_change="constant"),
    Keel(),
    Keel(carry_scale=3.0),
    SiameseNorm(),
    SiameseNorm(sublayers_per_block=1),
    MVSplit(),
    MVSplit(centred_weight=1.0, mean_weight=0.5),
    IdentityHC(),
    IdentityHC(exact_start=True),
    IndependentHC(),
    IndependentHC(exact_start=True),
    Mhc(),
    Mhc(mixing="permutation", num_streams=3),
    Mhc(mixing="kronecker", collapse="mean"),
    Mhc(mixing="cayley", orientation="in_out"),
    Mhc(**CONVENTIONS["deepseek_v4"]),
    Mhc(exact_start=True),
    Mhc(mixing="cayley", exact_start=True),
    DenseFormer(),
    DenseFormer(dilation=2, period=3),
    DenseFormer(exact_start=True),
    MUDD(),
    MUDD(dynamic=False, separate_read=False),
    MUDD(exact_start=True),
    AttentionResiduals(),
    AttentionResiduals(block_size=6),
    AttentionResiduals(exact_start=True),
    AttentionResiduals(exact_start=True, block_size=6),
    DeltaAttentionResiduals(),
    DeltaAttentionResiduals(block_size=4),
    DeltaAttentionResiduals(exact_start=True),
    UNetSkips(),
    UNetSkips(initial_weight=0.18, sublayers_per_block=3),
    UNetSkips(exact_start=True),
    Backout(),
    Backout(block=0, initial_weight=0.2, sublayers_per_block=1),
    Backout(exact_start=True),
    FracConnections(),
    FracConnections(dynamic=False, num_fractions=2),
    GatedStreams(),
    GatedStreams(num_streams=2, rank=3),
    GatedStreams(exact_start=True),
    OrthogonalUpdate(),
    DeepDelta(),
    DeepDelta(beta_start=0.5, value_scale=1.0),
    NGPT(),
    NGPT(alpha_start=0.5),
    Reversible(),
    Reversible(collapse="sum"),
]
NORMS = [NormConfig(kind="rms"), NormConfig(kind="layer"), NormConfig(kind="rms", unit_offset=True)]

# fp64 has 2.2e-16; a step is a handful of additions and one norm over 64 channels, so 1e-12 leaves a factor
# of a thousand for their rounding and none for a wrong coefficient.
EXACT = 1e-12


def with_options(scheme: Scheme) -> str:
    """Name, and the options that are not the published ones."""
    options = {f.name: getattr(scheme, f.name) for f in dataclasses.fields(scheme)}
    changed = [f"{k}={v}" for k, v in options.items() if v != getattr(type(scheme)(), k)]
    return "-".join([scheme.name, *changed])


def is_published(scheme: Scheme) -> bool:
    """Whether every option is the default, which is what ``properties`` speaks of."""
    return scheme == type(scheme)()


def starts_as_pre_norm(scheme: Scheme) -> bool:
    return scheme.exact_start or (is_published(scheme) and scheme.properties.equals_pre_norm_at_start)


each_scheme = pytest.mark.parametrize("scheme", CASES, ids=with_options)
each_published = pytest.mark.parametrize("scheme", [*filter(is_published, CASES)], ids=with_options)
each_exact = pytest.mark.parametrize("scheme", [*filter(starts_as_pre_norm, CASES)], ids=with_options)
each_norm = pytest.mark.parametrize(
    "norm", NORMS, ids=lambda n: n.kind + ("_unit_offset" if n.unit_offset else "")
)


def leaves(stream: Stream) -> list[Tensor]:
    return [stream] if isinstance(stream, Tensor) else list(stream)


def combine(a: Stream, b: Stream | None, scale_a: float = 1.0, scale_b: float = 1.0) -> Stream:
    if b is None:
        return a
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor)
        return scale_a * a + scale_b * b
    return tuple(scale_a * p + scale_b * q for p, q in zip(a, b, strict=True))


def relative_error(a: Stream, b: Stream) -> float:
    error = sum((p - q).square().sum() for p, q in zip(leaves(a), leaves(b), strict=True))
    size = sum(q.square().sum() for q in leaves(b))
    return float((error / (size + 1e-300)) ** 0.5)


def random_like(stream: Stream, seed: int) -> Stream:
    generator = torch.Generator().manual_seed(seed)
    made = tuple(torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in leaves(stream))
    return made[0] if isinstance(stream, Tensor) else made


def steps(scheme: Scheme, norm: NormConfig, seed: int = 0):
    """Every sublayer of a randomized reference stack: (connection, stream, update, context)."""
    stack = make_stack(scheme, norm, seed=seed)
    randomize(stack.trunk)
    stream = stack.trunk.expand(make_input(seed))
    for connection, branch in zip(stack.trunk.connections, stack.branches, strict=True):
        assert isinstance(connection, Connection)
        read, context = connection.read(stream)
        update = branch(read)
        yield connection, stream, update, context
        stream = connection.write(stream, update, context)


def test_every_registered_scheme_is_listed() -> None:
    assert sorted(scheme.name for scheme in CASES if is_published(scheme)) == scheme_names()
    may_be_exact = {scheme.name for scheme in CASES if type(scheme).no_exact_start is None}
    assert {scheme.name for scheme in CASES if starts_as_pre_norm(scheme)} == may_be_exact


@each_scheme
@each_norm
@torch.no_grad()
def test_carry_plus_inject_is_write(scheme: Scheme, norm: NormConfig) -> None:
    for connection, stream, update, context in steps(scheme, norm):
        step = connection.linearize(stream, update, context)
        total = combine(combine(step.carry(stream), step.inject(update)), step.offset)
        assert relative_error(total, connection.write(stream, update, context)) <= EXACT


@each_scheme
@each_norm
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    a=st.floats(-8, 8, allow_subnormal=False),
    b=st.floats(-8, 8, allow_subnormal=False),
)
@torch.no_grad()
def test_carry_and_inject_are_linear(scheme: Scheme, norm: NormConfig, seed: int, a: float, b: float) -> None:
    at = seed % NUM_SUBLAYERS
    connection, stream, update, context = next(islice(steps(scheme, norm, seed=seed), at, None))
    step = connection.linearize(stream, update, context)
    p, q = random_like(stream, seed), random_like(stream, seed + 1)
    mixed = combine(step.carry(p), step.carry(q), a, b)
    size = combine(step.carry(p), step.carry(q), abs(a) + abs(b), abs(a) + abs(b))
    difference = combine(step.carry(combine(p, q, a, b)), mixed, 1.0, -1.0)
    assert norm_of(difference) <= EXACT * norm_of(size)
    u, v = random_like(update, seed + 2), random_like(update, seed + 3)
    assert isinstance(u, Tensor)
    assert isinstance(v, Tensor)
    mixed = combine(step.inject(u), step.inject(v), a, b)
    difference = combine(step.inject(a * u + b * v), mixed, 1.0, -1.0)
    size = combine(step.inject(u), step.inject(v), abs(a) + abs(b), abs(a) + abs(b))
    assert norm_of(difference) <= EXACT * norm_of(size)


def norm_of(stream: Stream) -> float:
    return float(sum(t.square().sum() for t in leaves(stream)) ** 0.5)


@each_scheme
@pytest.mark.parametrize("kind", ["rms", "layer"])
@torch.no_grad()
def test_expand_and_collapse_are_linear(scheme: Scheme, kind: str) -> None:
    stack = make_stack(scheme, NormConfig(kind=kind))
    randomize(stack.trunk)
    x, y = make_input(0), make_input(1)
    expand = stack.trunk.expand
    assert relative_error(expand(2 * x - 3 * y), combine(expand(x), expand(y), 2.0, -3.0)) <= EXACT
    stream = stack.states(x)[-1]
    collapse = stack.trunk.linearize_collapse(stream)
    offset = stack.trunk.collapse_offset()
    linear = collapse(stream) if offset is None else collapse(stream) + offset
    assert relative_error(linear, stack.trunk.collapse(stream)) <= EXACT
    other = random_like(stream, 5)
    mixed = 2 * collapse(stream) - 3 * collapse(other)
    assert relative_error(collapse(combine(stream, other, 2.0, -3.0)), mixed) <= EXACT


@each_published
def test_distance_from_pre_norm_at_the_start_is_the_declared_one(scheme: Scheme) -> None:
    measured = sum(start_distance(scheme, NormConfig(), seed) for seed in range(10)) / 10
    if scheme.properties.equals_pre_norm_at_start:
        assert scheme.properties.start_distance == 0.0
        assert measured <= EXACT
    else:
        # The seeds are fixed, so what is left is the rounding of the declared value to two decimals.
        assert scheme.properties.start_distance > 0
        assert abs(measured - scheme.properties.start_distance) <= 0.006


# Some 200 additions a channel in another order: 200 roundings of 1.1e-16 or 6e-8 are 2e-14 or 1.2e-5, and
# random signs leave a hundredth of that; the promise is what the issue asks.
@each_exact
@pytest.mark.parametrize("embedding_scale", [0.02, 1.0])
@pytest.mark.parametrize(("dtype", "promised"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_an_exact_start_is_plain_pre_norm_at_96_blocks(
    scheme: Scheme, embedding_scale: float, dtype: torch.dtype, promised: float
) -> None:
    assert plain_distance(scheme, 192, embedding_scale, dtype) <= promised


@each_scheme
@each_norm
@torch.no_grad()
def test_no_position_sees_a_later_one(scheme: Scheme, norm: NormConfig) -> None:
    stack = make_stack(scheme, norm)
    randomize(stack.trunk)
    x = make_input(0)
    changed = x.clone()
    changed[:, -1] = make_input(7)[:, -1]
    before, after = stack(x), stack(changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


@each_scheme
@each_norm
@torch.no_grad()
def test_no_sequence_sees_another(scheme: Scheme, norm: NormConfig) -> None:
    stack = make_stack(scheme, norm)
    randomize(stack.trunk)
    x = make_input(0)
    changed = x.clone()
    changed[1] = make_input(7)[1]
    before, after = stack(x), stack(changed)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


@each_scheme
@each_norm
def test_every_parameter_gets_a_gradient_by_the_second_step(scheme: Scheme, norm: NormConfig) -> None:
    """Where a factor starts at zero, the other one learns a step later; nothing may stay dead longer."""
    stack = make_stack(scheme, norm)
    still = {name for name, _ in stack.named_parameters()}
    for _ in range(2):
        stack.zero_grad()
        (stack(make_input(0)) * make_input(3)).sum().backward()
        for name, parameter in stack.named_parameters():
            assert parameter.grad is not None, name
            if parameter.grad.abs().max() > 0:
                still.discard(name)
            parameter.data -= 1e-3 * parameter.grad
    assert not still
    if is_published(scheme) or scheme.exact_start:
        streams_can_separate(stack)


def streams_can_separate(stack: Stack) -> None:
    """Parallel streams that are copies of each other at the start are no longer, after those two steps."""
    with torch.no_grad():
        last = stack.states(make_input(0))[-1]
    if isinstance(last, Tensor) and last.ndim == 4:
        assert all((last[:, :, 0] - last[:, :, i]).norm() > 1e-9 for i in range(1, last.shape[2]))


@each_scheme
@pytest.mark.parametrize("depth", [1, 8, 96, 1000])
def test_any_depth_is_finite(scheme: Scheme, depth: int) -> None:
    stack = make_stack(scheme, NormConfig(), num_sublayers=depth, width=16, dtype=torch.float32)
    x = make_input(0, width=16, dtype=torch.float32).requires_grad_()
    y = stack(x)
    y.square().mean().backward()
    assert y.isfinite().all()
    gradients = [x.grad, *(p.grad for p in stack.parameters())]
    assert all(g is not None and g.isfinite().all() for g in gradients)


@each_scheme
@each_norm
@torch.no_grad()
def test_saved_and_loaded_is_the_same_to_the_bit(scheme: Scheme, norm: NormConfig, tmp_path: Path) -> None:
    stack = make_stack(scheme, norm, dtype=torch.float32)
    randomize(stack)
    save_file(stack.state_dict(), tmp_path / "stack.safetensors")
    other = make_stack(scheme, norm, seed=5, dtype=torch.float32)
    x = make_input(0, dtype=torch.float32)
    assert not torch.equal(stack(x), other(x))
    other.load_state_dict(load_file(tmp_path / "stack.safetensors"))
    assert torch.equal(stack(x), other(x))


class TwoSublayers(nn.Module):
    def __init__(self, connections: list[Connection], width: int):
        super().__init__()
        self.mixing_join, self.feed_join = connections
        self.mixing, self.feed = TokenMixing(width), FeedForward(width)

    def forward(self, stream: Stream) -> Stream:
        return self.feed_join(self.mixing_join(stream, self.mixing), self.feed)


def signature(stream: Stream, block: nn.Module) -> tuple[torch.Size, ...]:
    """What one compiled graph is for: the shapes that go in."""
    return tuple(t.shape for t in [*leaves(stream), *block.parameters(), *block.buffers()])


def kinds(connections: list[Connection]) -> int:
    """How many kinds of blocks a scheme builds; two where its lowest blocks are unlike the rest."""
    return len({str(connections[i : i + 2]) for i in range(0, len(connections), 2)})


# Dynamo asks every input for its .grad and hides the warning itself, which "error" overrides.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@each_scheme
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_one_graph_serves_every_block(scheme: Scheme, kind: str) -> None:
    """One graph for 24 blocks; where a history grows, at most one for each shape (8 blocks of them)."""
    torch._dynamo.reset()
    trunk = scheme.build(width=16, num_sublayers=48, norm=NormConfig(kind=kind))
    connections = trunk.release_connections()
    blocks = [TwoSublayers(connections[2 * i : 2 * i + 2], 16).eval() for i in range(24)]
    counter = CompileCounter()
    x = make_input(0, width=16, dtype=torch.float32).requires_grad_()  # as an embedding's output does
    stream, expected = trunk.expand(x), trunk.expand(x)
    signatures = set()
    with torch._dynamo.config.patch(recompile_limit=64):
        for block in blocks:
            signatures.add(signature(stream, block))
            if len(signatures) > 8:
                break
            expected = block(expected)
            stream = torch.compile(block, backend=counter, fullgraph=True)(stream)
    assert 1 <= counter.frame_count <= len(signatures) * kinds(connections)
    assert len(signatures) == 1 or isinstance(stream, tuple)
    assert all(torch.equal(a, b) for a, b in zip(leaves(stream), leaves(expected), strict=True))


@each_scheme
@each_norm
def test_norms_are_the_declared_ones_and_groups_partition(scheme: Scheme, norm: NormConfig) -> None:
    stack = make_stack(scheme, norm)
    kinds = (nn.LayerNorm, nn.RMSNorm, UnitOffsetRMSNorm)
    per_norm = WIDTH * (2 if norm.kind == "layer" else 1)
    in_norms: set[int] = set()
    for connection in stack.trunk.connections:
        assert isinstance(connection, Connection)
        norms = [m for m in connection.modules() if isinstance(m, kinds)]
        if is_published(scheme):
            assert len(norms) == scheme.properties.num_norms
        assert all(sum(p.numel() for p in m.parameters()) == per_norm for m in norms)
        in_norms |= {id(p) for m in norms for p in m.parameters()}
    groups = parameter_groups(stack)
    grouped = [id(p) for g in groups for p in g.parameters]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in stack.parameters()}
    decayed = {id(p) for g in groups if g.weight_decay for p in g.parameters}
    assert decayed >= {id(p) for p in stack.branches.parameters() if p.ndim >= 2}
    assert not decayed & (in_norms | {id(p) for p in stack.trunk.parameters() if p.ndim < 2})


class Touched(TorchDispatchMode):
    """Which tensors any operation has read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore
        inputs = tree_leaves((args, kwargs))
        self.read.update(t.data_ptr() for t in inputs if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


@each_published
@torch.no_grad()
def test_streams_history_and_traffic_are_the_declared_ones(scheme: Scheme) -> None:
    declared = scheme.properties
    plain = make_input(0)
    traffic: list[float] = []
    for connection, stream, update, context in steps(scheme, NormConfig()):
        wide = [t for t in tree_leaves(context) if isinstance(t, Tensor) and t.numel() == plain.numel()]
        inputs = [*leaves(stream), update, *wide]
        with Touched() as touched:
            out = connection.write(stream, update, context)
        read = {t.data_ptr(): t.numel() for t in inputs if t.data_ptr() in touched.read}
        old = {t.data_ptr() for t in inputs}
        made = {t.data_ptr(): t.numel() for t in leaves(out) if t.data_ptr() not in old}
        traffic.append((sum(read.values()) + sum(made.values())) / plain.numel())
        assert isinstance(out, tuple) == declared.has_history
        if not declared.has_history:
            assert leaves(out)[0].numel() == declared.num_streams * plain.numel()
            assert traffic[-1] == declared.traffic
    # Sublayers that look back may differ: the mean over the reference stack, to two decimals.
    assert abs(sum(traffic) / len(traffic) - declared.traffic) <= 0.006


@each_scheme
def test_schemes_are_frozen_data(scheme: Scheme) -> None:
    assert scheme == type(scheme)(**dataclasses.asdict(scheme))
    for field in dataclasses.fields(scheme):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(scheme, field.name, getattr(scheme, field.name))


@torch.no_grad()
def test_the_suite_notices_a_leak() -> None:
    """The causality test can fail: a branch that looks ahead moves earlier positions."""

    class LookAhead(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(-2, keepdim=True).expand_as(x)

    trunk = PreNorm().build(width=WIDTH, num_sublayers=1)
    stack = Stack(trunk, nn.ModuleList([LookAhead()])).double()
    x = make_input(0)
    changed = x.clone()
    changed[:, -1] += 1.0
    assert NUM_POSITIONS > 1
    assert not torch.equal(stack(x)[:, :-1], stack(changed)[:, :-1])
