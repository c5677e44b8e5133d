"""Whole models of transformers with our connections in the place of their own residual.

Small random models in fp64; logits and the gradient of every weight, of embeddings, branches and head too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from agreement import Row, error
from families import make_model
from small_models import base, tokens
from spliced import Family, attention, compare, feed_forward
from torch import Tensor
from zoo import CASES, REFUSED

from mainstem.connections import Connection, NormConfig, Stream, Trunk, make_scheme
from mainstem.connections.mhc import CONVENTIONS

NORM = {"input_layernorm.weight": "norm.weight"}, {"post_attention_layernorm.weight": "norm.weight"}
AROUND = (
    {"input_layernorm.weight": "norm.weight", "post_attention_layernorm.weight": "write_norm.weight"},
    {
        "pre_feedforward_layernorm.weight": "norm.weight",
        "post_feedforward_layernorm.weight": "write_norm.weight",
    },
)
HYPER = tuple(
    {f"{own}.{theirs}": f"gates.{ours}" for theirs, ours in gates} | norm
    for gates in [(("fn", "projection"), ("base", "bias"), ("scale", "scale"))]
    for own, norm in zip(("attn_hc", "ffn_hc"), NORM, strict=True)
)
HYPER_HEAD = {
    "hc_head.hc_fn": "head.projection",
    "hc_head.hc_base": "head.bias",
    "hc_head.hc_scale": "head.scale",
    "norm.weight": "final_norm.weight",
}
BRANCHES = attention, feed_forward


def gemma2() -> Any:
    return make_model("gemma2", torch.float64)


def granite() -> Any:
    config = transformers.GraniteConfig(**base(num_key_value_heads=2, residual_multiplier=0.22))
    return transformers.GraniteForCausalLM(config).eval()


def llama() -> Any:
    return make_model("llama", torch.float64)


def olmo2() -> Any:
    return make_model("olmo2", torch.float64)


def hyper_end(body: Any, trunk: Trunk) -> None:
    """The learned sum and the final norm of the trunk in the place of theirs."""
    del body.hc_head, body.norm
    body.hc_head, body.norm = trunk.collapse, trunk.final_norm


def hashed(layer: Any, read: Tensor, given: dict[str, Any]) -> Tensor:
    """DeepSeek-V4's first layers route by the token's id."""
    return layer.mlp(read, input_ids=given["input_ids"])


def deepseek_attention(layer: Any, read: Tensor, given: dict[str, Any]) -> Any:
    return layer.self_attn(read, **{k: v for k, v in given.items() if k != "input_ids"})


def glm_attention(layer: Any, read: Tensor, given: dict[str, Any]) -> Any:
    if layer.block_type == "linear_attention":
        kept = ("cache", "attention_mask")
        return layer.self_attn(hidden_states=read, **{k: given[k] for k in kept})
    return layer.self_attn(hidden_states=read, use_cache=False, **given)


def indexed(hidden: Tensor, attended: Any) -> Any:
    """What the attention has chosen to look at is handed to the next layer."""
    return hidden, attended[2] if isinstance(attended, tuple) else None


def qwen4_attention(layer: Any, read: Tensor, given: dict[str, Any]) -> Any:
    if layer.layer_type == "linear_attention":
        return layer.linear_attn(read, cache=given["cache"], attention_mask=given["conv_mask"])
    mask = given["attention_mask"]
    return layer.self_attn(read, given["position_embeddings"], attention_mask=mask, cache=given["cache"])


def side_by_side(n: int) -> dict[str, Any]:
    """Qwen4-Exp keeps its streams in one dimension."""

    def end(body: Any, trunk: Trunk) -> None:
        del body.hyper_connection_mixer
        body.hyper_connection_mixer = lambda flat: trunk.final_norm(
            trunk.collapse(flat.unflatten(-1, (n, -1)))
        )

    return {
        "enter": lambda hidden, index: hidden.unflatten(-1, (n, -1)),
        "leave": lambda stream, index: stream.flatten(-2),
        "end": end,
    }


GATE = {
    "hc_norm.weight": "gate.gain",
    "input_mix_weight_down.weight": "gate.down",
    "input_mix_weight_up.weight": "gate.up",
}
INJECT = GATE | {"block_inject_weight.weight": "inject"}


def qwen4_load(name: str, weight: Tensor) -> Tensor:
    return 1.0 + weight if name.endswith("hc_norm.weight") else weight


def widen(join: Connection, index: int) -> None:
    """What Beam's norm adds to the mean square of its stream is more in ours, which is larger."""
    norm: Any = join.get_submodule("norm")
    norm.eps = norm.eps * (index + 1)


