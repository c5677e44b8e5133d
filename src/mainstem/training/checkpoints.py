"""Checkpoints that are there whole or not at all, and the last one that is."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Generator
from pathlib import Path

from mainstem.errors import MainstemError
from mainstem.sources import is_whole, obey_umask, write_manifest

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
STAGE = ".saving"
"""Folder in which a checkpoint is written before it is moved to its place."""


class TrainingStoppedError(MainstemError):
    """A run that cannot go on: what happened at which step, and from where it can be resumed."""


class NonFiniteError(TrainingStoppedError):
    """A run that stopped because a loss or a gradient was not finite."""


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, oldest first; whole or not."""
    found = [path for path in folder.glob("checkpoint-*") if _CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the optimiser steps done when it was written."""
    matched = _CHECKPOINT.fullmatch(checkpoint.name)
    assert matched is not None
    return int(matched[1])


def last_whole(folder: Path) -> tuple[Path | None, list[Path]]:
    """Return the newest checkpoint whose every file has its size and hash, and the newer ones."""
    torn: list[Path] = []
    for checkpoint in reversed(checkpoints(folder)):
        if is_whole(checkpoint):
            return checkpoint, torn
        torn.append(checkpoint)
    return None, torn


@contextlib.contextmanager
def staged(folder: Path, step: int, *, writes: bool) -> Generator[Path]:
    """Give a folder to write checkpoint ``step`` into; when the block ends well it is moved into its place.

    The block writes ``<yielded>/checkpoint-<step>``. Nothing that was whole before is touched: an older
    checkpoint of the same step is replaced at the end only.

    Args:
        folder: of the run.
        step: optimiser steps done.
        writes: whether this process moves it; others of the same run only write their share.
    """
    stage = folder / STAGE
    try:
        yield stage
        if writes:
            _finish(stage / f"checkpoint-{step}", folder, step)
    finally:
        if writes:
            shutil.rmtree(stage, ignore_errors=True)


def _finish(written: Path, folder: Path, step: int) -> None:
    obey_umask(written)
    write_manifest(written, {"format": "mainstem.checkpoint/1", "step": step})
    for path in written.rglob("*"):
        _sync(path)
    _sync(written)
    final = folder / written.name
    aside = folder / STAGE / "replaced"
    if final.exists():
        os.replace(final, aside)
    os.replace(written, final)
    _sync(folder)


def remove_old(folder: Path, keep: int | None, always: Path | None = None) -> None:
    """Delete all but the newest ``keep`` checkpoints; ``always`` stays."""
    if keep is None or keep < 1:
        return
    for checkpoint in checkpoints(folder)[:-keep]:
        if always is None or checkpoint.name != always.name:
            shutil.rmtree(checkpoint, ignore_errors=True)


def set_aside(torn: list[Path]) -> None:
    """Rename checkpoints that are not whole, so that none of them is counted among those that are kept."""
    for path in torn:
        aside = path.with_name(f"torn-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)


def _sync(path: Path) -> None:
    """Let the disk have it before a rename says that it is there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems sync no folders
            raise
    finally:
        os.close(descriptor)
