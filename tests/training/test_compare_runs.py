"""mainstem compare, whole: through the command, killed and gone on with, through a launcher, by time."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mainstem import cli

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("scipy")
runs = importlib.import_module("tiny_runs")
compared = importlib.import_module("mainstem.training.compare")
callbacks = importlib.import_module("mainstem.training._compare_callbacks")

CompareConfig, compare = compared.CompareConfig, compared.compare

STEPS = 300  # enough for a test to kill a run in their midst


def losses(out: Path) -> dict[str, Any]:
    data = json.loads((out / "compare.json").read_text())
    return {cell["name"]: (cell["figures"]["loss"], cell["figures"]["train_curve"]) for cell in data["cells"]}


def flags(out: Path, *more: str) -> list[str]:
    options = ["--connections", "pre_norm,highway", "--depths", "2", "--width", "16", "--window", "16"]
    options += ["--tokenizer", "byte", "--text", runs.GPL, "--held-out", "0.01", "--out", str(out)]
    options += ["--per_device_train_batch_size", "2", "--save_steps", "25", "--eval_steps", "150", *more]
    return [*options, "--logging_steps", "1"]


def command_for(out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "mainstem", "compare", *flags(out), *more]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two connections, two seeds, through the command."""
    out = tmp_path_factory.mktemp("compare") / "unbroken"
    command = command_for(out, "--seeds", "2", "--max_steps", str(STEPS))
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "120"}
    )
    assert done.returncode == 0, done.stderr
    assert "highway" in done.stdout
    assert "4/4" in done.stderr
    assert "left" in done.stderr
    return out


@pytest.mark.slow
def test_a_comparison_leaves_its_results(unbroken: Path) -> None:
    data = json.loads((unbroken / "compare.json").read_text())
    for cell in data["cells"]:
        found = cell["figures"]
        assert cell["status"] == "finished"
        assert found["loss"] < found["start_loss"] < 1.05 * math.log(257)
        assert (found["steps"], found["tokens"]) == (STEPS, STEPS * 2 * 16)
        assert 0 < found["seconds_per_step"] < found["train_seconds"]
        assert 0 < found["cpu_seconds_per_step"] < found["train_seconds"]
        assert [step for step, _ in found["held_out_curve"]] == [0, 150, 300]
        assert 50e6 < found["memory_before"] <= found["peak_memory"] < 5e9
    by_seed = {(c["connection"], c["seed"]): c["figures"] for c in data["cells"]}
    for seed in (0, 1):
        difference = by_seed["highway", seed]["loss"] - by_seed["pre_norm", seed]["loss"]
        assert data["pairs"][0]["differences"][seed] == {"seed": seed, "difference": difference}
    assert not list(unbroken.glob("cells/*/run/checkpoint-*"))
    assert {path.name for path in unbroken.iterdir()} >= {
        "compare.json",
        "compare.csv",
        "compare.md",
        "cells",
    }


@pytest.mark.slow
def test_finished_cells_are_read_and_other_settings_refused(
    unbroken: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mainstem", "compare", *flags(unbroken), *more])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        return int(leaving.value.code or 0), *capsys.readouterr()

    before = losses(unbroken)
    code, out, err = run("--seeds", "2", "--max_steps", str(STEPS), "--json")
    assert (code, json.loads(out)["schema"]) == (0, "mainstem.compare/1")
    assert "4 of 4 cells are there already" in err
    assert losses(unbroken) == before
    code, _, err = run("--seeds", "2", "--max_steps", "301")
    assert (code, "max_steps=300, now it is 301" in err) == (1, True)


@pytest.mark.slow
def test_a_killed_comparison_goes_on_and_ends_with_the_same_numbers(unbroken: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    command = command_for(out, "--seeds", "1", "--max_steps", str(STEPS))
    steps = out / "cells" / "highway-d2-s0" / "steps.jsonl"
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: steps.exists() and steps.read_text().count("\n") >= 60)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    # the cell sees that its comparison is gone, at the latest after its next step
    output = out / "cells" / "highway-d2-s0" / "output.txt"
    wait_for(lambda: "is gone" in output.read_text())
    finished = out / "cells" / "pre_norm-d2-s0" / "result.json"
    read = finished.stat().st_mtime_ns
    assert not (out / "cells" / "highway-d2-s0" / "result.json").exists()
    assert list((out / "cells" / "highway-d2-s0" / "run").glob("checkpoint-*"))

    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert "going on from checkpoint-" in output.read_text()
    assert finished.stat().st_mtime_ns == read
    whole = losses(unbroken)
    assert losses(out) == {name: whole[name] for name in losses(out)}
    assert len(callbacks.read_steps(steps)) == STEPS


@pytest.mark.slow
def test_through_a_launcher_the_numbers_are_the_same(unbroken: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    out = tmp_path / "jobs"
    command = command_for(out, "--seeds", "1", "--max_steps", str(STEPS))
    done = subprocess.run([*command, "--launcher", "local"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole = losses(unbroken)
    assert losses(out) == {name: whole[name] for name in losses(out)}
    assert list((out / "jobs").iterdir())


@pytest.mark.slow
def test_a_run_that_is_not_finite_is_a_result_and_one_that_fails_is_not(tmp_path: Path) -> None:
    config = CompareConfig(
        connections=("pre_norm", "rezero"),
        depths=(2,),
        seeds=(0,),
        base=runs.tiny(trainer={"max_steps": 12, "learning_rate": 1e30, "max_grad_norm": 0.0}),
    )
    (tmp_path / "cells" / "rezero-d2-s0").mkdir(parents=True)
    (tmp_path / "cells" / "rezero-d2-s0" / "run").write_text("in the way")
    said: list[str] = []
    result = compare(config, tmp_path, tell=said.append)
    found = {cell.connection: cell for cell in result.cells}
    assert found["pre_norm"].status == "diverged"
    assert found["pre_norm"].figures["loss"] is None
    assert "Training stopped" in (found["pre_norm"].says or "")
    assert found["rezero"].status == "failed"
    assert "is a file; give a folder" in (found["rezero"].says or "")
    assert any("diverged" in line for line in said)
    json.loads((tmp_path / "compare.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.slow
def test_equal_time_trains_for_that_time(tmp_path: Path) -> None:
    minutes = 0.03
    tiny = runs.tiny()
    trainer = {
        name: value
        for name, value in tiny.trainer.items()
        if name not in ("max_steps", "eval_steps", "save_steps")
    }
    config = CompareConfig(
        connections=("pre_norm",),
        depths=(2,),
        seeds=(0,),
        minutes=minutes,
        base=dataclasses.replace(tiny, trainer=trainer),
    )
    result = compare(config, tmp_path)
    found = result.cells[0].figures
    steps = callbacks.read_steps(tmp_path / "cells" / "pre_norm-d2-s0" / "steps.jsonl")
    assert sum(step.seconds for step in steps[:-1]) < 60 * minutes <= found["train_seconds"]
    assert found["steps"] == len(steps) > 5
    assert found["loss"] < found["start_loss"]
    log = [
        json.loads(line)
        for line in (tmp_path / "cells/pre_norm-d2-s0/run/log.jsonl").read_text().splitlines()
    ]
    assert len({record["step"] for record in log if "eval_loss" in record}) >= 3


def wait_for(there: Callable[[], bool], seconds: float = 900) -> None:
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)
