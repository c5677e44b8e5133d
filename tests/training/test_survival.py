"""What is left of a run that is killed, whose checkpoints are torn, whose disk is full, or that diverges."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from filelock import FileLock
from safetensors.torch import load_file
from tiny_runs import At, killed, log_of, same_weights, tiny, weights_of

from mainstem.errors import ConfigError
from mainstem.sources import is_whole
from mainstem.training import TrainConfig, TrainingStoppedError, train
from mainstem.training.checkpoints import NonFiniteError, checkpoints, last_whole

DROPOUT = {"dropout": 0.1, "attn_dropout": 0.1}


def straight(config: TrainConfig, out: Path) -> Path:
    train(config, out)
    return out


# ---- kill ----


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("connection", ["pre_norm", "mhc", "attention_residuals"])
def test_killed_and_resumed_equals_straight(connection: str, optimizer: Any, tmp_path: Path) -> None:
    config = tiny(connection, optimizer=optimizer, tower=DROPOUT)
    straight(config, tmp_path / "straight")
    assert killed(config, tmp_path / "killed", step=5) == -signal.SIGKILL
    assert [path.name for path in checkpoints(tmp_path / "killed")] == ["checkpoint-2", "checkpoint-4"]
    told: list[str] = []
    result = train(config, tmp_path / "killed", resume=True, tell=told.append)
    assert "going on from checkpoint-4" in told
    assert result.steps == 8
    for names in (("loss", "grad_norm", "learning_rate", "epoch"), ("eval_loss", "eval_bits_per_byte")):
        assert log_of(tmp_path / "killed", *names) == log_of(tmp_path / "straight", *names)
    assert [step for step, _ in log_of(tmp_path / "killed", "loss")] == list(range(1, 9))
    assert same_weights(tmp_path / "killed", tmp_path / "straight")
    states = [torch.load(tmp_path / run / "checkpoint-8" / "optimizer.pt") for run in ("killed", "straight")]
    assert_equal(*states)


def assert_equal(one: Any, other: Any) -> None:
    """Compare nested containers of tensors and values bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


def test_killed_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    config = tiny(tower=DROPOUT)
    straight(config, tmp_path / "straight")
    assert killed(config, tmp_path / "killed", step=4, writing="optimizer.pt") == -signal.SIGKILL
    assert (tmp_path / "killed" / ".saving" / "checkpoint-4" / "model.safetensors").exists()
    assert [path.name for path in checkpoints(tmp_path / "killed")] == ["checkpoint-2"]
    train(config, tmp_path / "killed", resume=True)
    assert not (tmp_path / "killed" / ".saving").exists()
    assert log_of(tmp_path / "killed", "loss") == log_of(tmp_path / "straight", "loss")
    assert same_weights(tmp_path / "killed", tmp_path / "straight")


def test_killed_before_the_first_checkpoint_starts_again(tmp_path: Path) -> None:
    config = tiny()
    straight(config, tmp_path / "straight")
    assert killed(config, tmp_path / "killed", step=1) == -signal.SIGKILL
    told: list[str] = []
    train(config, tmp_path / "killed", resume=True, tell=told.append)
    assert "no whole checkpoint: starting from the beginning" in told
    assert log_of(tmp_path / "killed", "loss") == log_of(tmp_path / "straight", "loss")


def test_a_log_between_checkpoints_is_the_same_after_a_resume(tmp_path: Path) -> None:
    """Three steps a record and two a checkpoint: the mean since the last record is in no checkpoint."""
    config = tiny(trainer={"logging_steps": 3})
    straight(config, tmp_path / "straight")
    assert killed(config, tmp_path / "killed", step=5) == -signal.SIGKILL
    train(config, tmp_path / "killed", resume=True)
    assert log_of(tmp_path / "killed", "loss") == log_of(tmp_path / "straight", "loss")


def test_a_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    config = tiny()
    before = train(config, tmp_path / "run")
    weights = weights_of(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    after = train(config, tmp_path / "run", resume=True)
    assert after.steps == 8
    assert after.eval_loss == before.eval_loss
    assert after.tokens_per_second is None
    assert all(torch.equal(weights[n], t) for n, t in weights_of(tmp_path / "run").items())


# ---- torn ----


def tear_truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / "model.safetensors", 100)


def tear_flip(checkpoint: Path) -> None:
    path = checkpoint / "optimizer.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def tear_remove(checkpoint: Path) -> None:
    (checkpoint / "scheduler.pt").unlink()


