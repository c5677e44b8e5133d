"""The corpus benchmark reads as much text as it says and leaves a line with what it measured."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import audit_corpus
from mainstem.audit._passes import Passes

TESTS = Path(__file__).parents[1]


def test_a_text_goes_on_for_ever(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("one two", "utf-8")
    pieces = itertools.islice(audit_corpus.endless(str(text)).chunks(), 3)
    assert "".join(pieces) == "one two" * 3


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.syspath_prepend(str(TESTS / "sources"))
    monkeypatch.syspath_prepend(str(TESTS / "audit"))
    folder = importlib.import_module("tiny_models").make("llama", tmp_path)
    text, out = tmp_path / "text.txt", tmp_path / "out.jsonl"
    text.write_text("the quick brown fox jumps over the lazy dog\n", "utf-8")
    monkeypatch.setattr(Passes, "_batch", Passes._batch)  # so that it is put back
    options = [
        "--tokens",
        "320",
        "--window",
        "16",
        "--batch-size",
        "4",
        "--bare-every",
        "2",
        "--no-lens",
        "--only",
        "books",
    ]
    monkeypatch.setattr(
        sys, "argv", ["x", "--model", str(folder), "--text", str(text), "--out", str(out), *options]
    )
    audit_corpus.main()
    found = json.loads(out.read_text("utf-8"))
    assert found["tokens"] == 320
    assert 0 < found["peak_mib_after_a_tenth"] <= found["peak_mib_at_the_end"]
    assert found["audit_tokens_per_s"] < found["bare_tokens_per_s"]
    assert found["ratio"] > 1
