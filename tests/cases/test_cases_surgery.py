"""Public reports about models with blocks removed, replayed on small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from small_models import base, shake, tokens

from mainstem.surgery import Cut, Origin, cut, save_pruned

GQA = {"num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaConfig": base(**GQA),
    "Qwen2Config": base(**GQA),
    "Gemma3TextConfig": base(**GQA, head_dim=16, sliding_window=4),
    "SmolLM3Config": base(**GQA),
}


def build(name: str) -> Any:
    config = getattr(transformers, name)(**CONFIGS[name])
    return shake(transformers.AutoModelForCausalLM.from_config(config))


def saved(model: Any, what: Cut, folder: Path) -> Path:
    return save_pruned(cut(model, what), None, folder, Origin(source="x", num_blocks=4, what=what))


# transformers#30508: the cache of a model with blocks deleted -----------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_every_block_writes_its_own_place_of_the_cache(name: str) -> None:
    """transformers#30508: blocks kept their old numbers, and the key-value cache was asked for a place that
    it did not have."""
    short: Any = cut(build(name), Cut(blocks=(1,)))
    assert [block.self_attn.layer_idx for block in short.model.layers] == [0, 1, 2]
    ids = tokens()["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False}
    cached, uncached = (short.generate(ids, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, uncached)
    with torch.no_grad():
        cache = short(ids, use_cache=True)
    states = getattr(cache, "cache", None) or cache.past_key_values
    assert len(states.layers) == 3
    assert all(layer.keys.shape[0] == 2 for layer in states.layers)


# A checkpoint whose config has the old number of blocks -----------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_has_the_blocks_that_its_config_says(name: str, tmp_path: Path) -> None:
    """A config that still says four blocks makes transformers add a random one, without an error."""
    model = build(name)
    out = saved(model, Cut(blocks=(2,)), tmp_path / "out")
    read, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert len(read.model.layers) == read.config.num_hidden_layers == 3
    short: Any = cut(model, Cut(blocks=(2,)))
    with torch.no_grad():
        assert torch.equal(read.eval()(**tokens()).logits, short(**tokens()).logits)
    # The fault itself, so that the test is of something: the old config on the same weights.
    config = json.loads((out / "config.json").read_text("utf-8"))
    config["num_hidden_layers"] = 4
    for key in ("layer_types", "no_rope_layers"):
        if key in config:
            config[key] = getattr(model.config, key)
    (out / "config.json").write_text(json.dumps(config), "utf-8")
    wrong, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert told["missing_keys"]
    with torch.no_grad():
        assert not torch.equal(wrong.eval()(**tokens()).logits, short(**tokens()).logits)


# Lists with an entry a block --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen2Config", "Gemma3TextConfig", "SmolLM3Config"])
def test_lists_with_an_entry_a_block_are_cut(name: str, tmp_path: Path) -> None:
    """``layer_types`` longer than the model: saving failed, or blocks took their neighbours' kind."""
    model = build(name)
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    if name != "SmolLM3Config":
        settings = CONFIGS[name] | {"layer_types": kinds, "sliding_window": 4, "use_sliding_window": True}
        config = getattr(transformers, name)(**settings)
        model = shake(transformers.AutoModelForCausalLM.from_config(config))
    out = saved(model, Cut(blocks=(1,)), tmp_path / "out")
    config = json.loads((out / "config.json").read_text("utf-8"))
    before = model.config.to_dict()
    for key in ("layer_types", "no_rope_layers"):
        if key in before:
            assert config[key] == [before[key][block] for block in (0, 2, 3)]


# mergekit#360, #53, PruneMe#4, LLM-Drop, LNS: off by one ----------------------------------------------------


@pytest.mark.parametrize("gone", [(1, 2), (0,), (3,), (0, 3), (2, 1, 0)])
def test_what_is_printed_is_what_is_removed_is_what_is_saved(gone: tuple[int, ...], tmp_path: Path) -> None:
    """mergekit#360, #53, PruneMe#4, LLM-Drop, LNS: inclusive or 1-based ranges, and numbers that shift while
    blocks are deleted one after another."""
    model = build("LlamaConfig")
    out = saved(model, Cut(blocks=gone), tmp_path / "out")
    kept = [block for block in range(4) if block not in gone]
    says = json.loads((out / "prune.json").read_text("utf-8"))
    assert says["removed"]["blocks"] == sorted(gone)
    assert [block for start, end in says["kept_ranges"] for block in range(start, end)] == kept
    whole, found = model.state_dict(), load_file(out / "model.safetensors")
    prefix = "model.layers."
    places = {int(key.split(".")[2]) for key in found if key.startswith(prefix)}
    assert places == set(range(len(kept)))
    for place, block in enumerate(kept):
        here = [key for key in whole if key.startswith(f"{prefix}{block}.")]
        assert here
        for key in here:
            rest = key.removeprefix(f"{prefix}{block}.")
            assert torch.equal(found[f"{prefix}{place}.{rest}"], whole[key])
