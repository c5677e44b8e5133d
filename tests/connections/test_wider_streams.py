"""Schemes with several streams against their papers' formulas, written out stream by stream in fp64."""

from __future__ import annotations

import copy

import pytest
import torch
from reference_stack import make_stack, randomize
from torch import Tensor, nn

from mainstem.connections import Connection, HyperConnections, NormConfig, Scheme, make_scheme
from mainstem.errors import ConfigError
from mainstem.tower import Tower, TowerConfig

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
                    mix[i, j] += p["mix_scale"][0] * torch.tanh(normed @ p["dynamic_mix"][j])
                write[i] += p["write_scale"][0] * torch.tanh(normed @ p["dynamic_write"][0])
        read = torch.stack([mix[i, 0] * streams[i] for i in range(STREAMS)]).sum(0)
        update = branch(rms(read, p["norm.weight"]))
        return torch.stack(
            [
                sum((mix[i, 1 + j] * streams[i] for i in range(STREAMS)), write[j] * update)
                for j in range(STREAMS)
            ]
        )

    check_token_by_token(connection, some_streams(), derive)


def sigmoid_gates(connection: Connection, streams: Tensor) -> Tensor:
    """``z`` of arXiv 2512.24880, eq. 7, for one token."""
    p = dict(connection.named_parameters())
    flat = rms(streams.flatten())
    n = len(streams)
    scales = torch.cat([p["gates.scale"][i].expand(n) for i in range(2)])
    if len(p["gates.scale"]) == 3:
        scales = torch.cat([scales, p["gates.scale"][2].expand(len(p["gates.bias"]) - 2 * n)])
    return scales * (p["gates.projection"] @ flat) + p["gates.bias"]


@pytest.mark.parametrize("orientation", ["out_in", "in_out"])
@pytest.mark.parametrize(("multiplier", "read_epsilon"), [(2.0, 0.0), (1.0, 1e-3)])
@torch.no_grad()
def test_mhc_is_the_papers(orientation: str, multiplier: float, read_epsilon: float) -> None:
    options = {"orientation": orientation, "multiplier": multiplier, "read_epsilon": read_epsilon}
    connection = one_connection(make_scheme("mhc", num_streams=STREAMS, **options))
    p = dict(connection.named_parameters())

    def derive(streams: Tensor, branch: nn.Module) -> Tensor:
        z = sigmoid_gates(connection, streams)
        read, write = torch.sigmoid(z[:STREAMS]) + read_epsilon, multiplier * torch.sigmoid(z[STREAMS:6])
        mix = z[6:].reshape(STREAMS, STREAMS).exp()
        for _ in range(20):
            mix = mix / mix.sum(0, keepdim=True)
            mix = mix / mix.sum(1, keepdim=True)
        if orientation == "in_out":
            mix = mix.T
        update = branch(rms(sum(read[i] * streams[i] for i in range(STREAMS)), p["norm.weight"]))  # pyright: ignore
        return torch.stack([mix[o] @ streams + write[o] * update for o in range(STREAMS)])

    check_token_by_token(connection, some_streams(), derive)


@pytest.mark.parametrize("name", ["identity_hc", "independent_hc"])
@torch.no_grad()
def test_streams_without_a_mix_are_the_formula(name: str) -> None:
    connection = one_connection(make_scheme(name, num_streams=STREAMS))
    p = dict(connection.named_parameters())
    epsilon = 1e-6 if name == "independent_hc" else 0.0

    def derive(streams: Tensor, branch: nn.Module) -> Tensor:
        z = torch.sigmoid(sigmoid_gates(connection, streams))
        read, write = z[:STREAMS] + epsilon, 2 * z[STREAMS:] + epsilon
        update = branch(rms(read @ streams, p["norm.weight"]))
        return torch.stack([streams[i] + write[i] * update for i in range(STREAMS)])

    check_token_by_token(connection, some_streams(), derive)


