"""Several processes share one audit: the figures of one process, on all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import amount_worker as worker
import pytest
import tiny_models as tiny

from mainstem.audit import run_audit

pytestmark = pytest.mark.slow

EXACT = {"resid_norm_median", "resid_norm_p5", "resid_norm_p95", "max_abs", "value", "additivity"}
"""Figures that no sum is part of: buckets that were counted, and the largest of a kind."""


def launch(num: int, *args: object) -> subprocess.CompletedProcess[str]:
    start = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(num), str(Path(__file__).parent / "amount_worker.py"), *map(str, args)),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(start, capture_output=True, text=True, env=env, timeout=240, check=False)


def assert_same(one: Any, other: Any, at: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for name in one.keys() - {"created", "notes", "machine"}:
            assert_same(one[name], other[name], f"{at}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), at
        for number, (x, y) in enumerate(zip(one, other, strict=True)):
            assert_same(x, y, f"{at}[{number}]")
    elif isinstance(one, float) and at.rpartition(".")[2] not in EXACT:
        assert one == pytest.approx(other, rel=1e-12), at
    else:
        assert one == other, at


@pytest.mark.parametrize("num", [2, 3])
def test_processes_share_the_text_and_find_what_one_finds(num: int, tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path)
    ran = launch(num, "share", folder, tmp_path)
    assert ran.returncode == 0, ran.stderr
    for name, changes in {**worker.CASES, "interrupted": worker.INTERRUPTED}.items():
        alone = json.loads(json.dumps(run_audit(tiny.config(folder, **changes)).to_dict()))
        found = [json.loads((tmp_path / f"{name}-{rank}.json").read_text("utf-8")) for rank in range(num)]
        for result in found:
            assert_same(alone, result)
            assert_same(found[0]["blocks"], result["blocks"])
            assert result["provenance"]["machine"]["processes"] == num
    assert (tmp_path / "gone on from 0").read_text() == " ".join(
        f".resume-{rank}.safetensors" for rank in range(num)
    )


def test_one_process_that_fails_ends_all_and_says_why(tmp_path: Path) -> None:
    ran = launch(2, "fail", tiny.make("llama", tmp_path), tmp_path)
    assert ran.returncode != 0
    assert "mainstem: process 1 of 2: this process has had enough.\n" in ran.stderr
    # What the other process had summed may be kept there to go on from; a result is not.
    assert not [*(tmp_path / "o").glob("audit.*")]


def test_killed_and_given_again_it_ends_where_it_would_have_ended(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path)
    command = [
        *(sys.executable, "-m", "mainstem", "audit", str(folder), "--text", str(tiny.GPL)),
        *("--tokens", "3000", "--window", "16", "--batch-size", "1"),
    ]
    kept = tmp_path / "killed" / ".resume-0.safetensors"
    running = subprocess.Popen([*command, "--out", str(tmp_path / "killed")], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not kept.exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "audit.json").exists()
    found: dict[str, Any] = {}
    for name in ("killed", "whole"):
        ran = subprocess.run([*command, "--out", str(tmp_path / name)], capture_output=True, check=True)
        assert (b"reading the stream 1/" in ran.stderr) == (name == "whole")
        found[name] = json.loads((tmp_path / name / "audit.json").read_text("utf-8"))
        del found[name]["provenance"]["created"]
    assert found["killed"] == found["whole"]
    assert not kept.exists()
