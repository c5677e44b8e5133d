"""Single modules of transformers, in fp32 where that is what they compute in, with the layouts converted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import Row, Run
from around import WIDTH, build, copy_weights, draw, fp64, joins_of, side, some
from reference_stack import make_stack, randomize
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4
from transformers.models.dinov2 import modeling_dinov2 as dinov2
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextLaurelBlock
from transformers.models.hy_v4 import modeling_hy_v4 as hy_v4
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp
from transformers.models.reformer.configuration_reformer import ReformerConfig
from transformers.models.reformer.modeling_reformer import ReformerLayer

from mainstem.connections import Connection, LaurelConnection, NormConfig, Reversible, Trunk, make_scheme
from mainstem.connections.gated_streams import from_qwen4_exp
from mainstem.connections.mhc import CONVENTIONS, from_deepseek_v4

STREAMS, EPS = 4, 1e-6
CONFIG: Any = SimpleNamespace(
    hc_mult=STREAMS,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    hc_magnitude=2.0,
    hidden_size=WIDTH,
    rms_norm_eps=EPS,
    hc_count=STREAMS,
    hc_lowrank=6,
)
GATES = {"fn": "gates.projection", "base": "gates.bias", "scale": "gates.scale"}
HEAD = {"hc_fn": "head.projection", "hc_base": "head.bias", "hc_scale": "head.scale"}
HY_V4_DEPARTS = {"independent_hc": "no paper", "identity_hc": "has epsilons beside its sigmoids; 0 here"}
GATE = {
    "hc_norm.weight": "gate.gain",
    "input_mix_weight_down.weight": "gate.down",
    "input_mix_weight_up.weight": "gate.up",
}
INJECT = GATE | {"block_inject_weight.weight": "inject"}


def theirs_of(kind: Any, **options: Any) -> Any:
    module = kind(CONFIG, **options)
    draw(module)
    return module


def trunk_of(name: str, **options: Any) -> Trunk:
    return make_scheme(name, **options).build(width=WIDTH, num_sublayers=2, norm=NormConfig(eps=EPS))


def data() -> tuple[Tensor, nn.Module]:
    """A stream and a branch."""
    torch.manual_seed(0)
    stream = torch.randn(2, 5, STREAMS, WIDTH, requires_grad=True)
    return stream, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def own(module: nn.Module, names: dict[str, str]) -> dict[str, Tensor]:
    return {theirs: module.get_parameter(ours) for theirs, ours in names.items()}


def both(
    join: Connection, names: dict[str, str], theirs: nn.Module, step: Callable[[Tensor, nn.Module], Tensor]
) -> tuple[Run, Run]:
    stream, branch = data()
    shared = dict(branch.named_parameters())
    new = join(stream, branch)
    assert isinstance(new, Tensor)
    ours = side(new, stream, **own(join, names), **shared)
    return ours, side(step(stream, branch), stream, **dict(theirs.named_parameters()), **shared)


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), eps=EPS)


def test_deepseek_v4_hyper_connection(agree: Callable[..., None]) -> None:
    theirs = theirs_of(deepseek_v4.DeepseekV4HyperConnection)
    join = joins_of(trunk_of("mhc", num_streams=STREAMS, **CONVENTIONS["deepseek_v4"]))[1]
    join.load_state_dict({**from_deepseek_v4(theirs.state_dict()), "norm.weight": torch.ones(WIDTH)})

    def step(stream: Tensor, branch: nn.Module) -> Tensor:
        post, comb, collapsed = theirs(stream)
        update = branch(normed(collapsed))
        # What DeepseekV4DecoderLayer.forward does with the three.
        return post.unsqueeze(-1) * update.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), stream)

    row = Row("mhc", "transformers", "DeepseekV4HyperConnection", "one step, every weight")
    agree(row, *both(join, GATES, theirs, step))


@pytest.mark.parametrize("name", ["independent_hc", "identity_hc"])
def test_hy_v4_hyper_connection(name: str, agree: Callable[..., None]) -> None:
    """Without its epsilons it is the identity hyper-connection."""
    theirs = theirs_of(hy_v4.HYV4HyperConnection)
    if name == "identity_hc":
        theirs.hc_eps = 0.0
    join = joins_of(trunk_of(name, num_streams=STREAMS))[1]
    join.load_state_dict({**from_deepseek_v4(theirs.state_dict()), "norm.weight": torch.ones(WIDTH)})

    def step(stream: Tensor, branch: nn.Module) -> Tensor:
        post, collapsed = theirs(stream)
        return post.unsqueeze(-1) * branch(normed(collapsed)).unsqueeze(-2) + stream

    row = Row(name, "transformers", "HYV4HyperConnection", "one step, every weight", HY_V4_DEPARTS[name])
    agree(row, *both(join, GATES, theirs, step))


def test_qwen4_exp_gated_residual(agree: Callable[..., None]) -> None:
    theirs = theirs_of(qwen4_exp.Qwen4ExpTextGatedResidual)
    join = joins_of(trunk_of("gated_streams", num_streams=STREAMS, rank=6))[1]
    join.load_state_dict(from_qwen4_exp(theirs.state_dict()))

    def step(stream: Tensor, branch: nn.Module) -> Tensor:
        read, _, injection = theirs(stream.flatten(-2))
        return stream + branch(read).unsqueeze(-2) * injection.unsqueeze(-1)

    row = Row(
        "gated_streams", "transformers", "Qwen4ExpTextGatedResidual", "one step, every weight", "no paper"
    )
    agree(row, *both(join, INJECT, theirs, step))


@pytest.mark.parametrize("name", ["DeepseekV4HyperHead", "HYV4HyperHead", "Qwen4ExpTextGatedResidual"])
def test_the_way_out(name: str, agree: Callable[..., None]) -> None:
    if name == "DeepseekV4HyperHead":
        theirs = theirs_of(deepseek_v4.DeepseekV4HyperHead)
        trunk = trunk_of("mhc", num_streams=STREAMS, **CONVENTIONS["deepseek_v4"])
    elif name == "HYV4HyperHead":
        theirs = theirs_of(hy_v4.HYV4HyperHead)
        trunk = trunk_of("independent_hc", num_streams=STREAMS)
    else:
        theirs = theirs_of(qwen4_exp.Qwen4ExpTextGatedResidual, use_combine=False)
        trunk = trunk_of("gated_streams", num_streams=STREAMS, rank=6)
    gated = "hc_norm.weight" in theirs.state_dict()
    convert, names = (from_qwen4_exp, GATE) if gated else (from_deepseek_v4, HEAD)
    assert not trunk.load_state_dict(convert(theirs.state_dict()), strict=False).unexpected_keys
    stream, _ = data()
    ours = side(trunk.collapse(stream), stream, **own(trunk, names))
    expected = theirs(stream.flatten(-2)) if gated else theirs(stream)
    scheme = {"DeepseekV4HyperHead": "mhc", "HYV4HyperHead": "independent_hc"}.get(name, "gated_streams")
    row = Row(scheme, "transformers", name, "the way out of the streams, every weight")
    agree(row, ours, side(expected, stream, **dict(theirs.named_parameters())))


@pytest.mark.parametrize("with_norm", [False, True])
def test_gemma3n_laurel_block(with_norm: bool, agree: Callable[..., None]) -> None:
    """Gemma 3n norms the low-rank term, which the paper does not.

    Without that norm it is LAuReL-LR. With it, it is the paper's low-rank term under an RMS norm, which is
    written out here around ours. (Its layer then adds the attention's output and divides by sqrt(2), inside
    an AltUp of four streams; that is not LAuReL and not compared.)
    """
    rank = 5
    with fp64():
        theirs = Gemma3nTextLaurelBlock(Gemma3nTextConfig(hidden_size=WIDTH, laurel_rank=rank))
        ours = LaurelConnection(nn.Identity(), "lr", width=WIDTH, rank=rank, num_past=0, keep=0)
    draw(theirs)
    assert ours.down is not None
    assert ours.up is not None
    left, right = theirs.linear_left.weight, theirs.linear_right.weight
    copy_weights({"left": (left.detach(), ours.down), "right": (right.detach(), ours.up)})
    x, u = some(2, 5, WIDTH).requires_grad_(), some(2, 5, WIDTH, seed=3).requires_grad_()
    gain = theirs.post_laurel_norm.weight
    found: Any = ours.write(x, u, None)
    mine, other = {"left": ours.down, "right": ours.up}, {"left": left, "right": right}
    if with_norm:
        low_rank = found - x - u
        size = (low_rank.square().mean(-1, keepdim=True) + theirs.config.rms_norm_eps).sqrt()
        found = x + u + low_rank / size * gain
        mine, other = mine | {"gain": gain}, other | {"gain": gain}
    else:
        theirs.post_laurel_norm = nn.Identity()
    from families import AllInFloat64

    with AllInFloat64():
        expected = theirs(x) + u
    inputs = {"input": x, "update": u}
    departs = "norms the low-rank term, which the paper does not: " + (
        "written out around ours" if with_norm else "left out here"
    )
    row = Row("laurel", "transformers", "Gemma3nTextLaurelBlock", "one step, every weight", departs)
    agree(row, side(found, inputs, **mine), side(expected, inputs, **other))


def test_dinov2_layer_scale(agree: Callable[..., None]) -> None:
    with fp64():
        theirs = dinov2.Dinov2LayerScale(dinov2.Dinov2Config(hidden_size=WIDTH))
    draw(theirs)
    join = joins_of(build(make_scheme("layer_scale"), 1, NormConfig()))[0]
    copy_weights({"scale": (theirs.lambda1.detach(), join.get_parameter("write_weight"))})
    x, u = some(2, 5, WIDTH).requires_grad_(), some(2, 5, WIDTH, seed=3).requires_grad_()
    new: Any = join.write(x, u, None)
    inputs = {"input": x, "update": u}
    ours = side(new, inputs, scale=join.get_parameter("write_weight"))
    row = Row("layer_scale", "transformers", "Dinov2LayerScale", "one step, every weight")
    agree(row, ours, side(x + theirs(u), inputs, scale=theirs.lambda1))


def test_dinov2_drop_path(agree: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs keeps where ``u >= drop``, ours where ``u < survival = 1 - drop``: ours is given ``1 - u``."""
    with fp64():
        theirs = dinov2.Dinov2DropPath(0.25).train()
        trunk = make_scheme("stochastic_depth", final_survival=0.75).build(width=WIDTH, num_sublayers=1)
    join = joins_of(trunk.train())[0]
    drawn = torch.rand(8, 1, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    x, u = some(8, 5, WIDTH).requires_grad_(), some(8, 5, WIDTH, seed=3).requires_grad_()
    monkeypatch.setattr(torch, "rand", lambda *_, **__: 1.0 - drawn)
    _, context = join.read(x)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: drawn)
    expected = x + theirs(u)
    dropped = (expected == x).flatten(1).all(1)
    assert 0 < dropped.sum() < 8
    new: Any = join.write(x, u, context)
    inputs = {"input": x, "update": u}
    row = Row("stochastic_depth", "transformers", "Dinov2DropPath", "one step in training, the same draws")
    agree(row, side(new, inputs), side(expected, inputs))


