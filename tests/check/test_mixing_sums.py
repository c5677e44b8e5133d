"""What every multi-stream connection promises of its mixing matrices, held to it and against it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mainstem.check import CheckConfig, Finding, Passed, ResidualStack, check, load_factory
from mainstem.check.own import stack_of
from mainstem.connections import HyperConnections, Mhc, MixingMatrix, Stream, make_scheme, scheme_names

CONFIG = CheckConfig(depths=(2,), kinds=("mixing-sums",))
STOCHASTIC, IDENTITY = {"rows", "columns"}, {"rows", "columns", "orthogonal"}
# The papers' claims: mHC and its generators; no other scheme claims a sum of the matrix it learns.
PROMISES: dict[str, set[str]] = {
    "mhc": STOCHASTIC,
    "mhc_exact": STOCHASTIC,
    "mhc_deepseek_v4": STOCHASTIC,
    "mhc_megatron": STOCHASTIC,
    "mhc_permutation": STOCHASTIC,
    "mhc_kronecker": STOCHASTIC,
    "mhc_cayley": {"orthogonal"},
    "identity_hc": IDENTITY,
    "independent_hc": IDENTITY,
    "gated_streams": IDENTITY,
    "hyper_connections": set(),
    "hyper_connections_static": set(),
    "frac_connections": set(),
    "frac_connections_static": set(),
}


def sums_of(factory: Callable[..., nn.Module]) -> Finding | Passed:
    (outcome,) = check(factory, CONFIG).outcomes
    assert isinstance(outcome, Finding | Passed), outcome
    return outcome


def shown_by(stack: ResidualStack, x: Tensor) -> list[MixingMatrix]:
    return [
        matrix
        for connection, state in zip(stack.connections, stack.states(x), strict=False)
        for matrix in connection.mixing_matrices(state)
    ]


def test_every_scheme_of_several_streams_is_listed() -> None:
    stems = {name for name in scheme_names() if make_scheme(name).family == "wider streams"}
    assert stems <= set(PROMISES)


@pytest.mark.parametrize("name", PROMISES)
@pytest.mark.parametrize("form", ["", "_tower"], ids=["stack", "tower"])
def test_ours_keep_what_they_promise(name: str, form: str) -> None:
    outcome = sums_of(load_factory(f"mainstem.check.own:{name}{form}"))
    assert isinstance(outcome, Passed)
    if PROMISES[name] >= STOCHASTIC:
        assert outcome.figure == pytest.approx(1.0, abs=1e-4)  # the epsilons of two conventions take 1e-6 off
    elif PROMISES[name] == {"orthogonal"}:
        assert abs(outcome.figure) < 1e-5
    else:
        assert "nothing is promised" in outcome.says


@pytest.mark.parametrize("name", PROMISES)
def test_matrices_are_what_the_step_does(name: str) -> None:
    """A write of nothing is the matrix times the streams; and the promises are those listed above."""
    torch.manual_seed(0)
    stack = load_factory(f"mainstem.check.own:{name}")(3).double()
    for parameter in stack.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    states, shown = stack.states(x), shown_by(stack, x)
    assert len(shown) == 3
    for connection, state, matrix in zip(stack.connections, states, shown, strict=False):
        assert set(matrix.promises) == PROMISES[name]
        n = matrix.values.shape[-1]
        parts = state if state.ndim == 4 else state.unflatten(-1, (n, -1))
        expected = torch.einsum("bpoi,bpic->bpoc", matrix.values, parts).reshape(state.shape)
        carried = connection(state, torch.zeros_like)
        torch.testing.assert_close(carried, expected, rtol=0, atol=1e-12)
        if PROMISES[name] != IDENTITY:  # some other matrix, or the test above would pass with any
            assert float((matrix.values.detach() - torch.eye(n)).abs().max()) > 1e-4


def test_a_free_matrix_is_shown_and_not_judged() -> None:
    """Rows of hyper-connections that sum to 3 are what was learned, and the figure says so."""

    def factory(depth: int) -> ResidualStack:
        stack = stack_of(HyperConnections(dynamic=False), depth)
        for connection in stack.connections:
            connection.static_mix.data[:, 1:] *= 3.0
        return stack

    outcome = sums_of(factory)
    assert isinstance(outcome, Passed)
    assert outcome.figure == pytest.approx(3.0, abs=0.5)  # moved by noise in one of two looks


class RowsAlone(nn.Module):
    """A generator that forgets the columns."""

    def forward(self, logits: Tensor) -> Tensor:
        return logits.unflatten(-1, (4, 4)).softmax(-1)


class ColumnsAlone(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits.unflatten(-1, (4, 4)).softmax(-2)


class Affine(nn.Module):
    """Rows and columns that sum to 1 with entries below 0: no bound on what it does to the streams."""

    def forward(self, logits: Tensor) -> Tensor:
        swap = torch.eye(4)[[1, 0, 2, 3]]
        return (1.5 * torch.eye(4) - 0.5 * swap).expand(*logits.shape[:-1], 4, 4)


class NotANumber(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits.unflatten(-1, (4, 4)).softmax(-1).softmax(-2) * float("nan")


class HalfCayley(nn.Module):
    """``I - A`` without the inverse."""

    def forward(self, logits: Tensor) -> Tensor:
        skew = torch.zeros(*logits.shape[:-1], 4, 4)
        rows, columns = torch.triu_indices(4, 4, 1)
        skew[..., rows, columns] = logits + 0.5
        return torch.eye(4) - skew + skew.mT


def with_generator(generator: nn.Module, **options: Any) -> Callable[[int], ResidualStack]:
    def factory(depth: int) -> ResidualStack:
        stack = stack_of(Mhc(**options), depth)
        for connection in stack.connections:
            connection.generator = generator
        return stack

    return factory


@pytest.mark.parametrize(
    ("generator", "options", "says"),
    [
        (RowsAlone(), {}, "a column of a 4 x 4 mixing matrix sums to"),
        (RowsAlone(), {"orientation": "in_out"}, "a row of a 4 x 4 mixing matrix sums to"),
        (ColumnsAlone(), {}, "a row of a 4 x 4 mixing matrix sums to"),
        (Affine(), {}, "a doubly stochastic 4 x 4 mixing matrix has the entry -0.5, below 0"),
        (NotANumber(), {}, "sums to nan"),
        (
            HalfCayley(),
            {"mixing": "cayley"},
            "of an orthogonal 4 x 4 mixing matrix M differs from the identity",
        ),
    ],
)
def test_a_broken_generator_is_found(generator: nn.Module, options: dict[str, Any], says: str) -> None:
    outcome = sums_of(with_generator(generator, **options))
    assert isinstance(outcome, Finding), outcome
    assert says in outcome.says
    assert outcome.where.startswith("connections.")


class Theirs(nn.Module):
    """Somebody's connection, which shows what it does and promises what it is told to."""

    def __init__(self, promises: set[str]):
        super().__init__()
        self.logits = nn.Parameter(torch.randn(2, 2))
        self.promises = frozenset(promises)

    def forward(self, stream: Tensor, branch: Any) -> Tensor:
        mixed = torch.einsum("ij,bpjc->bpic", self.logits.softmax(-1), stream)
        return mixed + branch(stream.mean(2))[:, :, None]

    def mixing_matrices(self, stream: Stream) -> list[MixingMatrix]:
        return [MixingMatrix(self.logits.softmax(-1), self.promises)]  # pyright: ignore


@pytest.mark.parametrize(
    ("promises", "holds"), [({"rows"}, True), ({"columns"}, False), ({"orthogonal"}, False)]
)
def test_somebody_elses_promise_is_held_to(promises: set[str], holds: bool) -> None:
    def factory(depth: int) -> ResidualStack:
        return ResidualStack(
            [Theirs(promises) for _ in range(depth)],
            width=16,
            expand=lambda x: x[:, :, None].expand(-1, -1, 2, -1),
            collapse=lambda stream: stream.mean(2),
        )

    outcome = sums_of(factory)
    assert isinstance(outcome, Passed) == holds
    if not holds:
        assert outcome.details["promises"] == sorted(promises)
