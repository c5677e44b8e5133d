"""`prune`: its figures against models really cut, its goals kept, every mistake answered in a sentence."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tiny_sources import llama_config, train_tokenizer
from transformers import AlbertConfig, AlbertForMaskedLM, AutoModelForCausalLM, LlamaForCausalLM

from mainstem import cli
from mainstem.errors import ConfigError
from mainstem.measure import LossSums, next_token_loss
from mainstem.report.prune import curves_csv, prune_lines
from mainstem.sources import load_model, load_text, make_windows
from mainstem.surgery import PLANNERS, Cut, Judge, cut, save_pruned
from mainstem.surgery.prune import PruneConfig, Pruning, prune

ROOT = Path(__file__).parents[2]
GPL = ROOT / "tests" / "data" / "gpl-3.0.txt"
NUM_BLOCKS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that learnt a little, so that its blocks are worth something; block 1 makes outliers."""
    torch.manual_seed(3)
    model: Any = LlamaForCausalLM(llama_config(num_hidden_layers=NUM_BLOCKS))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(100.0)
    tokenizer = train_tokenizer(GPL.read_text("utf-8"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in make_windows(tokenizer, load_text(str(GPL)), num_tokens=16_000, window=32, batch_size=8):
        inputs = batch.inputs_for(model)
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    out = tmp_path_factory.mktemp("prune") / "llama"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def config(folder: Path, **changes: Any) -> PruneConfig:
    small = {"tokens": 160, "eval_tokens": 130, "window": 32, "batch_size": 3, "rounds": 1}
    given = {"model": str(folder), "text": str(GPL), "eval_text": "sotu", **small, **changes}
    return PruneConfig(**given)


@pytest.fixture(scope="module")
def two(folder: Path) -> Pruning:
    return prune(config(folder, num=2))


def loss(model: Any, tokenizer: Any, text: str, tokens: int) -> float:
    total = LossSums()
    windows = make_windows(tokenizer, load_text(text), num_tokens=tokens, window=32, batch_size=3)
    with torch.no_grad():
        for batch in windows:
            inputs = batch.inputs_for(model)
            logits = model(**inputs).logits
            total += next_token_loss(logits, inputs["input_ids"], inputs["attention_mask"].bool())
    return total.nll


def test_curves_are_the_losses_of_models_really_cut(folder: Path, two: Pruning) -> None:
    loaded = load_model(str(folder))
    whole = {t: loss(loaded.model, loaded.tokenizer, t, n) for t, n in ((str(GPL), 160), ("sotu", 130))}
    assert [c["planner"] for c in two.record["curves"]] == [
        "beam",
        "influence",
        "angular",
        "single",
        "greedy",
    ]
    for curve in two.record["curves"]:
        assert curve["finished"]
        assert [len(p["removed"]) for p in curve["points"]] == [0, 1, 2]
        for point in curve["points"][1:]:
            shorter = cut(loaded.model, Cut(blocks=tuple(point["removed"])))
            after = {t: loss(shorter, loaded.tokenizer, t, n) for t, n in ((str(GPL), 160), ("sotu", 130))}
            assert point["calibration"] == after[str(GPL)] - whole[str(GPL)]
            assert point["held_out"] == after["sotu"] - whole["sotu"]


def test_kl_and_top1_are_those_of_the_two_models(folder: Path, two: Pruning) -> None:
    loaded = load_model(str(folder))
    windows = make_windows(loaded.tokenizer, load_text("sotu"), num_tokens=130, window=32, batch_size=3)
    kl: list[torch.Tensor] = []
    same: list[torch.Tensor] = []
    with torch.no_grad():
        for batch in windows:
            inputs = batch.inputs_for(loaded.model)
            real = inputs["attention_mask"].bool()
            p, q = (m(**inputs).logits[real].double().log_softmax(-1) for m in (loaded.model, two.model))
            kl.append((p.exp() * (p - q)).sum(-1))
            same.append(p.argmax(-1) == q.argmax(-1))
    held_out = two.record["loss"]["held_out"]
    assert held_out["kl"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-4)
    assert held_out["kl"] > 1e-3
    assert held_out["top1"] == pytest.approx(float(torch.cat(same).double().mean()), abs=1e-12)


def test_sizes_are_those_of_the_models(two: Pruning) -> None:
    before, after = two.record["size"]["before"], two.record["size"]["after"]
    model: Any = two.model
    assert (before["num_blocks"], after["num_blocks"]) == (NUM_BLOCKS, NUM_BLOCKS - 2)
    assert after["num_parameters"] == model.num_parameters()
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    assert before["num_parameters"] - after["num_parameters"] == 2 * block
    assert before["weight_bytes"] - after["weight_bytes"] == 2 * 4 * block
    c = model.config
    head = c.hidden_size // c.num_attention_heads
    assert after["cache_bytes_per_token"] == 3 * 2 * c.num_key_value_heads * head * 4
    assert before["cache_bytes_per_token"] == NUM_BLOCKS * 2 * c.num_key_value_heads * head * 4


def test_what_is_saved_is_what_was_measured(two: Pruning, tmp_path: Path) -> None:
    out = save_pruned(two.model, two.tokenizer, tmp_path / "out", two.origin, two.record)
    read = AutoModelForCausalLM.from_pretrained(out)
    assert loss(read, two.tokenizer, "sotu", 130) == two.record["loss"]["held_out"]["after"]
    says = json.loads((out / "prune.json").read_text("utf-8"))
    assert says["schema"] == "mainstem.prune/1"
    assert says["removed"]["blocks"] == says["curves"][0]["points"][-1]["removed"]
    page = (ROOT / "docs" / "prune.md").read_text("utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(says)


def test_a_block_that_makes_outliers_is_named(folder: Path) -> None:
    found = prune(config(folder, num=4, planner="influence", planners=()))
    jumps = {o["block"]: o["what"] for o in found.record["outliers"]}
    assert jumps[1] == "creates"
    removed = found.record["curves"][0]["points"][-1]["removed"]
    assert [w for w in found.record["warnings"] if "outlier" in w] == [
        f"block {b} {jumps[b]} an outlier (largest activation {o['before']:.0f} -> {o['after']:.0f}) and is "
        "among those removed."
        for b, o in ((o["block"], o) for o in found.record["outliers"])
        if b in removed
    ]


def known(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """The first curve on the text that the model learnt, where every block is worth something."""
    given = {"eval_text": str(GPL), "eval_tokens": 2000, "planners": (), **changes}
    return prune(config(folder, **given)).record["curves"][0]["points"]


def test_a_loss_budget_is_kept_and_used(folder: Path) -> None:
    every = known(folder, num=4, planner="greedy")
    costs = [p["held_out"] for p in every]
    steps = [
        n for n in range(1, 4) if costs[n + 1] > max(*costs[1 : n + 1], 0.0)
    ]  # none before costs as much
    assert steps
    for n in steps:
        budget = (costs[n + 1] + max(*costs[1 : n + 1], 0.0)) / 2
        assert known(folder, loss_budget=budget, planner="greedy") == every[: n + 1]


class Costliest:
    """A planner of one's own: the unit whose absence costs most."""

    name = "costliest"

    def most_passes(self, num_units: int, num: int) -> int:
        return 1 + num_units

    def steps(self, judge: Judge, num: int) -> Iterator[tuple[int, ...]]:
        yield (max(judge.units, key=lambda unit: judge.rank([unit])),)


def test_a_budget_below_the_first_step_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNERS, "costliest", Costliest())
    first = known(folder, num=1, planner="costliest")[1]["held_out"]
    assert first > 0
    with pytest.raises(ConfigError, match="give a larger budget"):
        known(folder, loss_budget=first / 2, planner="costliest")


def test_a_speed_up_is_met(folder: Path) -> None:
    found = prune(config(folder, speed_up=1.05, planner="influence", planners=(), rounds=5))
    assert 1 <= len(found.origin.what.blocks) < NUM_BLOCKS


@pytest.mark.parametrize("unit", ["attention", "feed_forward"])
def test_sublayers_are_silenced(folder: Path, unit: Any) -> None:
    found = prune(config(folder, num=2, unit=unit))
    assert [c["planner"] for c in found.record["curves"]] == ["beam", "single", "greedy"]
    loaded = load_model(str(folder))
    after = loss(found.model, loaded.tokenizer, "sotu", 130)
    assert found.record["loss"]["held_out"]["after"] == pytest.approx(after, abs=1e-6)
    assert len(getattr(found.origin.what, unit)) == 2


def test_the_same_text_twice_is_warned_of(folder: Path) -> None:
    found = prune(config(folder, num=1, eval_text=str(GPL), eval_tokens=160, planner="influence"))
    assert found.record["warnings"][0].startswith("5 of 5 held-out windows are in the calibration text")


def test_planning_takes_no_more_passes_than_was_said(folder: Path) -> None:
    said: list[Any] = []
    found = prune(config(folder, num=3, planners=()), on_outlook=said.append)
    assert 0 < found.record["cost"]["num_passes"] <= sum(said[0].passes.values())
    assert said[0].held_bytes > 0


def test_interrupted_it_keeps_the_curves_and_cuts_nothing(folder: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if (what, done) == ("planning: greedy", 2):
            raise KeyboardInterrupt

    found = prune(config(folder, num=3, planner="single", planners=("greedy", "influence")), stop)
    assert found.model is None
    assert not found.record["finished"]
    assert [(c["planner"], len(c["points"])) for c in found.record["curves"]] == [
        ("single", 4),
        ("greedy", 3),
    ]
    assert "interrupted" in prune_lines(found.record)[1]


def test_csv_has_every_point(two: Pruning) -> None:
    rows = list(csv.DictReader(io.StringIO(curves_csv(two.record))))
    points = [p for c in two.record["curves"] for p in c["points"]]
    assert [[int(b) for b in row["removed"].split()] for row in rows] == [p["removed"] for p in points]
    assert [float(row["held_out_delta"]) for row in rows] == [p["held_out"] for p in points]


def _albert(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "embedding_size": 8}
    AlbertForMaskedLM(AlbertConfig(vocab_size=384, **sizes)).save_pretrained(tmp_path / "albert")
    train_tokenizer(GPL.read_text("utf-8")).save_pretrained(tmp_path / "albert")
    return tmp_path / "albert"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "0 goals were given"),
        ({"num": 1, "speed_up": 1.3}, "2 goals were given"),
        ({"num": 5}, "asked to remove 5 of 5"),
        ({"num": 0}, "asked to remove 0 of 5"),
        ({"loss_budget": 0.0}, "above 0"),
        ({"speed_up": 1.0}, "above 1"),
        ({"speed_up": 90.0, "planner": "influence"}, "ask for less"),
        ({"speed_up": 1.3, "unit": "attention"}, "not faster"),
        ({"num": 1, "planner": "best"}, "no planner 'best'"),
        ({"num": 1, "planners": ("best",)}, "no planner 'best'"),
        ({"num": 1, "unit": "head"}, "unit is 'head'"),
        ({"num": 1, "unit": "attention", "planner": "angular"}, "chooses whole blocks"),
        ({"num": 1, "rounds": 0}, "rounds is 0"),
    ],
)
def test_refusals(folder: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        prune(config(folder, **changes))


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kind masked, which has no next-token loss"):
        prune(config(_albert(tmp_path), num=1))


def test_the_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*args: object) -> int:
        small = ("--tokens", 64, "--eval-tokens", 64, "--window", 32, "--rounds", 1)
        texts = ("--text", GPL, "--eval-text", "sotu")
        monkeypatch.setattr(sys, "argv", ["mainstem", "prune", *map(str, (folder, *texts, *small, *args))])
        try:
            cli.main()
        except SystemExit as leaving:
            return int(leaving.code or 0)
        return 0

    out, curves = tmp_path / "out", tmp_path / "curves.csv"
    assert (
        run("--blocks", 1, "--planner", "single", "--compare", "greedy", "--out", out, "--csv", curves) == 0
    )
    ran = capsys.readouterr()
    assert "single removes 1 x block" in ran.out
    assert f"wrote {out}" in ran.out
    assert "forward passes (single" in ran.err
    assert curves.read_text("utf-8").count("\n") == 1 + 2 * 2
    assert run("--blocks", 1, "--out", out) == 1
    assert "is there already" in capsys.readouterr().err
    assert run("--blocks", 1, "--out", folder) == 1
    assert "source itself" in capsys.readouterr().err
    assert run("--blocks", 1, "--csv", tmp_path) == 1
    assert "is a folder" in capsys.readouterr().err
    assert run("--blocks", 1, "--compare", "none", "--json") == 0
    says = json.loads(capsys.readouterr().out)
    assert says["planner"] == "beam"
    assert set(PLANNERS) >= {c["planner"] for c in says["curves"]} == {"beam"}
