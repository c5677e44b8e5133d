"""Sub-LN and DeepNorm against torchscale 0.3.0, their authors' code."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import Row
from around import WIDTH, build, draw, fp64, joins_of, side, some, through
from torch import Tensor, nn

from mainstem.connections import NormConfig, make_scheme

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Its decoder, without ``timm`` and ``fairscale``, of which it asks for three functions not used here."""
    names = {"timm.models.layers": ("drop_path",), "fairscale.nn": ("checkpoint_wrapper", "wrap")}
    for name, functions in names.items():
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            module = types.ModuleType(".".join(parts[:n]))
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for function in functions:
            setattr(sys.modules[name], function, None)
    return pytest.importorskip(
        "torchscale.architecture.decoder", reason="needs torchscale; `make test-oracle` installs it"
    )


def config(name: str, **options: Any) -> Any:
    """Asking for DeepNorm takes Sub-LN away, which is otherwise there."""
    from torchscale.architecture.config import DecoderConfig

    return DecoderConfig(
        decoder_embed_dim=WIDTH,
        decoder_attention_heads=2,
        decoder_ffn_embed_dim=32,
        decoder_layers=3,
        vocab_size=9,
        dropout=0.0,
        subln=name == "sub_norm",
        deepnorm=name == "deep_norm",
        **options,
    )


@pytest.mark.parametrize("name", ["sub_norm", "deep_norm"])
def test_three_decoder_layers(name: str, decoder: types.ModuleType, agree: Callable[..., None]) -> None:
    settings = config(name, decoder_normalize_before=name == "sub_norm")
    with fp64():
        layers = [decoder.DecoderLayer(settings, depth=i) for i in range(3)]
        mask = torch.full((5, 5), float("-inf")).triu(1)
    norm = NormConfig(kind="layer", eps=settings.layernorm_eps)
    joins = joins_of(build(make_scheme(name), 6, norm))
    weights: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    branches: list[Callable[[Tensor], Tensor]] = []
    for i, layer in enumerate(layers):
        draw(layer, seed=i)
        inner = (layer.self_attn.inner_attn_ln, layer.ffn.ffn_layernorm)
        assert all(isinstance(part, nn.Module) == (name == "sub_norm") for part in inner)
        for join, part in zip(
            joins[2 * i : 2 * i + 2], ("self_attn_layer_norm", "final_layer_norm"), strict=True
        ):
            ours = join.get_submodule("norm")
            ours.load_state_dict(getattr(layer, part).state_dict())
            own |= {f"{i}.{part}.{k}": p for k, p in ours.named_parameters()}
        weights |= {f"{i}.{k}": p for k, p in layer.named_parameters()}
        branches += [lambda s, b=layer: b.self_attn(s, s, s, attn_mask=mask)[0], layer.ffn]
    x = some(2, 5, WIDTH).requires_grad_()
    ours = side(through(joins, x, branches), x, **weights | own)
    out = x
    for layer in layers:
        out = layer(out, self_attn_mask=mask)[0]
    row = Row(name, "torchscale", "DecoderLayer", "three layers, every weight")
    agree(row, ours, side(out, x, **weights))


@pytest.mark.parametrize("name", ["sub_norm", "deep_norm"])
def test_initial_scales(name: str, decoder: types.ModuleType) -> None:
    """The same seed with and without the scheme: its matrices differ by our factor."""

    def weights(scheme: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        with fp64():
            return dict(decoder.Decoder(config(scheme, no_output_layer=True)).named_parameters())

    plain, scaled = weights("none"), weights(name)
    factor = make_scheme(name).branch_init_scale(6)
    for part, expected in (("v_proj", factor), ("out_proj", factor), ("q_proj", 1.0), ("k_proj", 1.0)):
        key = f"layers.1.self_attn.{part}.weight"
        torch.testing.assert_close(scaled[key], plain[key] * expected, rtol=1e-12, atol=0)
    for part in ("fc1", "fc2"):
        key = f"layers.1.ffn.{part}.weight"
        torch.testing.assert_close(scaled[key], plain[key] * factor, rtol=1e-12, atol=0)
