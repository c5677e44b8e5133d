"""Reads and writes that run again in the backward pass: the same gradients, and less that is kept."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from reference_stack import NUM_POSITIONS, WIDTH, Stack, make_input, make_stack, randomize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mainstem.connections import (
    Connection,
    NormConfig,
    Scheme,
    Stream,
    _recompute,
    make_scheme,
    scheme_names,
)
from mainstem.connections.pre_norm import PreNorm, PreNormConnection
from mainstem.errors import ConfigError

SUBLAYERS = 6
STREAMS = ("hyper_connections", "mhc", "gated_streams", "attention_residuals", "siamese_norm")
each_scheme = pytest.mark.parametrize("name", scheme_names())
some_schemes = pytest.mark.parametrize("name", STREAMS)


def stack_of(name: str, recompute: int, dtype: torch.dtype = torch.float64) -> Stack:
    """A randomized stack in training mode, alike for every ``recompute``."""
    scheme = make_scheme(name)
    stack = make_stack(scheme, NormConfig(), num_sublayers=SUBLAYERS, dtype=dtype)
    torch.manual_seed(0)
    stack.trunk = scheme.build(width=WIDTH, num_sublayers=SUBLAYERS, recompute=recompute).to(dtype)
    randomize(stack.trunk)
    return stack.train()


def gradients(stack: nn.Module, run: Callable[[Tensor], Tensor], dtype=torch.float64) -> list[Tensor]:
    """Gradients of the input and of every parameter, and the output."""
    x = make_input(0, dtype=dtype).requires_grad_()
    torch.manual_seed(5)
    out = run(x)
    stack.zero_grad()
    (out * make_input(3, dtype=out.dtype)).sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad for p in stack.parameters() if p.grad is not None)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """Equal up to the order in which gradients are added up, some tens of roundings of 1e-16."""
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def in_blocks(stack: Stack, run: Callable[..., Stream], x: Tensor) -> Tensor:
    """The stack with ``run(block, *stream)`` around every two sublayers."""
    stream = stack.trunk.expand(x)
    for i in range(0, SUBLAYERS, 2):
        is_tensor = isinstance(stream, Tensor)

        def block(*tensors: Tensor, at: int = i, single: bool = is_tensor) -> Stream:
            s: Stream = tensors[0] if single else tensors
            for j in (at, at + 1):
                s = stack.trunk.connections[j](s, stack.branches[j])
            return s

        stream = run(block, *((stream,) if isinstance(stream, Tensor) else stream))
    return stack.trunk.final_norm(stack.trunk.collapse(stream))


@each_scheme
@pytest.mark.parametrize("recompute", [1, 2, 4])
def test_gradients_are_the_same_to_the_bit(name: str, recompute: int) -> None:
    plain, again = stack_of(name, 0), stack_of(name, recompute)
    assert_equal(gradients(again, again), gradients(plain, plain))


@some_schemes
def test_branches_run_once(name: str) -> None:
    stack = stack_of(name, 2)
    runs = [0] * SUBLAYERS
    for i, branch in enumerate(stack.branches):
        branch.register_forward_hook(lambda *_, i=i: runs.__setitem__(i, runs[i] + 1))
    gradients(stack, stack)
    assert runs == [1] * SUBLAYERS


def bytes_kept(name: str, recompute: int) -> int:
    """What six sublayers of one scheme keep around branches that keep nothing."""
    trunk = stack_of(name, recompute, torch.float32).trunk
    known = {p.untyped_storage().data_ptr() for p in trunk.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in known:
            kept.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    stream = trunk.expand(make_input(0, dtype=torch.float32).requires_grad_())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for connection in trunk.connections:
            stream = connection(stream, lambda read: 2.0 * read)
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize("name", ["hyper_connections", "mhc", "gated_streams", "identity_hc"])
def test_a_block_keeps_one_stream_and_its_updates(name: str) -> None:
    width = 2 * NUM_POSITIONS * WIDTH * 4  # bytes of one update
    assert bytes_kept(name, 2) == SUBLAYERS // 2 * (4 + 2) * width
    assert bytes_kept(name, SUBLAYERS) == (4 + SUBLAYERS) * width
    assert bytes_kept(name, 0) > SUBLAYERS * (4 + 1) * width


@some_schemes
def test_eval_and_no_grad(name: str) -> None:
    plain, again = stack_of(name, 0).eval(), stack_of(name, 2).eval()
    assert_equal(gradients(again, again), gradients(plain, plain))
    with torch.no_grad():
        out = again(make_input(0))
        assert torch.equal(out, plain(make_input(0)))
    assert out.grad_fn is None


@some_schemes
def test_two_forwards_before_one_backward(name: str) -> None:
    plain, again = stack_of(name, 0), stack_of(name, 2)
    twice = [gradients(s, lambda x, s=s: s(x) + s(x.flip(0))) for s in (again, plain)]
    assert_close(*twice)


@some_schemes
def test_an_exception_in_the_middle_leaves_nothing_behind(name: str) -> None:
    plain, again = stack_of(name, 0), stack_of(name, 2)

    def interrupted(x: Tensor) -> Tensor:
        def fails(read: Tensor) -> Tensor:
            raise KeyError("a branch of someone else")

        stream = again.trunk.expand(x)
        for connection, branch in zip(again.trunk.connections, again.branches, strict=True):
            with pytest.raises(KeyError):
                connection(stream, fails)
            stream = connection(stream, branch)
        return again.trunk.final_norm(again.trunk.collapse(stream))

    assert_close(gradients(again, interrupted), gradients(plain, plain))


@some_schemes
def test_backward_twice(name: str) -> None:
    stack = stack_of(name, 2)
    x = make_input(0).requires_grad_()
    loss = stack(x).square().sum()
    first = torch.autograd.grad(loss, [x, *stack.trunk.parameters()], retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(loss, [x, *stack.trunk.parameters()], allow_unused=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a is not None)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, x)


def test_gradients_of_gradients() -> None:
    def second(stack: Stack) -> Tensor:
        x = make_input(0).requires_grad_()
        (first,) = torch.autograd.grad(stack(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    for name in ("hyper_connections", "mhc"):
        torch.testing.assert_close(second(stack_of(name, 2)), second(stack_of(name, 0)), rtol=1e-12, atol=0)


@some_schemes
def test_a_gradient_that_needs_a_part_only(name: str) -> None:
    """Of a branch's update alone, when all that follows it is gone."""

    def part(stack: Stack) -> Tensor:
        x = make_input(0).requires_grad_()
        caught: list[Tensor] = []
        handle = stack.branches[3].register_forward_hook(lambda _m, _i, out: caught.append(out))
        stack(x)
        handle.remove()
        return torch.autograd.grad(caught[0].square().sum(), x)[0]

    assert torch.equal(part(stack_of(name, 4)), part(stack_of(name, 0)))


