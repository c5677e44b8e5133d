"""The two towers that come with mainstem, and the audit that needs no argument."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mainstem.cli import app
from mainstem.sources import PACKAGED, TWINS, load_model, load_text


def test_they_differ_in_nothing_but_their_residuals() -> None:
    with_them, without = (load_model(name).model.config.tower for name in TWINS)
    assert (with_them["connection"], without["connection"]) == ("pre_norm", "no_residual")
    assert {k: v for k, v in with_them.items() if k != "connection"} == {
        k: v for k, v in without.items() if k != "connection"
    }
    records = [json.loads((PACKAGED[name].locate() / "train.json").read_text("utf-8")) for name in TWINS]
    assert records[0]["data"] == records[1]["data"]
    assert records[0]["config"]["trainer"] == records[1]["config"]["trainer"]


@pytest.mark.parametrize("name", TWINS)
def test_each_fits_and_says_how_it_was_made(name: str) -> None:
    folder = PACKAGED[name].locate()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 12_000_000
    card = (folder / "README.md").read_text("utf-8")
    assert "mainstem train tower96" in card
    steps = [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    assert steps == sorted(steps)
    assert steps[-1] >= 3000


def test_one_predicts_and_the_other_knows_word_frequencies_only() -> None:
    """The figures of the cards, on a part of the held-out text."""
    text = load_text("sotu-held-out").read()
    losses: list[float] = []
    for name in TWINS:
        loaded = load_model(name)
        ids = torch.tensor(loaded.tokenizer(text[:30_000])["input_ids"][: 32 * 128]).view(-1, 128)
        with torch.no_grad():
            losses.append(float(loaded.model(input_ids=ids, labels=ids).loss))
        card = (PACKAGED[name].locate() / "README.md").read_text("utf-8")
        (said,) = re.findall(r"held-out loss \| ([\d.]+) nats", card)
        assert losses[-1] == pytest.approx(float(said), abs=0.2)  # a tenth of the text
    (guess,) = re.findall(r"guessing by frequency \| ([\d.]+) nats", card)
    assert losses[0] < float(guess) - 1.5
    assert losses[1] > float(guess) - 0.2


def test_an_audit_without_a_model_shows_both(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["audit", "--tokens", "256", "--no-lens", "--out", str(tmp_path / "twins")]
    )
    assert result.exit_code == 0, result.output
    assert "tower96_no_residual: Nothing is carried" in " ".join(result.output.split())
    books = [
        json.loads((tmp_path / "twins" / name / "audit.json").read_text("utf-8"))["books"] for name in TWINS
    ]
    assert all(math.isfinite(book["additivity"]) and book["additivity"] < 1e-5 for book in books)


def test_an_audit_of_a_model_needs_a_text() -> None:
    result = CliRunner().invoke(app, ["audit", "smollm2"])
    assert result.exit_code != 0
    assert "--text" in str(result.exception)
