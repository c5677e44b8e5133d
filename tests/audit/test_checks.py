"""What is refused before an audit begins, and what torch's own errors become."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import VOCAB, config, make, save
from torch import nn

from mainstem.audit import run_audit
from mainstem.audit._checks import check_device, clear_failures, window_that_fits
from mainstem.errors import ConfigError, MainstemError


def test_devices() -> None:
    for device in (None, "auto", "cpu"):
        check_device(device)
    for device in ("cuda:63", "meta", "abacus", "cpu:x"):
        with pytest.raises(MainstemError, match=r"cannot be used here \(.+\)\. Choose --device cpu"):
            check_device(device)


def test_the_longest_window_of_a_roberta_is_the_longest_that_runs(tmp_path: Path) -> None:
    """Its first position comes after its padding: a table of 20 rows has room for 18 tokens."""
    settings = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(
            **settings, vocab_size=VOCAB, max_position_embeddings=20, pad_token_id=1, type_vocab_size=1
        )
    )
    folder = save(model, tmp_path / "roberta")
    assert window_that_fits(model, 18) == 18
    assert len(run_audit(config(folder, window=18, tokens=36)).blocks) == 2
    with pytest.raises(MainstemError, match="A window of 19 tokens is longer than the model's 18 positions"):
        run_audit(config(folder, window=19, tokens=38))


def test_a_model_that_names_no_positions_takes_any_window(tmp_path: Path) -> None:
    result = run_audit(config(make("mamba", tmp_path), window=80, tokens=160))
    assert result.provenance["text"]["num_windows"] == 2


def test_torch_errors_in_plain_words() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(MainstemError, match="smaller --batch-size"), clear_failures(model):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    with (
        pytest.raises(MainstemError, match=r"Linear cannot run in this dtype .*not implemented for"),
        clear_failures(model),
    ):
        raise RuntimeError("\"addmm\" not implemented for 'Half'\nmore")
    with pytest.raises(RuntimeError, match="a fault of ours") as fault, clear_failures(model):
        raise RuntimeError("a fault of ours")
    assert not isinstance(fault.value, MainstemError)


@pytest.mark.parametrize(
    "change", [{"tokens": 1}, {"window": 1}, {"batch_size": 0}, {"rounding_every": 0}, {"pad_side": "top"}]
)
def test_choices_that_cannot_be(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"at least|must be|must hold"):
        config("anything", **change)
