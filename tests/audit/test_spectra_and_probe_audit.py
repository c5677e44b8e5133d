"""Spectra and probes in an audit: where they are looked at, and that what is there is valid."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
import transformers
from tiny_models import GPL, config, make, tokenizer

from mainstem.audit import run_audit
from mainstem.audit.schema_page import load_schema
from mainstem.errors import ConfigError
from mainstem.report import to_json


def test_the_spectra_of_a_llama_are_those_of_its_hidden_states(tmp_path: Path) -> None:
    folder = make("llama", tmp_path)
    result = run_audit(config(folder, only=("growth",)))
    assert result.spectra is not None
    assert [s.state for s in result.spectra] == [0, 1, 2, 3]
    assert result.probe is None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer()(GPL.read_text("utf-8"), add_special_tokens=False)["input_ids"][:90]
    seen: list[np.ndarray] = []
    for begin in range(0, 90, 16):
        with torch.no_grad():
            window = torch.tensor([ids[begin : begin + 16]])
            seen.append(model(window, output_hidden_states=True).hidden_states[2][0, 1:].double().numpy())
    rows = np.concatenate(seen)
    s = np.linalg.svd(rows - rows.mean(0), compute_uv=False)
    share = s / s.sum()
    whole = result.spectra[2].whole
    assert whole.num_tokens == 90 - 6
    assert whole.effective_rank == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-5)
    assert whole.participation_ratio == pytest.approx((s**2).sum() ** 2 / (s**4).sum(), rel=1e-5)
    assert "states 0, 1, 2, 3" in result.provenance["sampling"]["spectra"]


def test_a_batch_of_another_size_gives_the_same_spectra(tmp_path: Path) -> None:
    folder = make("gpt2", tmp_path)
    one, other = (
        run_audit(config(folder, only=("writes",), batch_size=size, pad_side=side, dtype="float64")).spectra
        for size, side in ((1, "right"), (6, "left"))
    )
    assert one is not None
    assert other is not None
    for ours, theirs in zip(one, other, strict=True):
        assert ours.typical.effective_rank == pytest.approx(theirs.typical.effective_rank, rel=1e-5)
        assert ours.cka_last == pytest.approx(theirs.cka_last, rel=1e-5)


def test_a_probe_is_fitted_where_it_is_asked_for(tmp_path: Path) -> None:
    result = run_audit(config(make("llama", tmp_path), probe=True, tokens=800, only=("identity",)))
    assert result.probe is not None
    assert [(f.state, f.offset) for f in result.probe.figures] == [(s, o) for s in range(4) for o in range(4)]
    at = {(f.state, f.offset): f for f in result.probe.figures}
    assert at[0, 0].text > 0.9
    assert at[0, 0].types > 0.5
    assert at[0, 1].text < 0.5
    assert (result.spectra, result.attribution) == (None, None)
    assert "trained on; every 4. window" in result.provenance["sampling"]["probe"]
    found = json.loads(to_json(result))
    assert [e.message for e in jsonschema.Draft202012Validator(load_schema()).iter_errors(found)] == []


def test_a_probe_without_held_out_text_gives_no_figure(tmp_path: Path) -> None:
    result = run_audit(config(make("llama", tmp_path), probe=True, tokens=40))
    assert result.probe is None
    assert any("every 4. window is held out" in note for note in result.provenance["notes"])
    with pytest.raises(ConfigError, match="belongs to the question 'identity'"):
        config(tmp_path, probe=True, only=("growth",))
