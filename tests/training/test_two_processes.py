"""One run as two processes on CPU (gloo): DDP and FSDP2 against one process, and checkpoints between them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tiny_runs import TORCHRUN, At, free_port, log_of, tiny, together, weights_of

from mainstem.errors import ConfigError
from mainstem.training import TrainConfig, train
from mainstem.training.checkpoints import NonFiniteError, checkpoints

pytestmark = pytest.mark.slow

SCHEMES = ["pre_norm", "mhc", "attention_residuals"]
FSDP = {"fsdp": True}


def run_of(connection: str, num: int, *, fsdp: bool = False, **changes: Any) -> TrainConfig:
    """Twenty steps of eight windows: 8 on one process, 4 on each of two."""
    trainer = {
        "max_steps": 20,
        "per_device_train_batch_size": 8 // num,
        "save_steps": 10,
        "eval_steps": 10,
        "learning_rate": 3e-3,
    }
    return tiny(connection, depth=4, trainer=trainer | (FSDP if fsdp else {}), **changes)


def assert_close(one: Path, other: Path, atol: float) -> None:
    """Compare the losses of two runs step by step."""
    for name in ("loss", "eval_loss"):
        a, b = log_of(one, name), log_of(other, name)
        assert [step for step, _ in a] == [step for step, _ in b]
        worst = max(abs(x - y) for (_, x), (_, y) in zip(a, b, strict=True))
        assert worst <= atol, (name, worst)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same runs by one process, each made once."""
    folder = tmp_path_factory.mktemp("alone")

    def run(connection: str, optimizer: Any = "adamw") -> Path:
        out = folder / f"{connection}-{optimizer}"
        if not out.exists():
            train(run_of(connection, 1, optimizer=optimizer), out)
        return out

    return run


@pytest.mark.parametrize("connection", SCHEMES)
def test_ddp_equals_one_process(connection: str, alone: Any, tmp_path: Path) -> None:
    assert together(2, train, run_of(connection, 2), tmp_path / "two") == [0, 0]
    assert_close(tmp_path / "two", alone(connection), 1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("connection", SCHEMES)
def test_fsdp_equals_one_process(connection: str, optimizer: Any, alone: Any, tmp_path: Path) -> None:
    config = run_of(connection, 2, fsdp=True, optimizer=optimizer)
    assert together(2, train, config, tmp_path / "two") == [0, 0]
    # Muon orthogonalises in bf16, where sums in another order round to another number.
    assert_close(tmp_path / "two", alone(connection, optimizer), 1e-5 if optimizer == "adamw" else 2e-4)
    whole, one = weights_of(tmp_path / "two"), weights_of(alone(connection, optimizer))
    assert {n: t.shape for n, t in whole.items()} == {n: t.shape for n, t in one.items()}
    sharded = tmp_path / "two" / "checkpoint-20"
    assert (sharded / "pytorch_model_fsdp_0" / ".metadata").is_file()
    assert len(list((sharded / "pytorch_model_fsdp_0").glob("*.distcp"))) == 2
    with pytest.raises(ConfigError, match="checkpoint-20 is sharded: go on with --fsdp"):
        train(run_of(connection, 1, optimizer=optimizer), tmp_path / "two", resume=True)


@pytest.mark.parametrize("connection", SCHEMES)
def test_accumulated_gradients_equal_the_bigger_batch(connection: str, alone: Any, tmp_path: Path) -> None:
    config = run_of(connection, 1)
    trainer = {**config.trainer, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    train(TrainConfig(**{**config.to_dict(), "trainer": trainer}), tmp_path / "run")
    assert_close(tmp_path / "run", alone(connection), 1e-5)


def until_killed(config: TrainConfig, out: Path) -> None:
    """Be killed after 13 steps, all at once: one that is still in a step would end by the other's death."""

    def die(_: Any) -> None:
        (out.parent / f"after-13-{os.environ['RANK']}").touch()
        while len(list(out.parent.glob("after-13-*"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    train(config, out, callbacks=[At(13, die)])


def resumed(config: TrainConfig, out: Path) -> None:
    told: list[str] = []
    train(config, out, resume=True, tell=told.append)
    if os.environ["RANK"] == "0":
        assert "going on from checkpoint-10" in told


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("fsdp", [False, True])
def test_a_checkpoint_resumes_on_another_number_of_processes(
    fsdp: bool, before: int, after: int, alone: Any, tmp_path: Path
) -> None:
    codes = together(before, until_killed, run_of("mhc", before, fsdp=fsdp), tmp_path / "run")
    assert codes == [-signal.SIGKILL] * before
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-10"]
    assert together(after, resumed, run_of("mhc", after, fsdp=fsdp), tmp_path / "run") == [0] * after
    assert_close(tmp_path / "run", alone("mhc"), 1e-5)


def stops_together(config: TrainConfig, out: Path) -> None:
    """A NaN on the second process alone, from the first of two accumulated passes on."""

    class Spoil(At):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5 and os.environ["RANK"] == "1":
                kwargs["model"].tower.blocks[2].mlp.register_forward_hook(
                    lambda module, inputs, output: output * torch.nan
                )

    with pytest.raises(NonFiniteError, match="of step 6 is not finite") as stopped:
        train(config, out, callbacks=[Spoil(0, None)])
    assert "block 2" in str(stopped.value)
    assert "checkpoint-5 holds the parameters" in str(stopped.value)


def test_a_nan_on_one_process_stops_both(tmp_path: Path) -> None:
    config = run_of("pre_norm", 2)
    trainer = {**config.trainer, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    config = TrainConfig(**{**config.to_dict(), "trainer": trainer})
    assert together(2, stops_together, config, tmp_path / "run") == [0, 0]
    assert all(torch.isfinite(t).all() for t in weights_of(tmp_path / "run" / "checkpoint-5").values())


LAUNCHERS = {
    "torchrun": TORCHRUN,
    # --multi_gpu starts several processes, which find no GPU; --cpu starts one.
    "accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
                   "--num_machines", "1", "--main_process_ip", "127.0.0.1", "--mixed_precision", "no",
                   "--dynamo_backend", "no", "--main_process_port"],
}  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_command_under_a_launcher(launcher: str, tmp_path: Path) -> None:
    options = [
        "-m", "mainstem", "train", "--depth", "2", "--width", "16", "--heads", "2", "--window", "16",
        "--tokenizer", "byte", "--text", "text:" + "To be, or not to be, that is the question. " * 200,
        "--max_steps", "4", "--per_device_train_batch_size", "2", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    port = [str(free_port())] if launcher == "accelerate" else []
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*LAUNCHERS[launcher], *port, *options],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^wrote ", done.stdout, re.MULTILINE)) == 1
    assert "processes: 2, DDP" in done.stderr
    record = json.loads((tmp_path / "run" / "train.json").read_text())
    assert (record["processes"], record["windows_a_step"], record["result"]["steps"]) == (2, 4, 4)
