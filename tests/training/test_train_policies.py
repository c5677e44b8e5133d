"""What changes how a run computes and not what: checkpointed activations, compiled blocks, recorded steps."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tiny_runs import log_of, same_weights, tiny, weights_of

import mainstem.training.run
from mainstem.errors import ConfigError
from mainstem.tower import Block, compile_blocks
from mainstem.training import StreamMonitor, train

DROPOUT = {"dropout": 0.1}
# Dynamo asks every tensor for its gradient and hides the warning, but not where warnings are errors.
DYNAMO = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "run"
    train(tiny("mhc", tower=DROPOUT), out)
    return out


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_checkpointed_activations_change_nothing(name: str, plain: Path, tmp_path: Path) -> None:
    seen: list[bool] = []

    class Look(StreamMonitor):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(kwargs["model"].tower.gradient_checkpointing)

    train(tiny("mhc", tower=DROPOUT, trainer={name: True}), tmp_path / "run", callbacks=[Look(every=100)])
    assert seen == [True] * 8
    assert log_of(tmp_path / "run", "loss", "grad_norm") == log_of(plain, "loss", "grad_norm")
    assert same_weights(tmp_path / "run", plain)


@DYNAMO
def test_compiled_blocks_are_trained_and_saved_under_their_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[int] = []

    def eager(tower: Any) -> None:
        compile_blocks(tower, backend="eager")
        compiled.append(sum(block.compiled is not None for block in tower.blocks if isinstance(block, Block)))

    monkeypatch.setattr(mainstem.training.run, "compile_blocks", eager)
    train(tiny(), tmp_path / "plain")
    assert not compiled  # CPU
    train(tiny(compile=True), tmp_path / "compiled")
    assert compiled == [2]
    assert weights_of(tmp_path / "compiled").keys() == weights_of(tmp_path / "plain").keys()
    for (_, one), (_, two) in zip(
        log_of(tmp_path / "compiled", "loss"), log_of(tmp_path / "plain", "loss"), strict=True
    ):
        assert one == pytest.approx(two, abs=1e-5)


@DYNAMO
def test_a_compiled_run_resumes_uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = functools.partial(compile_blocks, backend="eager")
    monkeypatch.setattr(mainstem.training.run, "compile_blocks", eager)
    train(tiny(compile=True, trainer={"save_total_limit": 4}), tmp_path / "run")
    last = tmp_path / "run" / "checkpoint-8"
    last.rename(tmp_path / "gone")
    result = train(tiny(trainer={"save_total_limit": 4}), tmp_path / "run", resume=True)
    assert result.steps == 8


def test_bf16_keeps_weights_and_stream_in_fp32(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    class Look(StreamMonitor):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kwargs["model"].tower.blocks[0].register_forward_hook(
                lambda module, inputs, output: seen.append(output.dtype)
            )

    train(tiny(trainer={"bf16": True, "max_steps": 2}), tmp_path / "run", callbacks=[Look(every=100)])
    assert set(seen) == {torch.float32}
    assert {t.dtype for t in weights_of(tmp_path / "run").values()} == {torch.float32}


def test_what_cannot_be_compiled_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mainstem.connections import PreNorm

    monkeypatch.setattr(PreNorm, "refuses", {"compile": "it says so."}, raising=False)
    with pytest.raises(ConfigError, match=r"cannot be compiled: it says so\. Leave out --compile"):
        train(tiny(compile=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()