def inkling2() -> Any:
    """All layers with one read each: a full one mixes the sources three times, for q, k and v."""
    config = REFUSED["inkling2"].build().config
    config.layer_types = ["hybrid_sliding"] * config.num_hidden_layers
    torch.manual_seed(0)
    model = transformers.Inkling2ForCausalLM(config).eval()
    for part in model.modules():
        if type(part).__name__ == "Inkling2BlockAttentionResidual":
            part.norm.eps = 1e-30
    return model


def sources(hidden: Tensor, block_states: Tensor, index: int) -> Stream:
    """The finished blocks and the unfinished one."""
    return (*block_states.unbind(-2), hidden)


def rms_of_one(stream: Stream) -> Stream:
    return tuple(v * torch.rsqrt(v.square().mean(-1, keepdim=True)) for v in stream)


def without_gain(query: Any) -> None:
    """Inkling 2's keys have no gain, and its scores are divided by the root of the width."""
    query.eps = 1e-30
    query.key_gain.requires_grad_(False).fill_(len(query.key_gain) ** -0.5)


def read_normed(join: Any, index: int) -> None:
    """Inkling 2 mixes the normed sources; the first sublayer has one and mixes none."""
    read = join.read
    if join.depth_query is not None:
        join.read = lambda stream: read(rms_of_one(stream))
        without_gain(join.depth_query)


def last_read(body: Any, trunk: Any) -> None:
    del body.final_input, body.norm
    without_gain(trunk.depth_query)
    body.final_input = lambda blocks, hidden: (trunk.collapse(rms_of_one(sources(hidden, blocks, 0))),)
    body.norm = trunk.final_norm


def conv_attention(layer: Any, read: Tensor, given: dict[str, Any]) -> Tensor:
    out, _ = layer.self_attn(hidden_states=read, **given)
    return layer.post_attention_convolution(out, cache=given["cache"], conv_mask=given["conv_mask"])


def conv_feed_forward(layer: Any, read: Tensor, given: dict[str, Any]) -> Tensor:
    out = layer.mlp(read)
    return layer.post_mlp_convolution(out, cache=given["cache"], conv_mask=given["conv_mask"])