@pytest.mark.parametrize("dynamic", [True, False])
@torch.no_grad()
def test_frac_connections_are_the_formula(dynamic: bool) -> None:
    m, size = 4, WIDTH // 4
    connection = one_connection(make_scheme("frac_connections", num_fractions=m, dynamic=dynamic))
    p = dict(connection.named_parameters())

    def derive(x: Tensor, branch: nn.Module) -> Tensor:
        parts = [x[i * size : (i + 1) * size] for i in range(m)]
        mix, write = p["static_mix"].clone(), p["static_write"].clone()
        if dynamic:
            for i in range(m):
                for j in range(2 * m):
                    mix[i, j] += p["mix_scale"][0] * torch.tanh(rms(parts[i]) @ p["dynamic_mix"][j])
                write[i] += p["write_scale"][0] * torch.tanh(rms(parts[i]) @ p["dynamic_write"][0])
        read = torch.cat([torch.stack([mix[i, j] * parts[i] for i in range(m)]).sum(0) for j in range(m)])
        update = branch(rms(read, p["norm.weight"]))
        carried = [torch.stack([mix[i, m + j] * parts[i] for i in range(m)]).sum(0) for j in range(m)]
        return torch.cat([carried[j] + write[j] * update[j * size : (j + 1) * size] for j in range(m)])

    check_token_by_token(connection, torch.randn(2, 5, WIDTH, dtype=torch.float64), derive)


@torch.no_grad()
def test_gated_streams_are_the_formula() -> None:
    connection = one_connection(make_scheme("gated_streams", num_streams=STREAMS, rank=5))
    p = dict(connection.named_parameters())

    def derive(streams: Tensor, branch: nn.Module) -> Tensor:
        gains = p["gate.gain"].reshape(STREAMS, WIDTH)
        normed = torch.stack([rms(streams[i], gains[i]) for i in range(STREAMS)])
        hidden = p["gate.down"] @ normed.flatten() / STREAMS
        gate = torch.sigmoid(p["gate.up"] @ (hidden * torch.sigmoid(hidden))).reshape(STREAMS, WIDTH)
        update = branch(torch.stack([gate[i] * normed[i] for i in range(STREAMS)]).sum(0) / STREAMS)
        write = 2 * torch.sigmoid(p["inject"] @ normed.flatten() / STREAMS)
        return torch.stack([streams[i] + write[i] * update for i in range(STREAMS)])

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
    names = ("hyper_connections", "mhc", "identity_hc", "independent_hc")
    return [make_scheme(name, **options) for name in names]


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
    # The published head of HY-V4 weighs by the token a little; the others' bias, -log(n - 1), is fp32.
    close = 1e-7 if collapse == "head" else 1e-12
    close = 0.05 if collapse == "head" and scheme.name == "independent_hc" else close
    torch.testing.assert_close(trunk.collapse(stream), expected, rtol=close, atol=close)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: HyperConnections(num_streams=0), r"num_streams=0; give at least 1"),
        (lambda: HyperConnections(collapse="max"), r"collapse 'max' is not known"),
        (lambda: HyperConnections(exact_start=True, collapse="sum"), r"choose 'mean' or 'head'"),
        (lambda: make_scheme("identity_hc", exact_start=True, num_streams=1), r"at least 2 streams"),
        (lambda: make_scheme("frac_connections", num_fractions=0), r"num_fractions=0; give at least 1"),
        (lambda: make_scheme("frac_connections").build(width=6, num_sublayers=1), r"cannot divide width 6"),
        (lambda: make_scheme("gated_streams", rank=-1), r"rank=-1 must be at least 1"),
        (lambda: make_scheme("gated_streams", collapse="sum"), r"leave out collapse='sum'"),
        (lambda: make_scheme("gated_streams", exact_start=True, num_streams=3), r"num_streams=3 is odd"),
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
    three_roundings = 3 * 2**-9  # of what is carried, of what is written, of their sum
    size = expected.abs().amax() + update.abs().amax().double()
    assert (new.double() - expected).abs().max() <= three_roundings * size


@pytest.mark.parametrize(("name", "inside"), [("independent_hc", "head"), ("gated_streams", "gate")])
@torch.no_grad()
def test_a_tower_draws_its_way_out_again(name: str, inside: str) -> None:
    """As a loader asks it to, of what a checkpoint does not hold."""
    tower = Tower(TowerConfig(vocab_size=8, width=16, num_blocks=1, num_heads=2, connection=name))
    way_out = tower.get_submodule(f"trunk.{inside}")
    before = {key: value.clone() for key, value in way_out.named_parameters()}
    for parameter in way_out.parameters():
        parameter.fill_(torch.nan)
    tower.reset_module(f"trunk.{inside}")
    for key, value in way_out.named_parameters():
        if value.ndim < 2:
            assert torch.equal(value, before[key])
        else:
            assert abs(value.std() / before[key].std() - 1) < 0.5
