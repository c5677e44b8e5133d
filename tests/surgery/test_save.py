"""What is saved is the cut model, to the bit, for people who have no mainstem; or nothing is saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from pruned_families import FAMILIES, build
from safetensors import safe_open
from small_models import tokens
from tiny_sources import llama_config, train_tokenizer, write_gguf

from mainstem.errors import MainstemError
from mainstem.sources import load_model
from mainstem.surgery import Cut, Origin, cut, save_pruned

GONE = Origin(source="some/model", num_blocks=6, what=Cut(blocks=(1, 2)))

# Run where no path leads to mainstem and an import of it is an error.
PLAIN = """
import json, sys
import torch
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mainstem":
            raise ImportError("mainstem is not here")
sys.meta_path.insert(0, Blocker())
torch.set_num_threads(1)
import transformers
folder, kind = sys.argv[1:3]
model = getattr(transformers, kind).from_pretrained(folder).eval()
given = torch.load(folder + "/../given.pt")
with torch.no_grad():
    logits = model(given["ids"]).logits
tokens = [model.generate(given["ids"][:1], max_new_tokens=8, do_sample=False, use_cache=c).tolist() for c in (True, False)]
print(json.dumps([torch.equal(logits, given["logits"]), tokens, sorted(m for m in sys.modules if m.startswith("mainstem"))]))
"""  # noqa: E501


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def in_plain_transformers(folder: Path, model: Any, ids: torch.Tensor) -> tuple[bool, list[Any], list[str]]:
    torch.save({"ids": ids, "logits": logits(model, ids)}, folder.parent / "given.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(folder), "AutoModelForCausalLM"],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_transformers_reads_the_cut_model_to_the_bit(name: str, tmp_path: Path) -> None:
    model = build(name)
    short: Any = cut(model, GONE.what)
    out = save_pruned(short, None, tmp_path / "out", GONE)
    read, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    ids = tokens()["input_ids"]
    assert torch.equal(logits(read.eval(), ids), logits(short, ids))
    cached, uncached = (
        read.generate(ids, max_new_tokens=6, do_sample=False, use_cache=use) for use in (True, False)
    )
    assert torch.equal(cached, uncached)
    assert 4 in {getattr(read.config, key, None) for key in ("num_hidden_layers", "decoder_layers")}
    says = json.loads((out / "prune.json").read_text("utf-8"))
    assert says["schema"] == "mainstem.prune/1"
    assert says["num_blocks"] == {"before": 6, "after": 4}
    assert says["removed"] == {"blocks": [1, 2], "attention": [], "feed_forward": []}
    assert says["kept_ranges"] == [[0, 1], [3, 6]]
    assert says["checks"]["generation"] == "cached and uncached give the same tokens"


def test_the_recipe_is_half_open_and_scales_silenced_sublayers_by_zero(tmp_path: Path) -> None:
    what = Cut(blocks=(1,), attention=(3,), feed_forward=(3, 5))
    origin = Origin(source="some/model", num_blocks=6, what=what)
    out = save_pruned(cut(build("llama"), what), None, tmp_path / "out", origin)
    recipe = yaml.safe_load((out / "mergekit.yaml").read_text("utf-8"))
    assert recipe["merge_method"] == "passthrough"
    assert recipe["dtype"] == "float32"
    sources = [one for (one,) in (piece["sources"] for piece in recipe["slices"])]
    assert {one["model"] for one in sources} == {"some/model"}
    assert [one["layer_range"] for one in sources] == [[0, 1], [2, 3], [3, 4], [4, 5], [5, 6]]
    zero = [
        [f["filter"] for f in one.get("parameters", {}).get("scale", []) if "filter" in f] for one in sources
    ]
    assert zero == [[], [], ["self_attn.o_proj", "mlp.down_proj"], [], ["mlp.down_proj"]]
    with safe_open(out / "model.safetensors", "pt") as file:
        places = {int(key.split(".")[2]) for key in file.keys() if ".layers." in key}  # noqa: SIM118
        assert places == {0, 1, 2, 3, 4}
        zeros = {key for key in file.keys() if not file.get_tensor(key).any()}  # noqa: SIM118
    assert zeros == {
        "model.layers.2.self_attn.o_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.layers.4.mlp.down_proj.weight",
    }


def test_tokenizer_and_generation_config_travel_along(tmp_path: Path, gpl_text: Path) -> None:
    tokenizer = train_tokenizer(gpl_text.read_text("utf-8")[:3000])
    model = transformers.LlamaForCausalLM(llama_config(num_hidden_layers=3))
    model.generation_config.repetition_penalty = 1.25
    origin = Origin(source="x", num_blocks=3, what=Cut(blocks=(0,)))
    out = save_pruned(cut(model, origin.what), tokenizer, tmp_path / "out", origin, {"note": [1, 2]})
    again = transformers.AutoTokenizer.from_pretrained(out)
    assert again.encode("free software") == tokenizer.encode("free software")
    assert transformers.GenerationConfig.from_pretrained(out).repetition_penalty == 1.25
    assert json.loads((out / "prune.json").read_text("utf-8"))["note"] == [1, 2]
    assert load_model(out).model.config.num_hidden_layers == 2


def test_a_model_from_gguf_is_cut_and_saved(tmp_path: Path, gpl_text: Path) -> None:
    tokenizer = train_tokenizer(gpl_text.read_text("utf-8")[:3000])
    packed = write_gguf(tmp_path / "tiny.gguf", tokenizer)
    loaded = load_model(packed)
    # As transformers itself gives it: dense, but marked as quantised, and not to be saved.
    direct = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=packed.name, dtype=torch.float32
    )
    ids = tokens()["input_ids"]
    for number, model in enumerate((loaded.model, direct)):
        origin = Origin(source=str(packed), num_blocks=2, what=Cut(blocks=(1,)))
        short: Any = cut(model, origin.what)
        out = save_pruned(short, loaded.tokenizer, tmp_path / f"out{number}", origin)
        assert "quantization_config" not in json.loads((out / "config.json").read_text("utf-8"))
        read = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
        assert torch.equal(logits(read, ids), logits(short, ids))


def test_a_bfloat16_model_stays_one(tmp_path: Path) -> None:
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path / "whole")
    model = load_model(tmp_path / "whole", dtype="bfloat16").model
    short: Any = cut(model, GONE.what)
    out = save_pruned(short, None, tmp_path / "out", GONE)
    read = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert read.dtype == torch.bfloat16
    ids = tokens()["input_ids"]
    assert torch.equal(logits(read, ids), logits(short, ids))


def test_nothing_is_written_over_and_nothing_is_left_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short: Any = cut(build("llama"), GONE.what)
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine.txt").write_text("mine")
    with pytest.raises(MainstemError, match="is there already"):
        save_pruned(short, None, there, GONE)
    source = Origin(source=str(there), num_blocks=6, what=GONE.what)
    with pytest.raises(MainstemError, match="the source itself"):
        save_pruned(short, None, there, source)
    assert [path.name for path in there.iterdir()] == ["mine.txt"]
    with pytest.raises(MainstemError, match="the model has 4 blocks, but 6 without"):
        save_pruned(short, None, tmp_path / "out", Origin(source="x", num_blocks=6, what=Cut(blocks=(1,))))
    with pytest.raises(MainstemError, match="may not say 'removed'"):
        save_pruned(short, None, tmp_path / "out", GONE, {"removed": []})

    # A weight that changes on its way to the disk.
    save = type(short).save_pretrained

    def torn(self: Any, folder: Any, **options: Any) -> None:
        with torch.no_grad():
            weight = self.model.layers[3].mlp.up_proj.weight
            kept = weight[0, 0].clone()
            weight[0, 0] += 1
            save(self, folder, **options)
            weight[0, 0] = kept

    monkeypatch.setattr(type(short), "save_pretrained", torn)
    with pytest.raises(MainstemError, match=r"layers\.3\.mlp\.up_proj\.weight are not those saved"):
        save_pruned(short, None, tmp_path / "out", GONE)
    monkeypatch.setattr(type(short), "save_pretrained", save)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]

    # One that no config tells of: the model in memory has another number of heads' scale than it can say.
    short.model.layers[0].self_attn.scaling *= 2
    with pytest.raises(MainstemError, match="computes something else"):
        save_pruned(short, None, tmp_path / "out", GONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen2", "olmo2", "gpt2", "mixtral", "deepseek_v3"])
def test_where_there_is_no_mainstem(name: str, tmp_path: Path) -> None:
    short: Any = cut(build(name), GONE.what)
    out = save_pruned(short, None, tmp_path / "out", GONE)
    equal, (cached, uncached), modules = in_plain_transformers(out, short, tokens()["input_ids"])
    assert equal
    assert cached == uncached
    assert modules == []


@pytest.mark.slow
def test_smollm2_without_three_blocks_where_there_is_no_mainstem(tmp_path: Path, gpl_text: Path) -> None:
    loaded = load_model("smollm2")
    origin = Origin(source="smollm2", num_blocks=30, what=Cut(blocks=(4, 14, 16)))
    short: Any = cut(loaded.model, origin.what)
    out = save_pruned(short, loaded.tokenizer, tmp_path / "out", origin)
    ids = loaded.tokenizer(gpl_text.read_text("utf-8")[:1500], return_tensors="pt")["input_ids"]
    equal, (cached, uncached), modules = in_plain_transformers(out, short, ids)
    assert equal
    assert cached == uncached
    assert modules == []
    whole = sum(p.numel() for p in loaded.model.parameters())
    one_block = sum(p.numel() for p in loaded.model.model.layers[0].parameters())
    assert sum(p.numel() for p in short.parameters()) == whole - 3 * one_block