def tear_manifest(checkpoint: Path) -> None:
    (checkpoint / "mainstem.json").write_text('{"files": {')


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps whose three last checkpoints are there."""
    return straight(tiny(trainer={"save_total_limit": 3}), tmp_path_factory.mktemp("finished") / "run")


@pytest.mark.parametrize("tear", [tear_truncate, tear_flip, tear_remove, tear_manifest])
def test_a_torn_checkpoint_is_passed_over(tear: Any, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    tear(run / "checkpoint-8")
    told: list[str] = []
    train(tiny(trainer={"save_total_limit": 3}), run, resume=True, tell=told.append)
    (line,) = [line for line in told if line.startswith("checkpoint-8 is torn or was changed")]
    assert line.endswith("renamed to torn-checkpoint-8")
    assert "going on from checkpoint-6" in told
    assert log_of(run, "loss") == log_of(finished, "loss")
    assert same_weights(run, finished)
    assert [path.name for path in checkpoints(run)] == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
    assert (run / "torn-checkpoint-8").is_dir()


def test_two_torn_checkpoints(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    tear_flip(run / "checkpoint-8")
    tear_truncate(run / "checkpoint-6")
    told: list[str] = []
    train(tiny(trainer={"save_total_limit": 3}), run, resume=True, tell=told.append)
    assert "going on from checkpoint-4" in told
    assert same_weights(run, finished)


def test_a_log_that_a_kill_left_torn(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoint-8")
    with (run / "log.jsonl").open("a") as file:
        file.write('{"step": 8, "los')
    train(tiny(trainer={"save_total_limit": 3}), run, resume=True)
    assert log_of(run, "loss") == log_of(finished, "loss")


def test_the_users_umask_is_obeyed(finished: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    for folder in (finished, finished / "checkpoint-8"):
        for path in folder.iterdir():
            if path.is_file() and path.name != ".lock":
                assert path.stat().st_mode & 0o777 == 0o666 & ~mask, path


# ---- full disk ----


def full_when(monkeypatch: pytest.MonkeyPatch, name: str, step: int) -> None:
    """Let the file ``name`` of checkpoint ``step`` be written half, and then say that the disk is full."""

    def matches(path: Any) -> bool:
        path = Path(path)
        return path.name == name and path.parent.name == f"checkpoint-{step}"

    def wrap(write: Any, at: int) -> Any:
        def full(*args: Any, **kwargs: Any) -> Any:
            out = write(*args, **kwargs)
            if matches(args[at]):
                os.truncate(args[at], Path(args[at]).stat().st_size // 2)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return out

        return full

    import transformers.modeling_utils

    monkeypatch.setattr(torch, "save", wrap(torch.save, 1))
    monkeypatch.setattr(
        transformers.modeling_utils, "safe_save_file", wrap(transformers.modeling_utils.safe_save_file, 1)
    )
    monkeypatch.setattr(Path, "write_text", wrap(Path.write_text, 0))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "mainstem.json"])
def test_a_full_disk_leaves_the_last_checkpoint(
    name: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(trainer={"save_total_limit": 3})
    with monkeypatch.context() as patch:
        full_when(patch, name, 6)
        with pytest.raises(
            TrainingStoppedError, match=r"checkpoint of step 6.*No space.*checkpoint-4 is whole"
        ):
            train(config, tmp_path / "run")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-2", "checkpoint-4"]
    assert all(map(is_whole, checkpoints(tmp_path / "run")))
    assert not (tmp_path / "run" / ".saving").exists()
    train(config, tmp_path / "run", resume=True)
    assert log_of(tmp_path / "run", "loss") == log_of(finished, "loss")
    assert same_weights(tmp_path / "run", finished)


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full(finished: Path, tmp_path: Path) -> None:
    config = tiny(trainer={"save_total_limit": 3})
    with small_disk(tmp_path / "disk", "4m") as disk:
        run, rest = disk / "run", disk / "rest"

        def fill(_: Any) -> None:
            free = shutil.disk_usage(disk).free
            rest.write_bytes(b"x" * (free - 60_000))  # room for a part of a checkpoint

        with pytest.raises(TrainingStoppedError, match=r"checkpoint of step 6 could not be written"):
            train(config, run, callbacks=[At(5, fill)])
        kept, torn = last_whole(run)
        assert kept is not None
        assert (kept.name, torn) == ("checkpoint-4", [])
        rest.unlink()
        train(config, run, resume=True)
        assert log_of(run, "loss") == log_of(finished, "loss")
        assert same_weights(run, finished)


# ---- not finite ----


def poison(model: Any) -> None:
    """Plant a NaN in the up projection of block 1."""
    with torch.no_grad():
        model.tower.blocks[1].mlp.up_proj.weight[0, 0] = torch.nan


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_not_finite_stops_the_run(accumulate: int, tmp_path: Path) -> None:
    """The weight goes bad inside step 6, after the checkpoint of step 4."""
    config = tiny(trainer={"gradient_accumulation_steps": accumulate, "save_steps": 4})

    class Poison(At):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                kwargs["model"].tower.blocks[1].mlp.up_proj.register_forward_hook(spoil)

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        return output.masked_fill(torch.ones_like(output, dtype=torch.bool), torch.nan)

    with pytest.raises(NonFiniteError, match="the loss of step 6 is not finite") as stopped:
        train(config, tmp_path / "run", callbacks=[Poison(0, None)])
    assert "NaN in the forward pass: block 1, " in str(stopped.value)
    assert "mlp" in str(stopped.value)
    assert "checkpoint-5 holds the parameters from before" in str(stopped.value)
    kept, _ = last_whole(tmp_path / "run")
    assert kept is not None
    assert kept.name == "checkpoint-5"
    assert all(torch.isfinite(t).all() for t in weights_of(kept).values())
    assert [step for step, _ in log_of(tmp_path / "run", "loss")] == [1, 2, 3, 4, 5]
    straight(tiny(trainer={"gradient_accumulation_steps": accumulate, "save_steps": 5}), tmp_path / "sound")
    assert same_weights(kept, tmp_path / "sound" / "checkpoint-5")


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"step 4 is not finite.*up_proj"):
        train(tiny(), tmp_path / "run", callbacks=[At(3, poison)])


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    """sqrt(0) is 0 and its gradient infinite: the loss says nothing."""

    class Slope(At):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                kwargs["model"].tower.blocks[1].attn.out_proj.register_forward_hook(
                    lambda module, inputs, output: output + (output * 0).abs().sqrt()
                )

    with pytest.raises(NonFiniteError, match="the gradient of step 5 is not finite") as stopped:
        train(tiny(), tmp_path / "run", callbacks=[Slope(0, None)])
    assert "backward" in str(stopped.value)
    kept, _ = last_whole(tmp_path / "run")
    assert kept is not None
    assert kept.name == "checkpoint-4"
    assert all(torch.isfinite(t).all() for t in load_file(kept / "model.safetensors").values())


# ---- one folder, one run ----


def test_a_folder_that_is_being_trained_in(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with FileLock(run / ".lock"), pytest.raises(ConfigError, match="Another run is training in"):
        train(tiny(), run, resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_folder_that_holds_a_run(finished: Path) -> None:
    with pytest.raises(ConfigError, match="go on with --resume, or choose another folder"):
        train(tiny(), finished)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"trainer": {"learning_rate": 1e-3}}, "learning_rate=0.01, now it is 0.001"),
        ({"connection": "mhc"}, "connection='pre_norm', now it is 'mhc'"),
        ({"optimizer": "muon"}, "optimizer='adamw', now it is 'muon'"),
        ({"trainer": {"per_device_train_batch_size": 4}}, "windows a step=2, now it is 4"),
        ({"text": "text:" + "other words " * 500}, "text="),
        ({"tower": {"dropout": 0.1}}, "tower={}"),
    ],
)
def test_another_config_is_refused(change: dict[str, Any], names: str, finished: Path) -> None:
    before = json.loads((finished / "train.json").read_text())
    with pytest.raises(ConfigError) as error:
        train(tiny(**change), finished, resume=True)
    assert names in str(error.value)
    assert json.loads((finished / "train.json").read_text()) == before


def test_what_changes_no_number_may_change(tmp_path: Path) -> None:
    config = tiny()
    straight(config, tmp_path / "straight")
    assert killed(config, tmp_path / "run", step=5) == -signal.SIGKILL
    other = tiny(
        trainer={
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "save_total_limit": 1,
            "dataloader_num_workers": 0,
        }
    )
    train(other, tmp_path / "run", resume=True)
    for (step, one), (same, two) in zip(
        log_of(tmp_path / "run", "loss"), log_of(tmp_path / "straight", "loss"), strict=True
    ):
        assert step == same
        assert one == pytest.approx(two, abs=1e-5)
