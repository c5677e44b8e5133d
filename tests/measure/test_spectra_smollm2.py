"""SmolLM2-135M-Instruct's spectra against those of another program; the setting of
tests/audit/test_smollm2_reference.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mainstem.measure import Batch, StateSpectra, StreamSpectra
from mainstem.observe import find_stream, record
from mainstem.sources import load_model, load_text, make_windows

pytestmark = pytest.mark.slow

# After each block: participation ratio, and effective rank of the covariance's eigenvalues.
# fmt: off
PARTICIPATION = (
    30.5, 40.6, 2.4, 2.8, 3.2, 3.7, 4.3, 5.2, 8.3, 29.1, 47.6, 47.7, 49.9, 50.4, 51.8,
    50.7, 58.3, 60.0, 58.6, 60.9, 59.4, 62.2, 60.5, 57.4, 54.1, 60.9, 62.6, 55.8, 55.3, 12.0,
)
EIGENVALUE_RANK = (
    98, 116, 11, 15, 19, 22, 27, 32, 49, 103, 135, 134, 134, 137, 138,
    135, 153, 157, 155, 162, 156, 160, 154, 155, 154, 164, 166, 147, 145, 53,
)
# fmt: on


@pytest.fixture(scope="module")
def states(gpl_text: Path) -> list[StateSpectra]:
    loaded = load_model("smollm2")
    windows = make_windows(
        loaded.tokenizer, load_text(str(gpl_text)), num_tokens=2048, window=256, batch_size=4
    )
    reducer, found = StreamSpectra(None), None
    for window in windows:
        inputs = window.inputs_for(loaded.model)
        with torch.no_grad():
            found = found or find_stream(loaded.model, inputs)
            batch = Batch(mask=window.attention_mask.bool(), token_ids=window.input_ids)
            record(loaded.model, inputs, found, [reducer], batch=batch)
    return list(reducer.result().states)


def test_columns(states: list[StateSpectra]) -> None:
    after = [state.whole for state in states[1:]]
    assert [s.participation_ratio for s in after] == pytest.approx(PARTICIPATION, abs=0.06)
    assert [s.eigenvalue_rank for s in after] == pytest.approx(EIGENVALUE_RANK, abs=0.6)


def test_29_tokens_of_2040_decide_the_participation_ratio_after_block_2(states: list[StateSpectra]) -> None:
    found = states[3]
    assert found.whole.num_tokens - found.typical.num_tokens == 29
    assert found.whole.participation_ratio == pytest.approx(2.4, abs=0.06)
    assert found.typical.participation_ratio == pytest.approx(29.2, abs=0.06)
    ranks = [found.whole, found.typical, states[12].whole, states[21].whole]
    assert [r.effective_rank for r in ranks] == pytest.approx([324, 377, 390, 419], abs=0.6)
