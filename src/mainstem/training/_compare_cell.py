"""The process of one cell: ``python -m mainstem.training._compare_cell FOLDER PARENT``.

A process a cell: what one leaks or breaks, the next does not see, and its peak memory is its own.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from mainstem.errors import MainstemError
from mainstem.sources import require, versions
from mainstem.training._compare_callbacks import (
    Clock,
    EndByTime,
    EqualStart,
    StopWithParent,
    peak_memory,
)
from mainstem.training._compare_files import CELL, RESULT, RUN, STEPS, read_steps, write_json
from mainstem.training._compare_plan import Cell
from mainstem.training.checkpoints import NonFiniteError, checkpoints
from mainstem.training.run import RECORD, train
from mainstem.training.trainer import LOG


def run_cell(folder: Path, parent: int) -> None:
    """Train the cell that ``folder / "cell.json"`` describes, from where it was left, and write its result.

    Waits while another process has the cell, and does nothing where it is finished.

    Args:
        folder: of the cell.
        parent: id of the process that started this one.

    Raises:
        MainstemError: it cannot be trained. A loss that is not finite is no error but a result.
    """
    filelock = require("filelock", feature="Training", extra="train")
    with filelock.FileLock(folder / ".lock"):
        if (folder / RESULT).exists():
            return
        began = time.perf_counter()
        cell = Cell.from_dict(json.loads((folder / CELL).read_text("utf-8")))
        clock = Clock(folder / STEPS)
        callbacks: list[Any] = [EqualStart(cell.seed), clock, StopWithParent(parent)]
        if cell.minutes is not None:
            callbacks.append(EndByTime(clock, 60 * cell.minutes))
        stopped: str | None = None
        try:
            train(cell.config, folder / RUN, resume=True, tell=print, callbacks=callbacks)
        except NonFiniteError as error:
            stopped = str(error)
        result = _result(cell, folder, clock, stopped) | {"seconds": time.perf_counter() - began}
        for checkpoint in checkpoints(folder / RUN):
            shutil.rmtree(checkpoint)
        write_json(folder / RESULT, result)


def _result(cell: Cell, folder: Path, clock: Clock, stopped: str | None) -> dict[str, Any]:
    log = [json.loads(line) for line in (folder / RUN / LOG).read_text("utf-8").splitlines()]
    held_out = _curve(log, "eval_loss")
    loss, bits = (None, None) if stopped else (held_out[-1][1], _curve(log, "eval_bits_per_byte")[-1][1])
    if loss is None and stopped is None:
        stopped = "the loss of the held-out text is not finite"
    steps = read_steps(folder / STEPS)
    seconds = [step.seconds for step in steps]
    record = json.loads((folder / RUN / RECORD).read_text("utf-8"))
    per_step = cell.config.trainer["per_device_train_batch_size"] * cell.config.window
    per_step *= cell.config.trainer.get("gradient_accumulation_steps", 1)
    return {
        "stopped": stopped,
        "loss": loss,
        "bits_per_byte": bits,
        "start_loss": dict(held_out).get(0),
        "steps": len(seconds),
        "tokens": len(seconds) * per_step,
        "seconds_per_step": statistics.median(seconds) if seconds else None,
        "cpu_seconds_per_step": statistics.median(step.cpu_seconds for step in steps) if steps else None,
        "train_seconds": sum(seconds),
        "num_parameters": clock.num_parameters,
        "peak_memory": peak_memory(),
        "memory_before": clock.memory_before,
        "train_curve": _curve(log, "loss"),
        "held_out_curve": held_out,
        "data": record["data"],
        "versions": versions("transformers", "accelerate", "datasets"),
        "device": _device(),
    }


def _curve(log: list[dict[str, Any]], name: str) -> list[tuple[int, float | None]]:
    """Pairs of step and value, the last of each step; None where it is not finite, which JSON cannot say."""
    found = {record["step"]: record[name] for record in log if name in record}
    return [(step, value if math.isfinite(value) else None) for step, value in sorted(found.items())]


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def main() -> None:
    """Run the cell of the folder given, for the process given."""
    try:
        run_cell(Path(sys.argv[1]), int(sys.argv[2]))
    except MainstemError as error:
        raise SystemExit(f"mainstem: {error}") from None


if __name__ == "__main__":
    main()
