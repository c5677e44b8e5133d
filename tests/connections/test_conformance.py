"""What every scheme must prove. A new scheme is listed in CASES and is done when this file passes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_stack import (
    NUM_POSITIONS,
    WIDTH,
    FeedForward,
    Stack,
    TokenMixing,
    make_input,
    make_stack,
    randomize,
    start_distance,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mainstem.connections import (
    Connection,
    DeepNorm,
    NoResidual,
    NormConfig,
    PostNorm,
    PreNorm,
    ReorderedNorm,
    SandwichNorm,
    Scheme,
    Stream,
    UnitOffsetRMSNorm,
    parameter_groups,
    scheme_names,
)

CASES: list[Scheme] = [
    NoResidual(),
    PreNorm(),
    PostNorm(),
    SandwichNorm(),
    ReorderedNorm(),
    DeepNorm(),
]
NORMS = [NormConfig(kind="rms"), NormConfig(kind="layer"), NormConfig(kind="rms", unit_offset=True)]

# fp64 has 2.2e-16; a step is a handful of additions and one norm over 64 channels, so 1e-12 leaves a factor
# of a thousand for their rounding and none for a wrong coefficient.
EXACT = 1e-12

each_scheme = pytest.mark.parametrize("scheme", CASES, ids=lambda s: s.name)
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
    assert sorted(scheme.name for scheme in CASES) == scheme_names()


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
    connection, stream, update, context = next(iter(steps(scheme, norm, seed=seed)))
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
@torch.no_grad()
def test_expand_and_collapse_are_linear(scheme: Scheme) -> None:
    stack = make_stack(scheme, NormConfig())
    x, y = make_input(0), make_input(1)
    expand = stack.trunk.expand
    assert relative_error(expand(2 * x - 3 * y), combine(expand(x), expand(y), 2.0, -3.0)) <= EXACT
    stream = stack.states(x)[-1]
    collapse = stack.trunk.linearize_collapse(stream)
    assert relative_error(collapse(stream), stack.trunk.collapse(stream)) <= EXACT
    other = random_like(stream, 5)
    mixed = 2 * collapse(stream) - 3 * collapse(other)
    assert relative_error(collapse(combine(stream, other, 2.0, -3.0)), mixed) <= EXACT


@each_scheme
def test_distance_from_pre_norm_at_the_start_is_the_declared_one(scheme: Scheme) -> None:
    measured = sum(start_distance(scheme, NormConfig(), seed) for seed in range(10)) / 10
    if scheme.properties.equals_pre_norm_at_start:
        assert scheme.properties.start_distance == 0.0
        assert measured <= EXACT
    else:
        # The seeds are fixed, so what is left is the rounding of the declared value to two decimals.
        assert scheme.properties.start_distance > 0
        assert abs(measured - scheme.properties.start_distance) <= 0.006


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
def test_every_parameter_gets_a_gradient(scheme: Scheme, norm: NormConfig) -> None:
    stack = make_stack(scheme, norm)
    (stack(make_input(0)) * make_input(3)).sum().backward()
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


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


# Dynamo asks every input for its .grad and hides the warning itself, which "error" overrides.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@each_scheme
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_one_graph_serves_every_block(scheme: Scheme, kind: str) -> None:
    torch._dynamo.reset()
    trunk = scheme.build(width=16, num_sublayers=48, norm=NormConfig(kind=kind))
    connections = trunk.release_connections()
    blocks = [TwoSublayers(connections[2 * i : 2 * i + 2], 16) for i in range(24)]
    counter = CompileCounter()
    x = make_input(0, width=16, dtype=torch.float32).requires_grad_()  # as an embedding's output does
    stream, expected = trunk.expand(x), trunk.expand(x)
    for block in blocks:
        expected = block(expected)
        stream = torch.compile(block, backend=counter, fullgraph=True)(stream)
    assert counter.frame_count == 1
    assert all(torch.equal(a, b) for a, b in zip(leaves(stream), leaves(expected), strict=True))


@each_scheme
@each_norm
def test_parameters_are_the_declared_norms_and_partition(scheme: Scheme, norm: NormConfig) -> None:
    stack = make_stack(scheme, norm)
    kinds = (nn.LayerNorm, nn.RMSNorm, UnitOffsetRMSNorm)
    per_norm = WIDTH * (2 if norm.kind == "layer" else 1)
    for connection in stack.trunk.connections:
        assert isinstance(connection, Connection)
        norms = [m for m in connection.modules() if isinstance(m, kinds)]
        assert len(norms) == scheme.properties.num_norms
        assert sum(p.numel() for p in connection.parameters()) == per_norm * scheme.properties.num_norms
    groups = parameter_groups(stack)
    grouped = [id(p) for g in groups for p in g.parameters]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in stack.parameters()}
    decayed = {id(p) for g in groups if g.weight_decay for p in g.parameters}
    assert decayed == {id(p) for p in stack.branches.parameters()}


class Touched(TorchDispatchMode):
    """Which tensors any operation has read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore
        inputs = tree_leaves((args, kwargs))
        self.read.update(t.data_ptr() for t in inputs if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


@each_scheme
@torch.no_grad()
def test_streams_history_and_traffic_are_the_declared_ones(scheme: Scheme) -> None:
    declared = scheme.properties
    plain = make_input(0)
    for connection, stream, update, context in steps(scheme, NormConfig()):
        inputs = [*leaves(stream), update]
        with Touched() as touched:
            out = connection.write(stream, update, context)
        read = {t.data_ptr(): t.numel() for t in inputs if t.data_ptr() in touched.read}
        made = [t for t in leaves(out) if t.data_ptr() not in {i.data_ptr() for i in inputs}]
        moved = (sum(read.values()) + sum(t.numel() for t in made)) / plain.numel()
        assert moved == declared.traffic
        assert isinstance(out, tuple) == declared.has_history
        if not declared.has_history:
            assert leaves(out)[0].numel() == declared.num_streams * plain.numel()


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
