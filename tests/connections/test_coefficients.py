"""Coefficients are fp32 in a model that is bf16 throughout, whatever the scheme.

bf16 has three digits. A coefficient rounded to it is off in the same direction at every sublayer, and over a
thousand of them that is a factor; the rounding of the stream itself is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_conformance import CASES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mainstem.connections import Connection, Scheme, StreamModule, Trunk, UnitOffsetRMSNorm, make_scheme
from mainstem.connections._mixing import make_generator
from mainstem.connections._sinkhorn import Sinkhorn

WIDTH, SUBLAYERS = 32, 5
NORMS = (nn.LayerNorm, nn.RMSNorm, UnitOffsetRMSNorm)
WIDE = (torch.float32, torch.float64)
BF16_CASES = [scheme for scheme in CASES if "narrow_stream" not in scheme.refuses]
# What these hand from read to write is a state of the stream, in its dtype, not a coefficient.
STATE_AS_CONTEXT = {"siamese_norm", "unet_skips", "x0_reinjection"}

# Ops that change neither the numbers nor their dtype.
MOVES = {
    "_to_copy", "_unsafe_view", "alias", "as_strided", "broadcast_to", "cat", "chunk", "clone", "copy_",
    "detach", "empty_like", "expand", "permute", "repeat", "reshape", "select", "slice", "split",
    "split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind", "unflatten", "unsqueeze",
    "view", "zeros_like",
}  # fmt: skip


def each_case(schemes: list[Scheme]) -> Any:
    return pytest.mark.parametrize("scheme", schemes, ids=lambda s: s.name)


def built(scheme: Scheme) -> Trunk:
    """A trunk whose parameters are all moved, so that no coefficient is 0 or 1 by chance."""
    torch.manual_seed(0)
    trunk = scheme.build(width=WIDTH, num_sublayers=SUBLAYERS)
    for parameter in trunk.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return trunk


class NarrowCoefficients(TorchDispatchMode):
    """Notes every op that computes with a coefficient below fp32: of parameters and buffers, norms aside."""

    def __init__(self, module: nn.Module):
        super().__init__()
        own = [
            tensor
            for part in module.modules()
            if not isinstance(part, NORMS)
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))
        ]
        self.coefficients = {id(t): t for t in own}
        self.narrow: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        of_coefficients = [t for t in given if id(t) in self.coefficients]
        if not of_coefficients:
            return out
        name = func.overloadpacket.__name__
        if name not in MOVES:
            self.narrow += [f"{name} of {list(t.shape)}" for t in of_coefficients if t.dtype not in WIDE]
        if len(of_coefficients) == len(given):
            for t in tree_leaves(out):
                if isinstance(t, Tensor) and t.is_floating_point():
                    self.coefficients[id(t)] = t
        return out


def run_bf16(trunk: Trunk, x: Tensor) -> Iterator[tuple[Connection, Any]]:
    """Run the stack, yielding each connection with the context of its read."""
    stream = trunk.enter(x)
    for connection in trunk.connections:
        read, context = connection.read(stream)
        assert read.dtype == torch.bfloat16
        yield connection, context
        stream = connection.write(stream, torch.tanh(read).roll(1, -1), context)
        assert {t.dtype for t in tree_leaves(stream)} == {torch.bfloat16}
    assert trunk.leave(stream).dtype == torch.bfloat16


@each_case(BF16_CASES)
def test_no_coefficient_is_computed_below_fp32(scheme: Scheme) -> None:
    trunk = built(scheme).bfloat16().train()
    x = torch.randn(2, 6, WIDTH).bfloat16()
    watch = NarrowCoefficients(trunk)
    contexts: list[Any] = []
    with torch.no_grad(), watch:
        contexts += [context for _, context in run_bf16(trunk, x)]
    assert watch.narrow == []
    if scheme.name not in STATE_AS_CONTEXT:
        assert {t.dtype for t in tree_leaves(contexts) if isinstance(t, Tensor)} <= set(WIDE)


def test_the_watch_sees_a_narrow_coefficient() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight[None].sigmoid().to(x.dtype)

    module = Narrow().bfloat16()
    with torch.no_grad(), NarrowCoefficients(module) as watch:
        module(torch.ones(2, WIDTH).bfloat16())
    assert watch.narrow == [f"sigmoid of [1, {WIDTH}]", f"mul of [1, {WIDTH}]"]


@pytest.mark.parametrize("stream_dtype", [None, torch.float32], ids=["follows", "fp32"])
@each_case(CASES)
def test_autocast_is_the_branches_alone(scheme: Scheme, stream_dtype: torch.dtype | None) -> None:
    """Around branches that autocast does not touch, nothing changes to the bit; and theirs it still casts."""
    torch.manual_seed(0)
    trunk = scheme.build(width=WIDTH, num_sublayers=SUBLAYERS, stream_dtype=stream_dtype).eval()
    for parameter in trunk.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    x, matrix = torch.randn(2, 6, WIDTH), nn.Linear(WIDTH, WIDTH)
    cast: set[torch.dtype] = set()

    def run(branch: Any) -> Tensor:
        stream = trunk.enter(x)
        for connection in trunk.connections:
            stream = connection(stream, branch)
        return trunk.leave(stream)

    def narrow(read: Tensor) -> Tensor:
        made = matrix(read)
        cast.add(made.dtype)
        return made

    with torch.no_grad():
        expected = run(torch.tanh)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, made = run(torch.tanh), run(narrow)
            assert torch.is_autocast_enabled("cpu")
    assert torch.equal(found, expected)
    assert cast == {torch.bfloat16}
    assert made.dtype == torch.float32
    assert made.isfinite().all()


@each_case(BF16_CASES)
def test_buffers_are_never_rounded(scheme: Scheme) -> None:
    """Cast, or built under a lower default dtype, they are to the bit what they are in an fp32 model."""
    expected = dict(scheme.build(width=WIDTH, num_sublayers=SUBLAYERS).named_buffers())
    cast = scheme.build(width=WIDTH, num_sublayers=SUBLAYERS).bfloat16()
    nested = nn.Sequential(nn.Linear(2, 2), scheme.build(width=WIDTH, num_sublayers=SUBLAYERS)).half()[1]
    torch.set_default_dtype(torch.bfloat16)
    try:
        narrow = scheme.build(width=WIDTH, num_sublayers=SUBLAYERS)
    finally:
        torch.set_default_dtype(torch.float32)
    for trunk in (cast, nested, narrow, cast.to("meta").to_empty(device="cpu")):
        assert {p.dtype for p in trunk.parameters()} <= {torch.bfloat16, torch.float16}
        for name, buffer in trunk.named_buffers():
            assert buffer.dtype == torch.float32, name
    for trunk in (nested, narrow):
        for name, buffer in trunk.named_buffers():
            assert torch.equal(buffer, expected[name]), name


@pytest.mark.parametrize("kind", ["permutation", "cayley"])
def test_bases_of_generators_stay_wide(kind: Any) -> None:
    module = StreamModule()
    module.generator = make_generator(kind, 4, Sinkhorn())
    assert module.bfloat16().generator.basis.dtype == torch.float32


def slope(out: Tensor, x: Tensor) -> float:
    """Least squares: what multiplies ``x`` in ``out``."""
    out, x = out.double(), x.double()
    return float((out * x).sum() / x.square().sum())


# scheme, what the write multiplies: the stream or the update, and by how much, from the papers' formulas
MULTIPLIED = [
    ("deep_norm", {}, "stream", 192**0.25),
    ("keel", {}, "stream", 192.0),
    ("keel", {"carry_scale": 0.7}, "stream", 0.7),
    ("admin", {"output_change": "constant"}, "stream", 192**0.5),
    ("depth_scaled", {}, "update", 4 / 192),
    ("depth_scaled", {"rule": "depth_mup"}, "update", (4 / 192) ** 0.5),
    ("layer_norm_scaling", {}, "read", 21**-0.5),
    ("resi_dual", {"sum_scale": 0.3}, "sum", 0.3),
    ("siamese_norm", {}, "update", 42**-0.5),
    ("stochastic_depth", {"final_survival": 0.5}, "kept", 1 / (1 - 41 / 192 * 0.5)),
]


@pytest.mark.parametrize(("name", "options", "of", "expected"), MULTIPLIED)
def test_a_bf16_step_multiplies_by_the_number_of_the_paper(
    name: str, options: dict[str, Any], of: str, expected: float
) -> None:
    """Over 2^17 entries rounding averages to 1e-5; the bf16 of most of these numbers is 1e-3 away."""
    trunk = make_scheme(name, **options).build(width=64, num_sublayers=192).bfloat16()
    connection = trunk.connections[40].train()
    for norm in ("norm", "write_norm", "post_norm"):
        if hasattr(connection, norm):
            setattr(connection, norm, nn.Identity())
    torch.manual_seed(0)
    x = torch.randn(64, 32, 64).bfloat16()
    nothing = torch.zeros_like(x)
    pair = (nothing, nothing) if name in ("resi_dual", "siamese_norm") else nothing
    if of == "read":
        found = connection.read(x)[0]
    elif of == "stream":
        found = connection.write(x, nothing, connection.read(x)[1])
    else:
        found = connection.write(pair, x, connection.read(pair)[1] if name != "siamese_norm" else nothing)
        found = {"sum": lambda f: f[1], "update": lambda f: f[0] if isinstance(f, tuple) else f}.get(
            of, lambda f: f
        )(found)
    if of == "kept":
        kept = found.flatten(1).any(1)
        found, x = found[kept], x[kept]
    assert slope(found, x) == pytest.approx(expected, rel=1e-4)
