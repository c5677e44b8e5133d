"""Runs of seconds, and what they leave behind."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback

from mainstem.tower import process_group_left
from mainstem.training import TrainConfig, train

PRELOAD = ["tiny_runs", "mainstem.training.trainer", "mainstem.tower.hf", "datasets"]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
    *("--nproc-per-node", "2"),
]
"""Its processes meet on this machine, whether or not its name can be resolved."""
DEADLINE = 240
"""Seconds that a process of a test may take; on a quiet machine none takes twenty."""
GPL = str(Path(__file__).parents[1] / "data" / "gpl-3.0.txt")


def tiny(connection: str = "pre_norm", *, depth: int = 2, trainer: Any = None, **changes: Any) -> TrainConfig:
    """Two blocks of width 16 on bytes: eight steps, a checkpoint every second one."""
    settings = {
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 64,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_steps": 4,
        "disable_tqdm": True,
    }
    options: dict[str, Any] = {
        "width": 16,
        "num_heads": 2,
        "window": 16,
        "tokenizer": "byte",
        "text": GPL,
        "held_out": 0.01,
        "sample": None,
    }
    return TrainConfig(
        depth=depth, connection=connection, trainer=settings | dict(trainer or {}), **{**options, **changes}
    )


def log_of(out: Path, *names: str) -> list[tuple[Any, ...]]:
    """``(step, value of each name)`` of the records in the log that have the first name."""
    records = [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]
    return [(r["step"], *(r[name] for name in names)) for r in records if names[0] in r]


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The parameters in a folder, by name."""
    return load_file(folder / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    """Whether two folders hold the same parameters, bit for bit."""
    a, b = weights_of(one), weights_of(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class At(TrainerCallback):
    """Calls ``action(model)`` at the end of a step."""

    def __init__(self, step: int, action: Any):
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.action(kwargs["model"])


def killed(config: TrainConfig, out: Path, *, step: int, writing: str | None = None) -> int | None:
    """Train in another process that is killed with SIGKILL, and return its exit code.

    Args:
        step: the kill comes after its update, before anything else; with ``writing``, while its checkpoint is
            written.
        writing: the file half of which is there when the kill comes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(
        target=_run_to_death, args=(config, out, step, writing, torch.get_num_threads())
    )
    process.start()
    process.join()
    return process.exitcode


def _run_to_death(config: TrainConfig, out: Path, step: int, writing: str | None, threads: int) -> None:
    torch.set_num_threads(threads)
    _not_for_ever()

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_while_writing(*_: Any) -> None:
        torch.save = _half_of(writing or "", die)

    action = die if writing is None else die_while_writing
    train(config, out, callbacks=[At(step, action)])


def together(num: int, function: Any, *args: Any) -> list[int | None]:
    """Call ``function(*args)`` in ``num`` processes that find each other as under torchrun; their exit codes.

    Processes of a server that has imported everything: they begin at once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = free_port()
    processes = [
        context.Process(target=_member, args=(rank, num, port, function, args)) for rank in range(num)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _member(rank: int, num: int, port: int, function: Any, args: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    _not_for_ever()
    with process_group_left():
        function(*args)


def _not_for_ever() -> None:
    """End this process and say where it was, should it be there after minutes: its test waits for it."""
    faulthandler.dump_traceback_later(DEADLINE, exit=True)


def _half_of(name: str, then: Any) -> Any:
    save = torch.save

    def write(obj: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        save(obj, path, *args, **kwargs)
        if Path(path).name == name:
            os.truncate(path, Path(path).stat().st_size // 2)
            then()

    return write
