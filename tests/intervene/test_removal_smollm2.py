"""What SmolLM2-135M-Instruct loses with each of its blocks, on 8 windows of 256 tokens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mainstem.intervene import sweep
from mainstem.observe import find_stream
from mainstem.sources import load_model, load_text, make_windows

pytestmark = pytest.mark.slow

# dNLL, nats a token, measured with plain module hooks (fp32, first 2,048 tokens of the GPL-3 text, no BOS).
REMOVAL = [
    6.9877, 3.1677, 0.6870, 0.1396, 0.0870, 0.1353, 0.2621, 0.2444, 1.2085, 0.6255,
    0.4054, 1.5420, 0.1417, 0.1497, 0.1005, 0.1809, 0.0904, 0.1149, 0.1286, 0.2332,
    0.2926, 0.2754, 0.2312, 0.2158, 0.5236, 0.1497, 0.2279, 0.3418, 1.4113, 2.2439,
]  # fmt: skip


def test_removal_loss_by_block(gpl_text: Path) -> None:
    loaded = load_model("smollm2")
    windows = make_windows(loaded.tokenizer, load_text(gpl_text), num_tokens=2048, window=256, batch_size=2)
    batches = [batch.inputs_for(loaded.model) for batch in windows]
    found = find_stream(loaded.model, batches[0])
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        result = sweep(loaded.model, batches, found)
    finally:
        torch.set_num_threads(threads)
    assert result.restarted
    assert [f.floor for f in result.floors] == list(range(30))
    off = {f.floor: abs(f.nll_delta - REMOVAL[f.floor]) for f in result.floors}
    print(
        {f.floor: round(f.nll_delta, 4) for f in result.floors}, f"largest deviation {max(off.values()):.2e}"
    )
    assert {floor: error for floor, error in off.items() if error > 2e-3} == {}
    assert all(f.num_tokens == 2048 - 8 for f in result.floors)
