"""Audits of towers whose stream no data flow shows: gates, histories, norms of several states."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tiny_models import GPL, _tower, config, save
from torch.nn import functional
from typer.testing import CliRunner

from mainstem.audit import QUESTIONS, run_audit
from mainstem.audit.schema_page import load_schema
from mainstem.cli import app
from mainstem.observe import tower_streams
from mainstem.report import to_json
from mainstem.sources import load_model, load_text, make_windows


def _saved(folder: Path, connection: str, noise: float = 0.05, **options: Any) -> Path:
    torch.manual_seed(1)
    model = _tower(**{"connection": connection, "num_blocks": 4, **options})
    for parameter in model.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    return save(model.eval(), folder / connection)


def test_depth_attention_is_asked_all_questions(tmp_path: Path) -> None:
    folder = _saved(tmp_path, "attention_residuals")
    settings = config(folder, batch_size=1, tokens=16, sweep=True)
    found = run_audit(settings)
    loaded = load_model(str(folder))
    windows = make_windows(loaded.tokenizer, load_text(settings.text), num_tokens=16, window=16, batch_size=1)
    wanted = tower_streams(loaded.model.tower, next(iter(windows)).input_ids)
    assert found.streams == wanted  # of one window: what follows is of the same tokens
    for block, state in zip(found.blocks, wanted.blocks, strict=True):
        assert block.resid_norm_mean == pytest.approx(state.state.whole_norm, rel=1e-5)
        ratios = {write.kind: write.whole_ratio for write in state.writes}
        assert block.attn_write_ratio == pytest.approx(ratios["attn"], rel=1e-5)
        assert block.mlp_write_ratio == pytest.approx(ratios["mlp"], rel=1e-5)
    assert found.blocks[-1].lens_kl == pytest.approx(0, abs=1e-9)
    assert found.blocks[0].lens_kl is not None
    assert found.blocks[0].lens_kl > 1e-4
    assert found.identity is not None
    assert found.attribution is not None
    parts = sum(part.logit for part in found.attribution.parts)
    assert parts == pytest.approx(found.attribution.before, abs=1e-5)
    assert found.books.continuity == 0
    assert found.provenance["stream"]["carry"] == ["mix"]
    text = next(f.finding for f in found.findings if f.number == 3)
    assert " A history: the last sublayer has " in text
    # What has no meaning is null, and says why.
    assert found.gradient is None
    assert all(block.absorbed_bfloat16 == {} for block in found.blocks)
    notes = " ".join(found.provenance["notes"])
    for what in (
        "gradient figures are null",
        "write nothing, 0 for what",
        "absorbed_bfloat16 and absorbed_float16 are",
    ):
        assert what in notes


@pytest.mark.parametrize(
    "connection", ["attention_residuals", "mudd", "unet_skips", "reversible", "b2t", "highway", "ngpt"]
)
@torch.no_grad()
def test_a_sweep_is_that_of_towers_without_the_block(connection: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path, connection, num_blocks=6)
    settings = config(folder, only=("damage", "removal"), sweep_windows=6, batch_size=6, dtype="float64")
    result = run_audit(settings)
    jsonschema.Draft202012Validator(load_schema()).validate(json.loads(to_json(result)))
    loaded = load_model(str(folder))
    windows = make_windows(loaded.tokenizer, load_text(settings.text), num_tokens=90, window=16, batch_size=6)
    (window,) = windows
    ids, mask = window.input_ids, window.attention_mask
    assert not mask.all()  # the last window is padded
    silenced = connection not in ("highway", "ngpt")

    def without(blocks: Sequence[int]) -> torch.Tensor:
        model = copy.deepcopy(loaded.model).double()
        for block in blocks:
            for name, weight in model.tower.blocks[block].named_parameters():
                if silenced and ("out_proj" in name or "down_proj" in name):
                    weight.zero_()
            if not silenced:
                model.tower.blocks[block].forward = lambda stream, *args: stream
        return model(input_ids=ids, attention_mask=mask).logits

    def loss(logits: torch.Tensor) -> float:
        targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        return float(functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten()))

    damage, whole = result.damage, without([])
    assert damage is not None
    assert (damage.silenced, damage.restarted, damage.tokens) == (silenced, True, 90)
    for block in damage.blocks:
        logits = without([block.block])
        kl = functional.kl_div(logits.log_softmax(-1), whole.softmax(-1), reduction="none").sum(-1)
        assert block.kl == pytest.approx(float(kl[mask.bool()].mean()), rel=1e-9)
        assert block.removal_loss == pytest.approx(loss(logits) - loss(whole), abs=1e-12)
    assert max(b.kl for b in damage.blocks) > 1e-5
    for plan in damage.plans:
        assert plan.removal_loss == pytest.approx(loss(without(plan.blocks)) - loss(whole), abs=1e-12)
    assert len(damage.plans) == 3
    said = {f.number: f.finding for f in result.findings}
    assert said[6].startswith("Made to write nothing one at a time" if silenced else "Skipped one at a time")
    assert ("sublayers were made to write nothing" in " ".join(result.provenance["notes"])) == silenced


@pytest.mark.parametrize("connection", ["dense_former", "mudd"])
def test_at_the_start_it_is_audited_as_pre_norm(connection: str, tmp_path: Path) -> None:
    folders = [_saved(tmp_path, name, noise=0.0) for name in (connection, "pre_norm")]
    own = load_model(str(folders[1])).model
    other = load_model(str(folders[0])).model
    weights = own.state_dict()
    other.load_state_dict({**other.state_dict(), **weights})
    save(other, folders[0])
    ours, plain = (run_audit(config(folder)) for folder in folders)
    for a, b in zip(ours.blocks, plain.blocks, strict=True):
        found, wanted = _numbers(dataclasses.asdict(a)), _numbers(dataclasses.asdict(b))
        del wanted["gradient_norm"]  # of a history there is none
        assert "absorbed_bfloat16 mlp rest" in wanted
        assert {name: found[name] for name in wanted} == pytest.approx(
            wanted, rel=1e-4, abs=1e-6, nan_ok=True
        )
    assert ours.loss is not None
    assert plain.loss is not None
    assert ours.loss.nll == pytest.approx(plain.loss.nll, rel=1e-6)
    assert ours.identity is not None
    assert plain.identity is not None
    assert ours.identity.carried_share == plain.identity.carried_share == pytest.approx(1)
    assert ours.identity.final_share == pytest.approx(plain.identity.final_share, rel=1e-5)


def _numbers(figures: dict[str, Any], where: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            found.update(_numbers(value, f"{where}{name} "))
        elif isinstance(value, int | float):
            found[where + name] = value
    return found


def test_a_gate_has_gradients(tmp_path: Path) -> None:
    found = run_audit(config(_saved(tmp_path, "highway"), only=("signals",)))
    assert found.gradient is not None
    assert found.blocks[0].gradient_norm is not None


def test_a_tower_that_is_mapped_in_part_is_asked_itself(tmp_path: Path) -> None:
    found = run_audit(config(_saved(tmp_path, "backout"), only=("growth",)))
    assert len(found.blocks) == 4


def test_the_command(tmp_path: Path) -> None:
    folder, out = _saved(tmp_path, "delta_attention_residuals"), tmp_path / "out"
    common = ["audit", str(folder), "--text", str(GPL), "--tokens", "48", "--window", "16", "--out", str(out)]
    ran = CliRunner().invoke(app, common)
    assert ran.exit_code == 0, ran.output
    assert len(json.loads((out / "audit.json").read_text("utf-8"))["blocks"]) == 4


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_alone(question: str, tmp_path: Path) -> None:
    found = run_audit(config(_saved(tmp_path, "attention_residuals"), only=(question,), tokens=32))
    assert len(found.blocks) == 4
    assert (found.streams is not None) == (question == "writes")