@some_schemes
def test_an_update_without_a_gradient(name: str) -> None:
    """The read of a sublayer whose branch is frozen to a constant has no part in the backward pass."""

    def run(stack: Stack, x: Tensor) -> Tensor:
        stream = stack.trunk.expand(x)
        for i, (connection, branch) in enumerate(zip(stack.trunk.connections, stack.branches, strict=True)):
            stream = connection(stream, branch if i % 2 == 0 else lambda read: torch.ones_like(read))
        return stack.trunk.final_norm(stack.trunk.collapse(stream))

    plain, again = stack_of(name, 0), stack_of(name, 2)
    found = gradients(again, functools.partial(run, again))
    assert_close(found, gradients(plain, functools.partial(run, plain)))


@some_schemes
def test_a_stream_put_in_its_place(name: str) -> None:
    """Someone who changes the stream inside a segment gets the gradients of what was run."""

    def changed(stack: Stack, x: Tensor) -> Tensor:
        stream = stack.trunk.expand(x)
        for connection, branch in zip(stack.trunk.connections, stack.branches, strict=True):
            stream = connection(stream, branch)
            stream = 0.9 * stream if isinstance(stream, Tensor) else tuple(0.9 * t for t in stream)
        return stack.trunk.final_norm(stack.trunk.collapse(stream))

    plain, again = stack_of(name, 0), stack_of(name, 2)
    found = gradients(again, functools.partial(changed, again))
    assert_equal(found, gradients(plain, functools.partial(changed, plain)))