class Attended(nn.Module):
    """A branch in the place of Reformer's attention, with the fields that its layer asks for."""

    def __init__(self, branch: nn.Module):
        super().__init__()
        self.branch = branch

    def forward(self, hidden_states: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(hidden_states=self.branch(hidden_states), attention_probs=None, buckets=None)


def test_reformer_layers(agree: Callable[..., None]) -> None:
    """Its backward inverts a layer and differentiates it again; ours keeps the states."""
    stack = make_stack(Reversible(), NormConfig(kind="layer"), num_sublayers=6)
    randomize(stack.trunk)
    other = copy.deepcopy(stack)
    config = ReformerConfig(
        hidden_size=64, attn_layers=["local"], num_attention_heads=1, feed_forward_size=8, vocab_size=8
    )
    joins: Any = other.trunk.connections
    layers = []
    for i in range(0, 6, 2):
        layer = ReformerLayer(config).train()
        layer.attention = Attended(nn.Sequential(joins[i].norm, other.branches[i]))
        layer.feed_forward = nn.Sequential(joins[i + 1].norm, other.branches[i + 1])
        layers.append(layer)
    first, second = some(2, 7, 64).requires_grad_(), some(2, 7, 64, seed=3).requires_grad_()
    stream: Any = first, second
    for join, branch in zip(stack.trunk.connections, stack.branches, strict=True):
        stream = join(stream, branch)
    weights = {k: p for k, p in stack.named_parameters() if "final_norm" not in k}
    ours = side(list(stream), {"input": first, "input 2": second}, **weights)

    halves = first.detach(), second.detach()
    for layer in layers:
        out = layer(*halves)
        halves = out.attn_output, out.hidden_states
    generator = torch.Generator().manual_seed(7)
    slopes = [torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in halves]
    values = [v.clone() for v in halves]
    for layer in reversed(layers):
        back = layer.backward_pass(*halves, *slopes)
        halves, slopes = (
            (back.attn_output, back.hidden_states),
            [back.grad_attn_output, back.grad_hidden_states],
        )
    gradients = dict(zip(("input", "input 2"), slopes, strict=True))
    gradients |= {k: other.get_parameter(k).grad for k in weights}
    agree(
        Row("reversible", "transformers", "ReformerLayer", "three layers, every weight"),
        ours,
        Run(values, gradients),
    )