FAMILIES: dict[str, Family] = {
    "Llama": Family(llama, make_scheme("pre_norm"), NORM, BRANCHES),
    "OLMo-2": Family(
        olmo2,
        make_scheme("reordered_norm"),
        (
            {"post_attention_layernorm.weight": "norm.weight"},
            {"post_feedforward_layernorm.weight": "norm.weight"},
        ),
        BRANCHES,
    ),
    "Gemma-2": Family(
        gemma2,
        make_scheme("sandwich_norm"),
        AROUND,
        BRANCHES,
        norm=lambda eps: NormConfig(eps=eps, unit_offset=True),
    ),
    "Granite": Family(
        granite,
        make_scheme("depth_scaled", multiplier=0.22, base_num_sublayers=8),
        NORM,
        BRANCHES,
    ),
    "Beam": Family(
        CASES["beam"].build,
        make_scheme("sandwich_norm"),
        AROUND,
        BRANCHES,
        enter=lambda hidden, index: hidden * (2 * index + 1) ** 0.5,
        leave=lambda stream, index: stream / (2 * index + 3) ** 0.5,
        tune=widen,
    ),
    "DeepSeek-V4": Family(
        CASES["deepseek_v4"].build,
        make_scheme("mhc", **CONVENTIONS["deepseek_v4"]),
        HYPER,
        (deepseek_attention, hashed),
        ends=HYPER_HEAD,
        end=hyper_end,
    ),
    "HY-V4": Family(
        CASES["hy_v4"].build,
        make_scheme("independent_hc"),
        HYPER,
        BRANCHES,
        ends=HYPER_HEAD,
        end=hyper_end,
        returns=indexed,
    ),
    "Qwen4-Exp": Family(
        CASES["qwen4_exp"].build,
        make_scheme("gated_streams", rank=8),
        (
            {f"attn_hyper_connection.{k}": v for k, v in INJECT.items()},
            {f"mlp_hyper_connection.{k}": v for k, v in INJECT.items()},
        ),
        (qwen4_attention, feed_forward),
        ends={f"hyper_connection_mixer.{k}": v for k, v in GATE.items()},
        load=qwen4_load,
        **side_by_side(4),
    ),
    "GLM-5-Next": Family(
        CASES["glm5_next"].build,
        make_scheme("mhc", **CONVENTIONS["deepseek_v4"] | {"collapse": "mean"}),
        HYPER,
        (glm_attention, feed_forward),
        ends={"norm.weight": "final_norm.weight"},
        end=hyper_end,
        returns=indexed,
    ),
    "Inkling 2": Family(
        inkling2,
        make_scheme("attention_residuals", block_size=4),
        (
            NORM[0] | {"attention_input.query": "depth_query.query"},
            NORM[1] | {"mlp_input.query": "depth_query.query"},
        ),
        (conv_attention, conv_feed_forward),
        enter=sources,
        leave=lambda stream, index: stream[-1],
        ends={"final_input.query": "depth_query.query", "norm.weight": "final_norm.weight"},
        end=last_read,
        tune=read_normed,
    ),
}


DEPARTS = {
    "Beam": "x' = sqrt(1 - 1/k) x + N2(F(N1(x))) / sqrt(k), k = l + 2 in sublayer l: the sandwich norm's "
    "stream divided by sqrt(l + 1), but for the epsilon of N1, which is scaled here",
    "Qwen4-Exp": "no paper; gains are stored as 1 + weight",
    "HY-V4": "no paper",
    "DeepSeek-V4": "the mix transposed, made by a softmax, columns last, with epsilons: options of ours",
    "GLM-5-Next": "as DeepSeek-V4; streams leave by their mean",
    "Inkling 2": "mixes the normed sources, by keys without a gain and scores over sqrt(width); ours is "
    "handed normed sources here, and neither side's depth norm has an epsilon",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_models_are_the_same(name: str, agree: Callable[..., None]) -> None:
    ours, theirs = compare(FAMILIES[name], tokens)
    what = "logits of the whole model, every weight"
    agree(Row(FAMILIES[name].scheme.name, "transformers", name, what, DEPARTS.get(name, "")), ours, theirs)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("DeepSeek-V4", make_scheme("mhc", **CONVENTIONS["deepseek_v4"] | {"orientation": "out_in"})),
        ("HY-V4", make_scheme("independent_hc", multiplier=1.9)),
        ("Inkling 2", make_scheme("attention_residuals", block_size=2)),
        ("Beam", make_scheme("sandwich_norm")),
        ("Granite", make_scheme("depth_scaled", multiplier=0.23, base_num_sublayers=8)),
    ],
)
def test_another_convention_is_another_model(name: str, other: Any) -> None:
    """What would make the comparison above see nothing: a copy that still runs its own residual."""
    family = FAMILIES[name]._replace(scheme=other)
    if name == "Beam":  # the epsilon that is forgotten
        family = family._replace(tune=None)
    ours, theirs = compare(family, tokens)
    assert error(ours.values[0], theirs.values[0]) > (1e-8 if name == "Beam" else 1e-4)
