"""Wider streams against other packages' modules: same weights, same values, same gradients."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mainstem.connections import Connection, NormConfig, make_scheme
from mainstem.connections.gated_streams import from_qwen4_exp
from mainstem.connections.mhc import CONVENTIONS, from_deepseek_v4

WIDTH, STREAMS, EPS = 16, 4, 1e-6
# Imports of other packages warn; they are not what is judged here.
pytestmark = pytest.mark.filterwarnings("ignore")


def other_package(name: str) -> ModuleType:
    return pytest.importorskip(
        name, reason="needs hyper-connections and x-transformers; `make test-oracle` installs them"
    )


def config() -> SimpleNamespace:
    return SimpleNamespace(
        hc_mult=STREAMS,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        hc_magnitude=2.0,
        hidden_size=WIDTH,
        rms_norm_eps=EPS,
        hc_count=STREAMS,
        hc_lowrank=6,
    )


def draw(module: nn.Module, std: float = 0.5) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)


def make_ours(name: str, dtype: torch.dtype = torch.float32, eps: float = EPS, **options) -> Connection:
    norm = NormConfig(eps=eps)
    scheme = make_scheme(name, num_streams=STREAMS, **options)
    return scheme.build_connection(index=1, width=WIDTH, num_sublayers=8, norm=norm).to(dtype)


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Module, Tensor]:
    """A stream, a branch, and weights that make a loss of the new stream."""
    torch.manual_seed(0)
    stream = torch.randn(2, 5, STREAMS, WIDTH, dtype=dtype, requires_grad=True)
    branch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(dtype)
    return stream, branch, torch.randn(2, 5, STREAMS, WIDTH, dtype=dtype)


def gradients(new: Tensor, weights: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad((new * weights).sum(), wanted))


def check(ours: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]], **close: float) -> None:
    torch.testing.assert_close(ours[0], theirs[0], **close)
    for a, b in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(a, b.reshape(a.shape), **close)


def test_mhc_is_deepseek_v4s() -> None:
    modeling = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    oracle = modeling.DeepseekV4HyperConnection(config())
    draw(oracle)
    ours = make_ours("mhc", **CONVENTIONS["deepseek_v4"])
    ours.load_state_dict({**from_deepseek_v4(oracle.state_dict()), "norm.weight": torch.ones(WIDTH)})
    stream, branch, weights = data()

    post, comb, collapsed = oracle(stream)
    update = branch(F.rms_norm(collapsed, (WIDTH,), eps=EPS))
    # What DeepseekV4DecoderLayer.forward does with the three.
    expected = post.unsqueeze(-1) * update.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), stream)
    theirs = expected, gradients(expected, weights, [stream, oracle.fn, oracle.base, oracle.scale])
    new = ours(stream, branch)
    assert isinstance(new, Tensor)
    names = ["gates.projection", "gates.bias", "gates.scale"]
    mine = new, gradients(new, weights, [stream, *(ours.get_parameter(name) for name in names)])
    check(mine, theirs)


@pytest.mark.parametrize("model", ["deepseek_v4", "hy_v4"])
def test_the_learned_sum_is_theirs(model: str) -> None:
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    oracle = {"deepseek_v4": "DeepseekV4HyperHead", "hy_v4": "HYV4HyperHead"}[model]
    oracle = getattr(modeling, oracle)(config())
    draw(oracle)
    if model == "deepseek_v4":
        scheme = make_scheme("mhc", **CONVENTIONS["deepseek_v4"])
    else:
        scheme = make_scheme("independent_hc")
    trunk = scheme.build(width=WIDTH, num_sublayers=1, norm=NormConfig(eps=EPS))
    trunk.load_state_dict(from_deepseek_v4(oracle.state_dict()), strict=False)
    stream, _, weights = data()
    expected = oracle(stream)
    theirs = expected, gradients(expected, weights[:, :, 0], [stream, *oracle.parameters()])
    out = trunk.collapse(stream)
    names = ["head.projection", "head.bias", "head.scale"]
    mine = out, gradients(out, weights[:, :, 0], [stream, *(trunk.get_parameter(name) for name in names)])
    check(mine, theirs)


def test_independent_hc_is_hy_v4s() -> None:
    modeling = importlib.import_module("transformers.models.hy_v4.modeling_hy_v4")
    oracle = modeling.HYV4HyperConnection(config())
    draw(oracle)
    ours = make_ours("independent_hc")
    ours.load_state_dict({**from_deepseek_v4(oracle.state_dict()), "norm.weight": torch.ones(WIDTH)})
    stream, branch, weights = data()
    post, collapsed = oracle(stream)
    update = branch(F.rms_norm(collapsed, (WIDTH,), eps=EPS))
    expected = post.unsqueeze(-1) * update.unsqueeze(-2) + stream
    theirs = expected, gradients(expected, weights, [stream, oracle.fn, oracle.base, oracle.scale])
    new = ours(stream, branch)
    assert isinstance(new, Tensor)
    names = ["gates.projection", "gates.bias", "gates.scale"]
    mine = new, gradients(new, weights, [stream, *(ours.get_parameter(name) for name in names)])
    check(mine, theirs)


def test_gated_streams_are_qwen4_exps() -> None:
    modeling = importlib.import_module("transformers.models.qwen4_exp.modeling_qwen4_exp")
    oracle = modeling.Qwen4ExpTextGatedResidual(config())
    draw(oracle)
    ours = make_ours("gated_streams", rank=6)
    ours.load_state_dict(from_qwen4_exp(oracle.state_dict()))
    stream, branch, weights = data()
    read, _, injection = oracle(stream.flatten(-2))
    expected = stream + branch(read).unsqueeze(-2) * injection.unsqueeze(-1)
    names = ["hc_norm", "input_mix_weight_down", "input_mix_weight_up", "block_inject_weight"]
    wanted = [stream, *(oracle.get_parameter(f"{name}.weight") for name in names)]
    theirs = expected, gradients(expected, weights, wanted)
    new = ours(stream, branch)
    assert isinstance(new, Tensor)
    names = ["gate.gain", "gate.down", "gate.up", "inject"]
    mine = new, gradients(new, weights, [stream, *(ours.get_parameter(name) for name in names)])
    check(mine, theirs)


def test_the_last_gate_is_qwen4_exps() -> None:
    modeling = importlib.import_module("transformers.models.qwen4_exp.modeling_qwen4_exp")
    oracle = modeling.Qwen4ExpTextGatedResidual(config(), use_combine=False)
    draw(oracle)
    scheme = make_scheme("gated_streams", num_streams=STREAMS, rank=6)
    trunk = scheme.build(width=WIDTH, num_sublayers=1, norm=NormConfig(eps=EPS))
    trunk.load_state_dict(from_qwen4_exp(oracle.state_dict()), strict=False)
    stream, _, _ = data()
    torch.testing.assert_close(trunk.final_norm(trunk.collapse(stream)), oracle(stream.flatten(-2)))


def hyper_state(oracle: nn.Module, norm_weight: Tensor) -> dict[str, Tensor]:
    return {
        "norm.weight": torch.ones(WIDTH, dtype=torch.float64),
        "stream_norm.weight": norm_weight.detach(),
        "static_mix": oracle.static_alpha.detach(),
        "static_write": oracle.static_beta.detach(),
        "dynamic_mix": oracle.dynamic_alpha_fn.detach().T,
        "dynamic_write": oracle.dynamic_beta_fn.detach()[None],
        "mix_scale": oracle.dynamic_alpha_scale.detach(),
        "write_scale": oracle.dynamic_beta_scale.detach(),
    }


def hyper_gradients(new: Tensor, weights: Tensor, stream: Tensor, ours: Connection) -> list[Tensor]:
    names = ["static_mix", "static_write", "dynamic_mix", "dynamic_write", "mix_scale", "write_scale"]
    found = gradients(new, weights, [stream, *(ours.get_parameter(name) for name in names)])
    found[3] = found[3].T  # their dynamic matrix has the width first
    return found


def oracle_parameters(oracle: nn.Module) -> list[Tensor]:
    names = ("static_alpha", "static_beta", "dynamic_alpha_fn", "dynamic_beta_fn")
    scales = ("dynamic_alpha_scale", "dynamic_beta_scale")
    return [getattr(oracle, name) for name in (*names, *scales)]


def in_batch(stream: Tensor) -> Tensor:
    """``[batch, pos, n, width]`` -> ``[(batch n), pos, width]``, where both packages keep their streams."""
    return stream.transpose(1, 2).flatten(0, 1)


def out_of_batch(stream: Tensor) -> Tensor:
    return stream.unflatten(0, (-1, STREAMS)).transpose(1, 2)


@pytest.mark.oracle
def test_hyper_connections_are_lucidrains() -> None:
    package = other_package("hyper_connections.hyper_connections")
    oracle = package.HyperConnections(STREAMS, dim=WIDTH, layer_index=1).double()
    draw(oracle)
    # Theirs divides by the length alone, without an epsilon.
    ours = make_ours("hyper_connections", torch.float64, eps=1e-30)
    ours.load_state_dict(hyper_state(oracle, oracle.norm.gamma + 1))
    stream, branch, weights = data(torch.float64)
    read, add = oracle(in_batch(stream))
    expected = out_of_batch(add(branch(F.rms_norm(read, (WIDTH,), eps=1e-30))))
    theirs = expected, gradients(expected, weights, [stream, *oracle_parameters(oracle)])
    new = ours(stream, branch)
    assert isinstance(new, Tensor)
    check((new, hyper_gradients(new, weights, stream, ours)), theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.oracle
def test_hyper_connections_are_x_transformers_2_12_2s() -> None:
    """Of releases 2.14.0 to 2.31.10 the mix is a constant matrix of ones; 2.12.2 is the paper's."""
    package = other_package("x_transformers.x_transformers")
    oracle = package.HyperConnection(WIDTH, layer_index=1, num_residual_streams=STREAMS).double()
    draw(oracle)
    norm = NormConfig(kind="layer", eps=oracle.norm.eps, bias=False)
    scheme = make_scheme("hyper_connections", num_streams=STREAMS)
    ours = scheme.build_connection(index=1, width=WIDTH, num_sublayers=8, norm=norm).double()
    ours.load_state_dict(hyper_state(oracle, oracle.norm.weight))
    stream, branch, weights = data(torch.float64)
    read, rest, context = oracle.prepare(in_batch(stream))
    update = branch(F.layer_norm(read, (WIDTH,), eps=oracle.norm.eps))
    expected = out_of_batch(oracle(update, rest, **context))
    theirs = expected, gradients(expected, weights, [stream, *oracle_parameters(oracle)])
    new = ours(stream, branch)
    assert isinstance(new, Tensor)
    check((new, hyper_gradients(new, weights, stream, ours)), theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.oracle
def test_mhcs_static_part_is_lucidrains() -> None:
    """``hyper-connections`` 0.4.11 departs from the paper in the dynamic part, so only the static one agrees.

    Its norm and its projections see one stream at a time, where eq. 7 takes the norm and the projection of
    all streams at once; the dynamic part is tested against a derivation in tests/connections. It mixes
    ``in_out`` and divides columns first.
    """
    package = other_package("hyper_connections.mHCv2")
    oracle = package.mHC(STREAMS, dim=WIDTH, layer_index=1)
    draw(oracle)
    with torch.no_grad():
        oracle.dynamic_alpha_fn.zero_()
        oracle.dynamic_beta_fn.zero_()
    ours = make_ours("mhc", orientation="in_out")
    alpha, beta = oracle.static_alpha.detach(), oracle.static_beta.detach()
    bias = torch.cat([alpha[:, 0], beta.flatten(), alpha[:, 1:].flatten()])
    with torch.no_grad():
        ours.get_parameter("gates.projection").zero_()
        ours.get_parameter("gates.bias").copy_(bias)
    stream, branch, weights = data()
    read, add = oracle(stream)
    expected = add(branch(F.rms_norm(read, (WIDTH,), eps=EPS)))
    on_stream, on_alpha, on_beta = gradients(
        expected, weights, [stream, oracle.static_alpha, oracle.static_beta]
    )
    on_bias = torch.cat([on_alpha[:, 0], on_beta.flatten(), on_alpha[:, 1:].flatten()])
    new = ours(stream, branch)
    assert isinstance(new, Tensor)
    mine = gradients(new, weights, [stream, ours.get_parameter("gates.bias")])
    check((new, mine), (expected, [on_stream, on_bias]))