@some_schemes
def test_autocast(name: str) -> None:
    def run(stack: Stack, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = stack(x)
        return out.float()

    plain, again = (stack_of(name, k, torch.float32) for k in (0, 2))
    found = gradients(again, functools.partial(run, again), torch.float32)
    assert_equal(found, gradients(plain, functools.partial(run, plain), torch.float32))


@some_schemes
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_a_checkpoint_of_the_block(name: str, reentrant: bool) -> None:
    plain, again = stack_of(name, 0), stack_of(name, 2)

    def run(block: Callable[..., Stream], *tensors: Tensor) -> Stream:
        return checkpoint(block, *tensors, use_reentrant=reentrant)

    assert_close(gradients(again, functools.partial(in_blocks, again, run)), gradients(plain, plain))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@some_schemes
def test_compiled_blocks_leave_it_to_the_compiler(name: str) -> None:
    torch._dynamo.reset()
    plain, again = stack_of(name, 0), stack_of(name, 2)

    def run(block: Callable[..., Stream], *tensors: Tensor) -> Stream:
        return torch.compile(block, backend="aot_eager", fullgraph=True)(*tensors)

    with torch._dynamo.config.patch(recompile_limit=64):
        found = gradients(again, functools.partial(in_blocks, again, run))
    for a, b in zip(found, gradients(plain, plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_what_is_kept_goes_with_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a backward pass, and without the garbage collector: no cycle holds what was kept."""
    segments: list[weakref.ref[_recompute.Segment]] = []

    class Watched(_recompute.Segment):
        def __init__(self, stream: Stream):
            super().__init__(stream)
            segments.append(weakref.ref(self))

    monkeypatch.setattr(_recompute, "Segment", Watched)
    stack = stack_of("hyper_connections", 2)
    gc.disable()
    try:
        out = stack(make_input(0).requires_grad_())
        assert len(segments) == SUBLAYERS // 2
        assert all(ref() is not None for ref in segments)
        del out
        assert all(ref() is None for ref in segments)
    finally:
        gc.enable()


class Forgetful(PreNormConnection):
    """Computes another thing every second time."""

    runs = 0

    def write(self, stream, update, context):  # pyright: ignore
        self.runs += 1
        return stream + (update * update if self.runs % 2 else update)


def test_a_connection_that_computes_another_thing_the_second_time() -> None:
    class Scheme2(PreNorm):
        def build_connection(self, **options) -> Connection:  # pyright: ignore
            return Forgetful(options["norm"].build(options["width"]))

    trunk = Scheme2().build(width=WIDTH, num_sublayers=2, recompute=2)
    stream = trunk.expand(make_input(0, dtype=torch.float32).requires_grad_())
    for connection in trunk.connections:
        stream = connection(stream, lambda read: 2.0 * read)
    assert isinstance(stream, Tensor)
    with pytest.raises(RuntimeError, match="does not compute the same twice"):
        stream.sum().backward()


def test_refusals_come_when_it_is_built() -> None:
    class Refuses(PreNorm):
        refuses = {"recompute": "it does not say."}  # noqa: RUF012

    with pytest.raises(ConfigError, match="it does not say"):
        Refuses().build(width=8, num_sublayers=2, recompute=2)
    scheme: Scheme = PreNorm()
    with pytest.raises(ConfigError, match="recompute=-1"):
        scheme.build(width=8, num_sublayers=2, recompute=-1)
