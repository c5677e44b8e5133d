"""FSDP2 over two processes: every connection trains as in one, and its stream stays as wide."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import CASES, make_tower

from mainstem.errors import ConfigError
from mainstem.tower import shard_tower

each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found, for all cases: they are started once."""
    folder = tmp_path_factory.mktemp("fsdp")
    worker = Path(__file__).with_name("fsdp_worker.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(worker), str(folder), str(rank)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, said = process.communicate(timeout=1200)
        assert process.returncode == 0, said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@each_case
def test_sharded_gradients_are_those_of_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    for results in ranks:
        found = results[case]["check_exact"]
        assert isinstance(found, dict), found
        assert found.pop("sharded")
        # fp64; the two ranks' gradients are added in another order.
        assert max(found.values()) <= 1e-12, found


@pytest.mark.slow
@each_case
def test_the_stream_stays_fp32_under_bf16_branches(ranks: list[dict[str, Any]], case: str) -> None:
    for results in ranks:
        found = results[case]["check_mixed"]
        assert isinstance(found, dict), found
        assert found["kept"] == found["stream"] == ["torch.float32"]
        assert found["branch"] == found["of_branch"] == ["torch.bfloat16"]
        assert found["of_stream"] in (["torch.float32"], [])
        # The same bf16 products; only the sum over ranks differs: fp32 here, of bf16 gradients there too.
        assert found["error"] <= 1e-5, found


@pytest.mark.slow
@each_case
def test_state_goes_through_a_sharded_tower_to_the_bit(ranks: list[dict[str, Any]], case: str) -> None:
    for results in ranks:
        assert results[case]["check_state"] == {"names": True, "equal": True}


def test_sharding_without_processes_or_in_integers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no process group to shard over; start with torchrun"):
        shard_tower(make_tower())
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        with pytest.raises(ConfigError, match=r"param_dtype=torch.int8 is no floating-point dtype"):
            shard_tower(make_tower(), param_dtype=torch.int8)
    finally:
        torch.distributed.destroy_process_group()
