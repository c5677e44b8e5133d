"""Matrices that mix streams: sums, gains over 192 sublayers, conventions, and each generator's definition."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_stack import make_input, make_stack, plain_distance, randomize
from torch import Tensor

from mainstem.connections import Connection, HyperConnections, Mhc, NormConfig
from mainstem.connections._mixing import make_generator
from mainstem.connections._sinkhorn import Sinkhorn
from mainstem.connections.mhc import CONVENTIONS, transpose_orientation
from mainstem.errors import ConfigError

DOUBLY_STOCHASTIC = ["sinkhorn", "permutation", "kronecker"]
LAST = {torch.float32: 1e-6, torch.float64: 1e-14}


def matrices(kind: str, size: float, seed: int, dtype: torch.dtype = torch.float64, n: int = 4) -> Tensor:
    generator = make_generator(kind, n, Sinkhorn())  # pyright: ignore
    torch.manual_seed(seed)
    logits = (torch.rand(16, generator.num_logits, dtype=torch.float64) * 2 - 1) * size
    return generator(logits.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", DOUBLY_STOCHASTIC)
@settings(max_examples=20, deadline=None)
@given(size=st.sampled_from([0.1, 1.0, 4.0, 30.0, 500.0]), seed=st.integers(0, 2**31 - 1))
def test_rows_and_columns_sum_to_one(kind: str, dtype: torch.dtype, size: float, seed: int) -> None:
    matrix = matrices(kind, size, seed, dtype)
    assert bool((matrix >= 0).all())
    assert bool(matrix.isfinite().all())
    assert (matrix.sum(-1) - 1).abs().max() <= LAST[dtype]
    if kind != "sinkhorn":
        assert (matrix.sum(-2) - 1).abs().max() <= LAST[dtype]
    elif size <= 4:
        promised = 1e-6 if size <= 1 else 0.05
        assert (matrix.sum(-2) - 1).abs().max() <= promised


@pytest.mark.parametrize(("size", "promised", "measured"), [(1.0, 1e-6, 7.6e-7), (4.0, 0.05, 0.0342)])
def test_sinkhorns_slower_side_over_all_sign_patterns(size: float, promised: float, measured: float) -> None:
    bits = (torch.arange(2**16)[:, None] >> torch.arange(16)) & 1
    matrix = Sinkhorn()((size * (2.0 * bits.double() - 1)).unflatten(-1, (4, 4)))
    worst = float((matrix.sum(-2) - 1).abs().max())
    assert worst <= promised
    assert abs(worst / measured - 1) <= 0.01


@settings(max_examples=20, deadline=None)
@given(
    size=st.sampled_from([0.1, 1.0, 30.0]), seed=st.integers(0, 2**31 - 1), n=st.sampled_from([2, 3, 4, 8])
)
def test_a_cayley_mix_is_a_rotation(size: float, seed: int, n: int) -> None:
    q = matrices("cayley", size, seed, n=n)
    # A solve with condition number up to 1 + |A|.
    assert (q @ q.mT - torch.eye(n)).abs().max() <= 1e-12 * (1 + size) ** 2
    assert (torch.linalg.det(q) - 1).abs().max() <= 1e-12 * (1 + size) ** 2


def test_generators_are_their_definitions() -> None:
    torch.manual_seed(0)
    z = torch.randn(24, dtype=torch.float64)
    weights = z.softmax(0)
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for weight, order in zip(weights, itertools.permutations(range(4)), strict=True):
        for row, column in enumerate(order):
            expected[row, column] += weight
    made = make_generator("permutation", 4, Sinkhorn())(z)
    torch.testing.assert_close(made, expected, rtol=1e-13, atol=1e-13)

    z = torch.randn(4, dtype=torch.float64)
    p, q = torch.sigmoid(z[0] - z[1]), torch.sigmoid(z[2] - z[3])
    factors = [torch.stack([torch.stack([w, 1 - w]), torch.stack([1 - w, w])]) for w in (p, q)]
    made = make_generator("kronecker", 4, Sinkhorn())(z)
    torch.testing.assert_close(made, torch.kron(*factors), rtol=1e-13, atol=1e-13)

    z = torch.randn(3, dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    a = torch.stack([zero, z[0], z[1], -z[0], zero, z[2], -z[1], -z[2], zero]).reshape(3, 3)
    expected = (torch.eye(3) - a) @ torch.linalg.inv(torch.eye(3) + a)
    made = make_generator("cayley", 3, Sinkhorn())(z)
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)


def test_sinkhorn_is_division_by_turns() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 4, 4, dtype=torch.float64)
    by_columns, by_rows = logits.exp(), logits.exp()
    for _ in range(20):
        by_columns = by_columns / by_columns.sum(-2, keepdim=True)
        by_columns = by_columns / by_columns.sum(-1, keepdim=True)
        by_rows = by_rows / by_rows.sum(-1, keepdim=True)
        by_rows = by_rows / by_rows.sum(-2, keepdim=True)
    torch.testing.assert_close(Sinkhorn()(logits), by_columns, rtol=1e-12, atol=1e-14)
    for start in ("exp", "softmax"):
        made = Sinkhorn(order="rows_first", start=start)(logits)  # pyright: ignore
        torch.testing.assert_close(made, by_rows, rtol=1e-12, atol=1e-14)
    clamped = Sinkhorn(order="rows_first", epsilon=1e-6, guard="clamp")(logits)
    torch.testing.assert_close(clamped, by_rows, rtol=1e-12, atol=1e-14)


@torch.no_grad()
def composite_gain(matrices: list[Tensor]) -> float:
    """Largest absolute row or column sum of the product, averaged over tokens (arXiv 2512.24880, 3.1)."""
    product = matrices[0]
    for matrix in matrices[1:]:
        product = matrix @ product
    rows, columns = product.abs().sum(-1).amax(-1), product.abs().sum(-2).amax(-1)
    return float(torch.maximum(rows, columns).mean())


@torch.no_grad()
def mixes(scheme: Mhc | HyperConnections, depth: int = 192, noise: bool = True) -> list[Tensor]:
    """The mixing matrices of a pass through a stack whose coefficients were moved at random."""
    stack = make_stack(scheme, NormConfig(), num_sublayers=depth, width=16)
    if noise:
        randomize(stack.trunk)
    stream = stack.trunk.expand(make_input(0, width=16))
    found: list[Tensor] = []
    for connection, branch in zip(stack.trunk.connections, stack.branches, strict=True):
        assert isinstance(connection, Connection)
        read, context = connection.read(stream)
        assert isinstance(context, tuple)
        found.append(context[1])
        stream = connection.write(stream, branch(read), context)
    return found


@pytest.mark.parametrize("mixing", DOUBLY_STOCHASTIC)
def test_the_composite_gain_over_192_sublayers_is_one(mixing: str) -> None:
    """Measured 1.0000: a product of doubly stochastic matrices is doubly stochastic."""
    gain = composite_gain(mixes(Mhc(mixing=mixing)))  # pyright: ignore
    assert abs(gain - 1) <= (1e-3 if mixing == "sinkhorn" else 1e-12)


def test_the_composite_gain_of_rotations_is_bounded() -> None:
    gain = composite_gain(mixes(Mhc(mixing="cayley")))
    assert (
        1 - 1e-9 <= gain <= math.sqrt(4) + 1e-9
    )  # the largest 1-norm of a row of length 1 in four dimensions


def test_the_composite_gain_of_hyper_connections_is_finite_and_not_bounded() -> None:
    """1 at the start; 192 matrices with entries moved by N(0, 0.3) multiply to something vast: why mHC is."""
    assert composite_gain(mixes(HyperConnections(), noise=False)) == 1.0
    gain = composite_gain(mixes(HyperConnections(dynamic=False)))
    assert 1e3 < gain < math.inf


@pytest.mark.parametrize("name", [*CONVENTIONS])
@torch.no_grad()
def test_a_convention_turned_around_is_the_same_function(name: str) -> None:
    options = {**CONVENTIONS[name], "num_streams": 3}
    stack = make_stack(Mhc(**options), NormConfig(), num_sublayers=3)
    randomize(stack.trunk)
    state, turned = transpose_orientation(stack.state_dict(), options)
    assert turned["orientation"] != Mhc(**options).orientation
    other = make_stack(Mhc(**turned), NormConfig(), num_sublayers=3)
    other.load_state_dict(state)
    x = make_input(0)
    torch.testing.assert_close(other(x), stack(x), rtol=1e-12, atol=1e-12)
    back, again = transpose_orientation(state, turned)
    assert Mhc(**again) == Mhc(**options)
    assert all(torch.equal(value, stack.state_dict()[key]) for key, value in back.items())
    # And the trap: the same weights read the other way are another function.
    other.load_state_dict(stack.state_dict())
    assert not torch.allclose(other(x), stack(x), rtol=1e-3)


@pytest.mark.parametrize("mixing", ["permutation", "kronecker"])
@pytest.mark.parametrize("embedding_scale", [0.02, 1.0])
def test_any_doubly_stochastic_mix_starts_exactly(mixing: str, embedding_scale: float) -> None:
    scheme = Mhc(mixing=mixing, exact_start=True)  # pyright: ignore
    assert plain_distance(scheme, 192, embedding_scale, torch.float64) <= 1e-12
    assert plain_distance(scheme, 192, embedding_scale, torch.float32) <= 1e-5


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: Mhc(mixing="none"), r"mixing 'none' is not known; choose one of sinkhorn, permutation"),
        (lambda: Mhc(mixing="permutation", num_streams=6), r"6! = 720 logits; use at most 5 streams"),
        (lambda: Mhc(mixing="kronecker", num_streams=3), r"a power of 2 of at least 2 as num_streams, not 3"),
        (lambda: Mhc(mixing="cayley", num_streams=1), r"give num_streams of at least 2"),
        (lambda: Mhc(orientation="both"), r"orientation 'both' is not known"),
        (lambda: Mhc(sinkhorn_steps=0), r"sinkhorn_steps=0 must be at least 1"),
        (lambda: Mhc(sinkhorn_epsilon=-1e-6), r"sinkhorn_epsilon=-1e-06 must not be negative"),
        (lambda: Mhc(sinkhorn_order="rows"), r"sinkhorn_order 'rows' is not known; choose one of columns_f"),
        (lambda: Mhc(exact_start=True, sinkhorn_epsilon=1e-6), r"needs sinkhorn_epsilon=0, not 1e-06"),
        (lambda: Mhc(exact_start=True, sinkhorn_order="rows_first"), r"set sinkhorn_order='columns_first'"),
        (lambda: Mhc(exact_start=True, multiplier=1.0), r"needs multiplier above 1"),
        (lambda: Mhc(multiplier=0.0), r"multiplier above 0"),
        (lambda: transpose_orientation({}, {"mixing": "cayley"}), r"only a Sinkhorn mix"),
    ],
)
def test_mistakes_are_named(mistake, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mistake()
