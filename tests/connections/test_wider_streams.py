"""Schemes with several streams against their papers' formulas, written out stream by stream in fp64."""

from __future__ import annotations

import copy

import pytest
import torch
from reference_stack import make_stack, randomize
from torch import Tensor, nn

from mainstem.connections import Connection, HyperConnections, NormConfig, Scheme, make_scheme
from mainstem.errors import ConfigError

WIDTH, STREAMS, EPS = 8, 3, 1e-6


def rms(x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    return x / (x.square().mean() + EPS).sqrt() * gain


def one_connection(scheme: Scheme, *, index: int = 4, width: int = WIDTH) -> Connection:
    """A connection in the middle of a stack, every parameter moved away from its start."""
    torch.manual_seed(0)
    connection = scheme.build_connection(index=index, width=width, num_sublayers=8, norm=NormConfig(eps=EPS))
    randomize(connection.double())
    return connection


def some_streams(num_streams: int = STREAMS, width: int = WIDTH) -> Tensor:
    return torch.randn(2, 5, num_streams, width, dtype=torch.float64)


def check_token_by_token(connection: Connection, stream: Tensor, derive) -> None:
    """Compare with ``derive``, which takes a token's streams and a branch and returns its new streams."""
    torch.manual_seed(1)
    branch = nn.Linear(stream.shape[-1], stream.shape[-1]).double()
    new = connection(stream, branch)
    assert isinstance(new, Tensor)
    expected = torch.stack([torch.stack([derive(token, branch) for token in row]) for row in stream])
    # fp64: sums of a few dozen terms; 1e-12 is some thousand roundings.
    torch.testing.assert_close(new, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dynamic", [True, False])
@torch.no_grad()
def test_hyper_connections_are_the_papers(dynamic: bool) -> None:
    connection = one_connection(HyperConnections(num_streams=STREAMS, dynamic=dynamic))
    p = dict(connection.named_parameters())

    def derive(streams: Tensor, branch: nn.Module) -> Tensor:
        mix, write = p["static_mix"].clone(), p["static_write"].clone()
        if dynamic:
            for i in range(STREAMS):
                normed = rms(streams[i], p["stream_norm.weight"])
                for j in range(STREAMS + 1):
                    mix[i, j] += p["mix_scale"] * torch.tanh(normed @ p["dynamic_mix"][j])
                write[i] += p["write_scale"] * torch.tanh(normed @ p["dynamic_write"][0])
        read = torch.stack([mix[i, 0] * streams[i] for i in range(STREAMS)]).sum(0)
        update = branch(rms(read, p["norm.weight"]))
        return torch.stack(
            [
                sum((mix[i, 1 + j] * streams[i] for i in range(STREAMS)), write[j] * update)
                for j in range(STREAMS)
            ]
        )

    check_token_by_token(connection, some_streams(), derive)


@torch.no_grad()
def test_hyper_connections_start_reads_one_stream_in_turn_and_copies_the_rest() -> None:
    trunk = HyperConnections(num_streams=STREAMS).build(width=WIDTH, num_sublayers=7)
    for index, connection in enumerate(trunk.connections):
        assert isinstance(connection, Connection)
        mix = connection.get_parameter("static_mix")
        assert torch.equal(mix[:, 1:], torch.eye(STREAMS))
        assert mix[:, 0].tolist() == [float(i == index % STREAMS) for i in range(STREAMS)]


def multi_stream(**options: object) -> list[Scheme]:
    return [HyperConnections(**options)]  # pyright: ignore


@pytest.mark.parametrize("collapse", ["sum", "mean", "head"])
@pytest.mark.parametrize("scheme", multi_stream(), ids=lambda s: s.name)
@torch.no_grad()
def test_copies_in_and_a_sum_a_mean_or_a_head_out(scheme: Scheme, collapse: str) -> None:
    trunk = make_scheme(scheme.name, collapse=collapse).build(width=WIDTH, num_sublayers=1).double()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    stream = trunk.expand(x)
    assert isinstance(stream, Tensor)
    assert all(torch.equal(stream[:, :, i], x) for i in range(stream.shape[2]))
    stream = some_streams(stream.shape[2])
    expected = {"sum": stream.sum(2), "mean": stream.mean(2), "head": stream.mean(2)}[collapse]
    # The head's bias, log(1/3), is an fp32 number.
    close = 1e-7 if collapse == "head" else 1e-12
    torch.testing.assert_close(trunk.collapse(stream), expected, rtol=close, atol=close)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: HyperConnections(num_streams=0), r"num_streams=0; give at least 1"),
        (lambda: HyperConnections(collapse="max"), r"collapse 'max' is not known"),
        (lambda: HyperConnections(exact_start=True, collapse="sum"), r"choose 'mean' or 'head'"),
    ],
)
def test_mistakes_are_named(mistake, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mistake()


@pytest.mark.parametrize("scheme", multi_stream(), ids=lambda s: s.name)
@torch.no_grad()
def test_a_bf16_stream_is_mixed_with_fp32_coefficients(scheme: Scheme) -> None:
    """The error against fp64 is that of one rounding of the result, not of coefficients in bf16."""
    stack = make_stack(scheme, NormConfig(), num_sublayers=1)
    randomize(stack.trunk)
    connection = stack.bfloat16().trunk.connections[0]
    assert isinstance(connection, Connection)
    n = scheme.num_streams  # pyright: ignore
    stream = torch.randn(2, 5, n, 64).bfloat16()
    update = torch.randn(2, 5, 64).bfloat16()
    exact = copy.deepcopy(connection).double()
    _, context = exact.read(stream.double())
    expected = exact.write(stream.double(), update.double(), context)
    _, context = connection.read(stream)
    new = connection.write(stream, update, context)
    assert isinstance(new, Tensor)
    assert isinstance(expected, Tensor)
    assert new.dtype == torch.bfloat16
    carried_and_spread = 3 * 2**-9  # three roundings: what is carried, what is written, their sum
    size = expected.abs().amax()
    assert (new.double() - expected).abs().max() <= carried_and_spread * size
