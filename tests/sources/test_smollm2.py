"""SmolLM2-135M-Instruct from its package: the weights to the bit, the windows of the reference."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mainstem.sources import PACKAGED, load_model, load_text, make_windows

pytestmark = pytest.mark.slow


def test_weights_equal_transformers_own_dequantisation() -> None:
    path = PACKAGED["smollm2"].locate()
    load_model("smollm2")
    begin = time.perf_counter()
    loaded = load_model("smollm2")
    print(f"smollm2 from the cache: {time.perf_counter() - begin:.2f} s")
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ours, theirs = loaded.model.state_dict(), reference.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    says = loaded.provenance
    assert says["num_parameters"] == 134_515_008
    assert says["weights_sha256"] == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_the_windows_of_the_reference(gpl_text: Path) -> None:
    tokenizer = load_model("smollm2").tokenizer
    text = load_text(gpl_text)
    windows = make_windows(tokenizer, text, num_tokens=2048, window=256, batch_size=4)
    assert windows.num_windows == 8
    assert all(bool(batch.attention_mask.all()) for batch in windows)
    assert windows.provenance["first_ids"] == [42185, 28807, 35185, 49126, 35696, 45581]
    whole = tokenizer(text.read(), add_special_tokens=False)["input_ids"]
    assert len(whole) == 7658
    assert windows.token_ids.tolist() == whole[:2048]
    assert make_windows(tokenizer, text, num_tokens=None).token_ids.tolist() == whole


def test_the_first_token_changes_the_loss(gpl_text: Path) -> None:
    """Why it is a choice: the token that this GGUF calls bos makes the text less likely, not more."""
    loaded = load_model("smollm2")
    losses: dict[str, float] = {}
    for first in ("bos", "<|endoftext|>"):
        (batch,) = make_windows(
            loaded.tokenizer, load_text(gpl_text), num_tokens=255, window=256, first_token=first
        )
        with torch.no_grad():
            logits = loaded.model(**batch.inputs_for(loaded.model)).logits[0, 1:-1]
        losses[first] = float(torch.nn.functional.cross_entropy(logits, batch.input_ids[0, 2:]))
    print(losses)
    assert losses["<|endoftext|>"] < losses["bos"]
