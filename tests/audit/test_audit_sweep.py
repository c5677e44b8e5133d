"""The audit's sweep: figures against models with a block taken out, and what is said about them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import transformers
from tiny_models import GPL, config, make, save, tokenizer
from tiny_sources import llama_config
from torch.nn import functional

from mainstem.audit import AuditResult, run_audit
from mainstem.audit._sweep import rank_correlation
from mainstem.audit.findings import make_findings
from mainstem.audit.schema_page import load_schema
from mainstem.errors import ConfigError
from mainstem.report import to_json


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(llama_config(num_hidden_layers=6, initializer_range=0.2)).eval()
    return save(model, tmp_path_factory.mktemp("sweep") / "six")


TOLD: list[str] = []


@pytest.fixture(scope="module")
def swept(folder: Path) -> AuditResult:
    return run_audit(config(folder, sweep=True, sweep_windows=3), lambda what, done, total: TOLD.append(what))


def damage_of(result: AuditResult) -> Any:
    assert result.damage is not None
    return result.damage


@torch.no_grad()
def test_the_figures_are_those_of_a_model_without_the_block(folder: Path, swept: AuditResult) -> None:
    ids = tokenizer()(GPL.read_text("utf-8"), add_special_tokens=False)["input_ids"][: 3 * 16]
    x = torch.tensor(ids).view(3, 16)

    def without(blocks: list[int]) -> torch.Tensor:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
        kept = [layer for i, layer in enumerate(model.model.layers) if i not in blocks]
        model.model.layers = torch.nn.ModuleList(kept)
        model.config.num_hidden_layers = len(kept)
        return model(input_ids=x, use_cache=False).logits

    def loss(logits: torch.Tensor) -> float:
        return float(functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()))

    whole = without([])
    damage = damage_of(swept)
    assert (damage.windows, damage.tokens, damage.restarted, damage.finished) == (3, 48, True, True)
    for figures in damage.blocks:
        logits = without([figures.block])
        kl = functional.kl_div(logits.log_softmax(-1), whole.softmax(-1), reduction="none").sum(-1).mean()
        assert figures.kl == pytest.approx(float(kl), rel=1e-4)
        assert figures.removal_loss == pytest.approx(loss(logits) - loss(whole), abs=1e-5)
        agrees = (logits.argmax(-1) == whole.argmax(-1)).double().mean()
        assert figures.top1 == pytest.approx(float(agrees), abs=0.5 / 48)
        assert len(figures.change) == len(figures.cosine) == 6 - figures.block
    assert [b.block for b in damage.blocks] == list(range(6))
    for plan in damage.plans:
        assert plan.removal_loss == pytest.approx(loss(without(plan.blocks)) - loss(whole), abs=1e-5)
    losses = sorted((b.removal_loss, b.block) for b in damage.blocks)
    chosen = {plan.score: sorted(plan.blocks) for plan in damage.plans}
    assert chosen["removal_loss"] == sorted(block for _, block in losses[:2])
    influence = sorted((b.block_influence, b.block) for b in swept.blocks)
    assert chosen["block_influence"] == sorted(block for _, block in influence[:2])
    start = next(b["start"] for b in swept.angular_distance.best if b["blocks"] == 2)
    assert chosen["angular_distance"] == [start, start + 1]


def test_the_plan_is_told_before_and_the_result_fits_the_schema(swept: AuditResult) -> None:
    at = next(i for i, what in enumerate(TOLD) if what.startswith("skipping every block in turn: 7 passes"))
    assert "MiB held" in TOLD[at]
    assert any(what.startswith("skipping blocks, about") for what in TOLD[at + 1 :])
    assert not any(what.startswith("skipping blocks") for what in TOLD[:at])
    found = json.loads(to_json(swept))
    jsonschema.Draft202012Validator(load_schema()).validate(found)
    assert found["provenance"]["sampling"]["damage"] == "the first 3 windows, 48 tokens"
    assert found["provenance"]["options"]["sweep_windows"] == 3


def test_what_is_said(swept: AuditResult) -> None:
    said = {f.number: f.finding for f in swept.findings}
    damage = damage_of(swept)
    worst = max(damage.blocks, key=lambda b: b.kl)
    assert said[6].startswith(f"Skipped one at a time on 48 tokens: block {worst.block} is missed most (KL ")
    assert "of 5 blocks" in said[6]
    cheapest = min(damage.blocks, key=lambda b: b.removal_loss)
    assert f"on 48 tokens: block {cheapest.block} ({cheapest.removal_loss:+.3f})" in said[7]
    assert f"influence (1 - cosine) {damage.influence_correlation:.2f}" in said[7]
    assert "2 together, by least influence (block" in said[7]
    assert "guesses" not in said[7]
    massive = [
        dataclasses.replace(o, massive=o.block == 3, value=9e3 if o.block == 3 else 1.0)
        for o in swept.outliers
    ]
    blocks = [
        dataclasses.replace(b, max_abs=abs(o.value)) for b, o in zip(swept.blocks, massive, strict=True)
    ]
    text = make_findings(dataclasses.replace(swept, outliers=massive, blocks=blocks), {7}).findings[0].finding
    loss = damage.blocks[3].removal_loss
    assert f"block 3 ({loss:+.3f}; " in text
    assert text.endswith("create or erase a massive activation.")


def test_only_asks_for_it_and_without_it_nothing_is_skipped(folder: Path) -> None:
    plain = run_audit(config(folder))
    assert plain.damage is None
    assert 6 not in {f.number for f in plain.findings}
    assert "damage" not in plain.provenance["sampling"]
    found = run_audit(config(folder, only=("damage",), sweep_windows=1, tokens=32))
    assert [f.number for f in found.findings] == [6]
    assert damage_of(found).windows == 1
    with pytest.raises(ConfigError, match="name one of them in --only"):
        config(folder, only=("growth",), sweep=True)
    with pytest.raises(ConfigError, match="sweep_windows is 0"):
        config(folder, sweep_windows=0)


@pytest.mark.parametrize("name", ["bert", "encoder", "four_streams", "no_residual", "albert"])
def test_models_without_a_loss_of_the_next_token_and_other_streams(name: str, tmp_path: Path) -> None:
    result = run_audit(config(make(name, tmp_path), only=("damage", "removal"), tokens=32))
    jsonschema.Draft202012Validator(load_schema()).validate(json.loads(to_json(result)))
    damage, notes = damage_of(result), " ".join(result.provenance["notes"])
    causal = name in ("four_streams", "no_residual")
    assert ("there is no loss of a next token" in notes) == (not causal)
    assert all((b.removal_loss is None) == (not causal) for b in damage.blocks)
    assert all((b.kl == b.kl) == (name != "encoder") for b in damage.blocks)
    assert damage.plans == ()
    said = {f.number: f.finding for f in result.findings}
    assert ("KL" in said[6]) == (name != "encoder")
    assert ("guesses" in said[7]) == (not causal)


def test_a_stop_keeps_what_was_found(folder: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what.startswith("skipping blocks") and done == 4:
            raise KeyboardInterrupt

    result = run_audit(config(folder, only=("damage", "removal"), tokens=32), stop)
    damage = damage_of(result)
    assert [b.block for b in damage.blocks] == [0, 1, 2]
    assert not damage.finished
    assert "stopped after 4 of 7 passes" in " ".join(result.provenance["notes"])
    said = {f.number: f.finding for f in result.findings}
    assert "(stopped before the end)" in said[6]
    assert "guesses" in said[7]


INFLUENCE = [
    0.9904, 0.1785, 0.0365, 0.0273, 0.0332, 0.0364, 0.0357, 0.0372, 0.0484, 0.0384,
    0.0480, 0.0392, 0.0312, 0.0273, 0.0233, 0.0287, 0.0340, 0.0278, 0.0417, 0.0474,
    0.0650, 0.0507, 0.0513, 0.0563, 0.1613, 0.0272, 0.0302, 0.0483, 0.0517, 0.2490,
]  # fmt: skip
REMOVAL = [
    6.9877, 3.1677, 0.6870, 0.1396, 0.0870, 0.1353, 0.2621, 0.2444, 1.2085, 0.6255,
    0.4054, 1.5420, 0.1417, 0.1497, 0.1005, 0.1809, 0.0904, 0.1149, 0.1286, 0.2332,
    0.2926, 0.2754, 0.2312, 0.2158, 0.5236, 0.1497, 0.2279, 0.3418, 1.4113, 2.2439,
]  # fmt: skip


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 1e9]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # Textbook, 1 - 6 sum d^2 / (n (n^2 - 1)): ranks 1..10 against 10 others without ties, sum d^2 = 194.
    iq = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110]
    hours = [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    assert rank_correlation(iq, hours) == pytest.approx(1 - 6 * 194 / 990)
    # Ties share the mean of their ranks: (1, 2.5, 2.5, 4) against (1, 2, 3, 4).
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5.0) ** 0.5)
    # SmolLM2-135M-Instruct, by plain hooks: published as 0.73.
    assert rank_correlation(INFLUENCE, REMOVAL) == pytest.approx(0.73, abs=0.005)
    assert rank_correlation([1, 2], [1, 2]) is None
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([1, 2, float("nan")], [1, 2, 3]) is None


def test_one_block_applied_many_times_is_missed_alike_wherever_it_is_skipped(tmp_path: Path) -> None:
    found = run_audit(config(make("albert", tmp_path), only=("damage",)))
    assert found.damage is not None
    kl = [b.kl for b in found.damage.blocks]
    assert kl == pytest.approx([kl[0]] * 3, rel=1e-4)  # two of its three turns are left, whichever is skipped
    (finding,) = found.findings
    assert "every block is missed alike (KL" in finding.finding
    assert "missed most" not in finding.finding
