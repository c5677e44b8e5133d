"""Audits of models that carry several streams: what the audit hands on is what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import GPL, _tower, config, make, save

from mainstem.audit import run_audit
from mainstem.observe import tower_streams
from mainstem.sources import load_model, load_text, make_windows


def test_four_streams_of_a_foreign_model(tmp_path: Path) -> None:
    found = run_audit(config(make("four_streams", tmp_path)))
    assert found.streams is not None
    last = found.streams.blocks[-1]
    # Sinkhorn's matrices are doubly stochastic: their product has largest singular value 1 and loses nothing.
    assert last.product_gain == pytest.approx(1.0, abs=1e-4)
    assert last.embed_weight == pytest.approx(1.0, abs=1e-4)
    text = next(f.finding for f in found.findings if f.number == 3)
    assert "4 streams: after the last block" in text
    assert "largest singular value 1;" not in text  # no figure of reads follows
    assert any("reads has no figure" in note for note in found.provenance["notes"])


@pytest.mark.parametrize("connection", ["hyper_connections", "frac_connections"])
def test_a_tower_is_asked_itself(connection: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = _tower(connection=connection)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    folder = save(model.eval(), tmp_path / connection)
    found = run_audit(config(folder, only=("writes",)))
    loaded = load_model(str(folder))
    windows = make_windows(loaded.tokenizer, load_text(str(GPL)), num_tokens=90, window=16, batch_size=1)
    ids = next(iter(windows)).input_ids
    assert found.streams == tower_streams(loaded.model.tower, ids)
    text = next(f.finding for f in found.findings if f.number == 3)
    assert ("of its weight on the embedding" in text) == (connection == "hyper_connections")


def test_one_stream_has_no_part_of_it(tmp_path: Path) -> None:
    assert run_audit(config(make("llama", tmp_path), only=("writes",))).streams is None
