"""Where cells run: one after another on this machine, or as jobs of a cluster through submitit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mainstem.errors import ConfigError
from mainstem.sources import require

OUTPUT = "output.txt"
CLUSTERS = ("slurm", "local")


class Job(Protocol):
    """A cell that was handed over: a future, or a job of submitit."""

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        ...


Submit = Callable[[Path], Job]


@contextlib.contextmanager
def launcher(cluster: str | None, out: Path, parameters: Mapping[str, Any]) -> Generator[Submit]:
    """Give what starts a cell by its folder. Whatever still runs when the block is left is ended.

    Args:
        cluster: None for one cell after another in processes of this machine; ``"slurm"``; or ``"local"``,
            submitit's own stand-in for a cluster, which starts all cells at once.
        out: folder of the comparison; what submitit writes goes to ``out / "jobs"``.
        parameters: of :meth:`submitit.AutoExecutor.update_parameters`, such as ``slurm_partition`` and
            ``timeout_min``.

    Raises:
        ConfigError: there is no such cluster, or it does not take these parameters.
    """
    if cluster is None:
        if parameters:
            raise ConfigError(f"launcher options {sorted(parameters)} need a launcher; add --launcher slurm.")
        with _here() as submit:
            yield submit
        return
    if cluster not in CLUSTERS:
        raise ConfigError(f"launcher {cluster!r} is not known; choose one of {', '.join(CLUSTERS)}.")
    submitit = require("submitit", feature=f"The launcher {cluster!r}", extra="cluster")
    try:
        executor = submitit.AutoExecutor(folder=out / "jobs", cluster=cluster)
        executor.update_parameters(name="mainstem", **parameters)
    except (RuntimeError, NameError, TypeError, ValueError) as error:
        raise ConfigError(f"The launcher {cluster!r} refuses: {error}") from error
    jobs: list[Any] = []

    def hand_over(folder: Path) -> Job:
        jobs.append(executor.submit(run_apart, folder.resolve()))
        return jobs[-1]

    try:
        yield hand_over
    finally:
        for job in jobs:
            if not job.done():
                job.cancel()


@contextlib.contextmanager
def _here() -> Generator[Submit]:
    running: list[subprocess.Popen[bytes]] = []

    def run(folder: Path) -> int:
        with _process(folder) as process:
            running.append(process)
            try:
                return process.wait()
            finally:
                running.remove(process)

    pool = ThreadPoolExecutor(max_workers=1)
    try:
        yield partial(pool.submit, run)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            process.terminate()
        pool.shutdown(wait=True)


def run_apart(folder: Path) -> int:
    """Run a cell in a process of its own, to the end; return its status."""
    with _process(folder) as process:
        return process.wait()


@contextlib.contextmanager
def _process(folder: Path) -> Generator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "mainstem.training._compare_cell", str(folder), str(os.getpid())]
    # The Trainer would spread one process over all devices that it sees, and the cell's batch with it.
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    with (
        (folder / OUTPUT).open("ab") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": device},
        ) as process,
    ):
        yield process
