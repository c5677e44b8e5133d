"""The first number that is not finite is named: where it was planted, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from mainstem.tower import Tower, TowerConfig
from mainstem.training import first_non_finite


def llama_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip


def build(config: PretrainedConfig) -> nn.Module:
    return AutoModelForCausalLM.from_config(config).train()


def batch(padded: bool = False) -> dict[str, Tensor]:
    ids = torch.arange(32).reshape(2, 16) % 64
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


class Plant(nn.Module):
    """A module whose output, or the gradient of it, gets one number that is not finite."""

    def __init__(self, inner: nn.Module, value: float, backward: bool = False):
        super().__init__()
        self.inner, self.value, self.backward = inner, value, backward

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        out = self.inner(*args, **kwargs)
        if self.backward:
            return OverflowingGradient.apply(out)
        # From finite numbers: a product that overflows, or the root of a negative number.
        spoilt = out[0, 0, 0].detach() * 0 + (3e38 if self.value == float("inf") else -1.0)
        spoilt = spoilt * 10 if self.value == float("inf") else spoilt.sqrt()
        out = out.clone()
        out[0, 0, 0] = spoilt
        return out


class OverflowingGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * torch.inf


PLANTS: dict[str, tuple[str, int, str]] = {
    "layers.2.mlp.down_proj": ("model.layers.2.mlp.down_proj", 2, "the update of the mlp"),
    "layers.1.self_attn.o_proj": ("model.layers.1.self_attn.o_proj", 1, "the update of the attn"),
    "layers.3.input_layernorm": ("model.layers.3.input_layernorm", 3, "what is read from the stream"),
}


def plant(model: nn.Module, path: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    owner, _, name = path.rpartition(".")
    parent = model.get_submodule(owner)
    setattr(parent, name, wrap(getattr(parent, name)))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("path", PLANTS)
def test_a_planted_number_is_found(path: str, value: float) -> None:
    model = build(llama_config())
    assert first_non_finite(model, batch(padded=True)) is None  # eager masks hold -inf or the least number
    plant(model, f"model.{path}", lambda inner: Plant(inner, value))
    site = first_non_finite(model, batch(padded=True))
    assert site is not None
    module, block, what = PLANTS[path]
    assert (site.module, site.block, site.in_backward) == (module, block, False)
    assert site.what.startswith(what)
    assert site.value == ("infinity" if value == float("inf") else "NaN")
    assert f"block {block}" in site.describe()


def test_the_sum_that_overflows_is_the_stream() -> None:
    # Each write is finite in fp16 and their sum is not.
    model = build(llama_config()).half()
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(60000.0)
        model.model.layers[1].mlp.down_proj.weight.zero_()
    plant(model, "model.layers.1.mlp", lambda inner: Constant(60000.0))
    site = first_non_finite(model, batch())
    assert site is not None
    assert (site.block, site.value) == (1, "infinity")
    assert site.what == "the stream after the mlp, made by add"
    assert site.module == "model.layers.1"


class Constant(nn.Module):
    def __init__(self, value: float):
        super().__init__()
        self.layer = nn.Linear(32, 32, dtype=torch.float16)
        nn.init.zeros_(self.layer.weight)
        nn.init.constant_(self.layer.bias, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * 0)


def test_a_parameter_that_is_spoilt_is_named() -> None:
    model = build(llama_config())
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight[3, 4] = torch.nan
    site = first_non_finite(model, batch())
    assert site is not None
    assert (site.module, site.block, site.value) == ("model.layers.2.self_attn.v_proj", 2, "NaN")
    assert "its parameter or buffer 'weight'" in site.what


def test_a_gradient_is_found_and_nothing_is_touched() -> None:
    model = build(GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=32))
    plant(model, "transformer.h.1.mlp", lambda inner: Plant(inner, 0.0, backward=True))
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    site = first_non_finite(model, batch())
    assert site is not None
    assert site.in_backward
    assert site.block == 1
    assert site.module.startswith("transformer.h.1.mlp")
    assert "gradient" in site.what
    assert all(torch.equal(p.grad, torch.full_like(p, 7.0)) for p in model.parameters())
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_checkpointed_and_compiled_models() -> None:
    model = build(llama_config())
    new_name = "activation_checkpointing_enable"  # transformers 5.24
    getattr(model, new_name, model.gradient_checkpointing_enable)({"use_reentrant": False})
    assert first_non_finite(model, batch()) is None
    plant(model, "model.layers.2.mlp.down_proj", lambda inner: Plant(inner, float("inf")))
    for layer in model.model.layers:
        layer.compile(backend="eager")
    site = first_non_finite(torch.compile(model, backend="eager"), batch())
    assert site is not None
    assert (site.module, site.block) == ("model.layers.2.mlp.down_proj", 2)


@pytest.mark.parametrize("connection", ["pre_norm", "mhc", "attention_residuals"])
def test_towers_of_any_stream(connection: str) -> None:
    config = TowerConfig(vocab_size=64, width=32, num_blocks=4, num_heads=4, connection=connection)
    tower = Tower(config)
    inputs = {"token_ids": batch()["input_ids"]}
    assert first_non_finite(tower, inputs) is None
    plant(tower, "blocks.3.mlp.down_proj", lambda inner: Plant(inner, float("nan")))
    site = first_non_finite(tower, inputs)
    assert site is not None
    assert (site.module, site.block, site.value) == ("blocks.3.mlp.down_proj", 3, "NaN")


def test_an_input_that_is_spoilt_is_named() -> None:
    model = build(llama_config())
    embeds = torch.zeros(2, 16, 32)
    embeds[1, 2, 3] = torch.nan
    site = first_non_finite(model, {"inputs_embeds": embeds})
    assert site is not None
    assert site.what == "its input inputs_embeds"


def test_an_infinity_that_reaches_nothing_is_no_cause() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            return torch.where(torch.isfinite(x / 0), x / 0, x)  # x / 0 is infinite and never chosen

    assert first_non_finite(Model(), {"ids": torch.arange(8)[None]}) is None
