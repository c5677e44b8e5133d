"""`mainstem train` as a user types it: what it prints, where, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("typer")

from tiny_runs import GPL

from interrupts import interrupt
from mainstem import cli

OPTIONS = [
    "--depth", "2", "--width", "16", "--heads", "2", "--window", "16", "--tokenizer", "byte", "--text", GPL,
    "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "128",
]  # fmt: skip


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command in this process and return its status."""
    monkeypatch.setattr(sys, "argv", ["mainstem", "train", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    return 0


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert command(monkeypatch, *OPTIONS, "--max_steps", 6, "--logging_steps", 3, "--out", out) == 0
    printed, told = capsys.readouterr()
    lines = printed.splitlines()
    assert lines[0].startswith("6 steps, ")
    result = json.loads((out / "train.json").read_text())["result"]
    assert lines[1] == (
        f"held-out loss {result['eval_loss']:.3f} nats a token, {result['bits_per_byte']:.3f} bits a byte"
    )
    assert lines[-1] == f"wrote {out}"
    assert "\r" not in printed + told
    assert "tower: 2 blocks, width 16, 2 heads, pre_norm: " in told
    assert "learning rate 0.014 (from depth)" in told  # 2e-3 * sqrt(24 * 64 / (2 * 16))
    assert "step 6/6: loss " in told
    assert "Writing model shards" not in told
    assert sum("bits a byte" in line for line in told.splitlines()) == 6  # one line an evaluation


def test_what_was_written_reads_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import mainstem.tower.hf  # noqa: F401  # registers the architecture

    out = tmp_path / "run"
    quick = ["--max_steps", 2, "--eval_strategy", "no", "--save_strategy", "no"]
    assert command(monkeypatch, *OPTIONS, *quick, "--out", out) == 0
    capsys.readouterr()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    ids = tokenizer("To be", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "To be"
    assert torch.isfinite(model.eval()(ids).logits).all()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max_stps", "3"], "did you mean --max_steps?"),
        (["cake"], "There is no recipe 'cake'"),
        (["--connection", "cake"], "cake"),
        (["--depth", "0"], "depth=0 must be at least 1"),
        (["--text", "./no/such/file.txt"], "There is no file or folder './no/such/file.txt'"),
        (["--tokenizer", "bpe:9"], "at least 257"),
        (["--max_steps", "3", "tower96"], "put it first"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, *arguments, "--out", tmp_path / "run") == 1
    printed, told = capsys.readouterr()
    assert printed == ""
    (line,) = told.strip().splitlines()
    assert line.startswith("mainstem: ")
    assert says in line
    assert not (tmp_path / "run" / "train.json").exists()


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = [
        *OPTIONS,
        "--max_steps",
        "100000",
        "--save_steps",
        "5",
        "--eval_strategy",
        "no",
        "--out",
        str(out),
    ]
    said = tmp_path / "said"
    with said.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "mainstem", "train", *arguments], stderr=stderr, text=True
        )
        # Any of them: the first is removed when there are three, which may be before we look again.
        while process.poll() is None and not list(out.glob("checkpoint-*")):
            time.sleep(0.05)
        interrupt(process)
    told = said.read_text()
    last = told.strip().splitlines()[-1]
    assert process.returncode == cli.INTERRUPTED
    assert last.startswith("mainstem: interrupted; the same command with --resume goes on from checkpoint-")
    assert "Traceback" not in told
