"""`mainstem convert` and `mainstem diff`, as typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tiny_sources import llama_config, train_tokenizer
from transformers import LlamaForCausalLM

from mainstem import cli


@pytest.fixture
def folder(tmp_path: Path, gpl_text: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(max_position_embeddings=128)).save_pretrained(tmp_path / "llama")
    train_tokenizer(gpl_text.read_text("utf-8")[:8000]).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["mainstem", *map(str, args)])
    try:
        cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def test_convert_then_diff(
    folder: Path,
    gpl_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "mhc"
    text = ("--text", gpl_text, "--tokens", 60, "--window", 20)
    given = ("convert", folder, "--connection", "mhc", "--set", "num_streams=2", *text, "--out", out)
    assert run(monkeypatch, *given) == 0
    said = capsys.readouterr().out
    record = json.loads((out / "convert.json").read_text("utf-8"))
    assert "-> mhc: the function is kept" in said
    assert f"{record['parameters_new']:,} new parameters" in said
    assert record["options"] == {"exact_start": True, "num_streams": 2}
    assert run(monkeypatch, "diff", folder, out, *text, "--out", tmp_path / "diff") == 0
    said = capsys.readouterr().out
    assert "no block writes otherwise" in said
    assert "blocks are matched by order; each has a partner" in said
    assert run(monkeypatch, "diff", folder, out, *text, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "diff" / "diff.json").read_text())
    assert run(monkeypatch, *given) == 1
    assert "is there already" in capsys.readouterr().err


def test_a_refusal_saves_nothing(
    folder: Path,
    gpl_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "post"
    given = ("convert", folder, "--connection", "post_norm", "--text", gpl_text, "--tokens", 60, "--out", out)
    assert run(monkeypatch, *given) == 1
    assert "post_norm does not keep what" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]
    assert run(monkeypatch, *given, "--allow-change") == 0
    assert "the function is NOT kept" in capsys.readouterr().out
