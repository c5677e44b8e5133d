"""A converted model computes what it computed, trains its new parameters, and is saved whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from families import make_model
from tiny_sources import llama_config, train_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import mainstem.tower.hf
from mainstem.connections import make_scheme, parameter_groups, scheme_names
from mainstem.errors import ConfigError, MainstemError
from mainstem.sources import WindowBatch
from mainstem.surgery import (
    ConvertConfig,
    check_out,
    convert,
    convert_tower,
    measure_distance,
    save_conversion,
)
from mainstem.tower.pretrained import tower_from_transformers

PRE_NORM = ["llama", "mistral_sliding", "qwen2", "qwen3", "gpt2"]
# Depth-scaled branches have no start of their own; the matrices that write are divided instead.
EXACT = [
    name for name in scheme_names() if make_scheme(name).no_exact_start is None or name == "depth_scaled"
]
REFUSED = [name for name in scheme_names() if name not in EXACT]

# fp64 rounds at 1.1e-16; measured at most 1.1e-14 of the largest logit.
FP64 = 1e-12


def tokens() -> Tensor:
    return torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", PRE_NORM)
@torch.no_grad()
def test_every_scheme_that_can_start_as_pre_norm_keeps_a_pretrained_function(family: str) -> None:
    model = make_model(family, torch.float64)
    source = tower_from_transformers(model)
    expected = source(tokens())
    far = {}
    for name in EXACT:
        if family == "gpt2" and name == "gated_streams":  # its norms have no bias to put GPT-2's into
            continue
        logits = convert_tower(source, name)[0](tokens())
        far[name] = ((logits - expected).abs().max() / expected.abs().max()).item()
    assert {"mhc", "identity_hc", "attention_residuals", "dense_former", "x0_reinjection"} <= set(far)
    assert {name: error for name, error in far.items() if not error <= FP64} == {}


@torch.no_grad()
def test_schemes_that_cannot_start_as_pre_norm_are_far_away() -> None:
    source = tower_from_transformers(make_model("llama", torch.float64))
    expected = source(tokens())
    for name in REFUSED:
        logits = convert_tower(source, name)[0](tokens())
        assert not (logits - expected).abs().max() <= 1e-3, name


@pytest.mark.parametrize("family", ["olmo2", "gemma2", "gemma3"])
@torch.no_grad()
def test_families_with_norms_after_the_branch_keep_their_function_in_their_own_connection_only(
    family: str,
) -> None:
    source = tower_from_transformers(make_model(family, torch.float64))
    expected = source(tokens())
    own, changes = convert_tower(source, source.config.connection)
    assert torch.equal(own(tokens()), expected)
    assert changes == {"new": [], "left_out": []}
    assert (convert_tower(source, "mhc")[0](tokens()) - expected).abs().max() > 1e-3


@torch.no_grad()
def test_a_bias_that_has_no_place_is_said_to_be_left_out() -> None:
    source = tower_from_transformers(make_model("gpt2"))
    _, changes = convert_tower(source, "gated_streams")
    assert {name.rpartition(".")[2] for name in changes["left_out"]} == {"bias"}
    assert len(changes["left_out"]) == 2 * source.config.num_blocks + 1


@pytest.mark.parametrize("name", EXACT)
def test_new_parameters_are_trained(name: str) -> None:
    """All are trainable and grouped; one behind a factor of 0 has its first gradient a step later."""
    torch.manual_seed(3)
    tower, changes = convert_tower(tower_from_transformers(make_model("llama")), name)
    tower.train()
    named = dict(tower.named_parameters())
    new = [key for key in changes["new"] if key in named]
    assert all(parameter.requires_grad for parameter in named.values())
    grouped = [id(p) for group in parameter_groups(tower) for p in group.parameters]
    assert sorted(grouped) == sorted(id(p) for p in named.values())
    optimizer = torch.optim.SGD(tower.parameters(), lr=1e-2)
    reached: set[str] = set()
    for _ in range(3):
        optimizer.zero_grad()
        logits = tower(tokens())
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()).backward()
        reached |= {key for key in new if named[key].grad is not None and named[key].grad.abs().max() > 0}
        optimizer.step()
    assert set(new) - reached == set()


@pytest.fixture
def llama_folder(tmp_path: Path, gpl_text: Path) -> Path:
    folder = tmp_path / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(max_position_embeddings=128)).save_pretrained(folder)
    train_tokenizer(gpl_text.read_text("utf-8")[:8000]).save_pretrained(folder)
    return folder


def config(folder: Path, text: Path, connection: str, **changes: Any) -> ConvertConfig:
    given: dict[str, Any] = {"tokens": 100, "window": 32, "text": str(text)}
    return ConvertConfig(model=str(folder), connection=connection, **{**given, **changes})


@pytest.mark.parametrize("name", ["mhc", "attention_residuals", "dense_former"])
def test_saved_model_loads_and_generates(
    name: str, llama_folder: Path, gpl_text: Path, tmp_path: Path
) -> None:
    conversion = convert(config(llama_folder, gpl_text, name))
    out = save_conversion(conversion, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert isinstance(model, mainstem.tower.hf.MainstemForCausalLM)
    ids = AutoTokenizer.from_pretrained(out)("Everyone is permitted to copy", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(model(ids).logits, conversion.model(ids).logits)
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids, use_cache=True, **greedy)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **greedy))
    record = json.loads((out / "convert.json").read_text("utf-8"))
    assert record == json.loads(json.dumps(conversion.record))
    assert record["schema"] == "mainstem.convert/1"
    assert record["kept"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_saved_tower_is_converted_again(llama_folder: Path, gpl_text: Path, tmp_path: Path) -> None:
    out = save_conversion(convert(config(llama_folder, gpl_text, "layer_scale")), tmp_path / "out")
    assert convert(config(out, gpl_text, "layer_scale")).distance.max_logit_difference == 0.0


def test_a_changed_function_is_refused_with_its_distance(llama_folder: Path, gpl_text: Path) -> None:
    with pytest.raises(MainstemError, match=r"post_norm does not keep .* logits move by up to \d.*KL"):
        convert(config(llama_folder, gpl_text, "post_norm"))
    changed = convert(config(llama_folder, gpl_text, "post_norm", allow_change=True))
    assert not changed.kept
    assert changed.distance.max_logit_difference > 1e-3


def test_published_start_is_refused_where_it_changes_the_function(llama_folder: Path, gpl_text: Path) -> None:
    with pytest.raises(MainstemError, match="layer_scale does not keep"):
        convert(config(llama_folder, gpl_text, "layer_scale", options={"exact_start": False}))


def test_nothing_is_written_over(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MainstemError, match="source itself"):
        check_out(llama_folder, str(llama_folder))
    (tmp_path / "there").mkdir()
    with pytest.raises(MainstemError, match="there already"):
        check_out(tmp_path / "there", str(llama_folder))
    (tmp_path / "file").write_text("")
    with pytest.raises(MainstemError, match="No folder can be made"):
        check_out(tmp_path / "file" / "out", str(llama_folder))


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match="stream dtype"):
        ConvertConfig(model="m", connection="mhc", text="t", stream_dtype="int8")
    with pytest.raises(ConfigError, match="no connection is called"):
        ConvertConfig(model="m", connection="nothing", text="t")
    with pytest.raises(ConfigError, match="tolerance"):
        ConvertConfig(model="m", connection="mhc", text="t", tolerance=float("nan"))


class Fixed(torch.nn.Module):
    """Says the same logits whatever it reads."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits = logits

    def forward(self, **_: Any) -> Any:
        return self


