"""Audits of towers whose stream no data flow shows: gates, histories, norms of several states."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import GPL, _tower, config, save
from typer.testing import CliRunner

from mainstem.audit import QUESTIONS, run_audit
from mainstem.cli import app
from mainstem.observe import tower_streams
from mainstem.sources import load_model, load_text, make_windows


def _saved(folder: Path, connection: str, noise: float = 0.05, **options: Any) -> Path:
    torch.manual_seed(1)
    model = _tower(connection=connection, num_blocks=4, **options)
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
    assert found.damage is None
    assert all(block.absorbed_bfloat16 == {} for block in found.blocks)
    notes = " ".join(found.provenance["notes"])
    for what in ("gradient figures are null", "damage is null", "absorbed_bfloat16 and absorbed_float16 are"):
        assert what in notes


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
