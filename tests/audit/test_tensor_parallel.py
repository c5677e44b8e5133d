"""A model whose weights two processes share has the figures of the model in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel_worker as worker
import tiny_models as tiny
import torch
import transformers
from tiny_sources import llama_config

from mainstem.audit import AuditConfig, run_audit
from mainstem.errors import SourceError
from mainstem.sources import load_model

SIZE: dict[str, Any] = {
    **{"vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
}
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(llama_config(num_hidden_layers=3, num_key_value_heads=2)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZE)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZE, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZE)),  # biases, sharded too
}
DIFFERENCES = {"lens_kl", "lens_reverse_kl", "kl", "removal_loss", "error", "logit", "before", "after"}
"""Figures that are small differences of fp32 numbers of order one, so that their error is absolute."""
ONE_ENTRY = 2e-3
"""What one entry more or less that rounding absorbs makes of their share, in so few tokens."""


def assert_close(one: Any, other: Any, at: str) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for name in one.keys() - {"provenance", "findings"}:
            assert_close(one[name], other[name], f"{at}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), at
        for number, (x, y) in enumerate(zip(one, other, strict=True)):
            assert_close(x, y, f"{at}[{number}]")
    elif isinstance(one, float):
        absolute = 1e-6 if at.rpartition(".")[2] in DIFFERENCES else 1e-7
        absolute = ONE_ENTRY if ".absorbed_" in at else absolute
        assert other == pytest.approx(one, rel=1e-5, abs=absolute), at
    else:
        assert one == other, at


def test_one_process_shares_with_nobody(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="torchrun --nproc-per-node N"):
        load_model(tiny.make("one_block", tmp_path), device="tp")


def launched(*command: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", "2", *command),
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.mark.slow
def test_the_command_shares_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    folder = tiny.save(MODELS["llama"]().eval(), tmp_path / "llama")
    options = ["--text", str(tiny.GPL), "--tokens", "90", "--window", "16", "--device", "tp", "--sweep"]
    command = launched("-m", "mainstem", "audit", str(folder), *options, "--out", str(tmp_path / "out"))
    ran = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("wrote ") == 3  # one process writes
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"audit.json", "audit.csv", "report.html"}
    shared = json.loads((tmp_path / "out" / "audit.json").read_text("utf-8"))
    assert shared["provenance"]["model"]["device"] == "cpu, shared by 2 processes"
    plain = run_audit(AuditConfig(model=str(folder), text=str(tiny.GPL), tokens=90, window=16, sweep=True))
    assert_close(json.loads(json.dumps(plain.to_dict())), shared, "command")


@pytest.mark.slow
def test_two_processes_that_share_the_weights(tmp_path: Path) -> None:
    folders: list[Path] = []
    for name, make in MODELS.items():
        torch.manual_seed(1)
        folders.append(tiny.save(make().eval(), tmp_path / name))
    unplanned = tiny.make("gpt2", tmp_path)
    start = launched(worker.__file__, str(tmp_path), str(unplanned), *map(str, folders))
    ran = subprocess.run(start, capture_output=True, text=True, env=environment(), timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text("utf-8")) for rank in range(2))
    for folder in folders:
        plain = worker.figures(load_model(folder), folder)
        assert_close(plain, first[folder.name], folder.name)
        assert all(plain[name] for name in ("gradient", "identity", "attribution", "damage", "probe"))
        assert first[folder.name]["provenance"]["model"]["device"] == "cpu, shared by 2 processes"
        del first[folder.name]["provenance"]["created"], second[folder.name]["provenance"]["created"]
    assert first == second
    assert "mlp.up_proj (Linear) in a way that is not known" in first["refused"]["by torch"]
    assert "its weights cannot be read (ValueError: " in first["refused"]["no plan"]
    assert "tp_plan" in first["refused"]["no plan"]
    assert "'sequence_parallel'" in first["refused"]["by position"]