def test_the_distance_is_that_of_the_formulas_and_padding_is_left_out() -> None:
    before = torch.randn(2, 5, 7, dtype=torch.float64)
    after = before.clone()
    after[0, 1, 3] += 0.5
    after[1, 4] = torch.inf  # padded
    mask = torch.ones(2, 5, dtype=torch.int64)
    mask[1, 3:] = 0
    ids = torch.randint(0, 7, (2, 5))
    batch = WindowBatch(input_ids=ids, attention_mask=mask, position_ids=mask, first_sequence=0, num_added=0)
    found = measure_distance(Fixed(before), Fixed(after), [batch])
    p, q = torch.softmax(before[0, 1], -1), torch.softmax(after[0, 1], -1)
    loss = torch.nn.functional.cross_entropy(before[0, 1:2], ids[0, 2:3])
    moved = torch.nn.functional.cross_entropy(after[0, 1:2], ids[0, 2:3])
    assert found.max_logit_difference == pytest.approx(0.5, abs=1e-15)
    assert (found.num_tokens, found.num_scored) == (8, 6)
    assert found.mean_kl == pytest.approx(float((p * (p / q).log()).sum()) / 8, rel=1e-9)
    assert found.loss_after - found.loss_before == pytest.approx(float(moved - loss) / 6, rel=1e-6)
    after[0, 0, 0] = torch.nan
    assert torch.tensor(measure_distance(Fixed(before), Fixed(after), [batch]).max_logit_difference).isnan()
