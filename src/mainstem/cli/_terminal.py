"""What every verb says and where: results on standard output, all else on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from mainstem.errors import MainstemError

if TYPE_CHECKING:
    from mainstem.audit.run import Progress

INTERRUPTED = 130
"""Status after Ctrl-C."""


class Interrupted(SystemExit):
    """Ctrl-C, with a sentence of its own."""

    def __init__(self, says: str):
        super().__init__(INTERRUPTED)
        self.says = says


@contextmanager
def stdout_kept_clean() -> Generator[None]:
    """Send to standard error whatever a library or a model's own code prints while we work."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def output() -> Generator[None]:
    """Print to the end, or say why that was not possible.

    Raises:
        MainstemError: standard output cannot be written.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_stdout()
        raise MainstemError(f"Standard output cannot be written ({error.strerror or error}).") from error


def drop_stdout() -> None:
    """Let nothing that waits in standard output's buffer fail again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def progress() -> Generator[Progress]:
    """A bar on a terminal, a line a step elsewhere; always on standard error."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting", total=1)
            yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        return
    last: list[str] = []

    def line(what: str, done: int, total: int) -> None:
        says = f"{what} {done}/{total}" if total > 1 else what
        if last != [says]:
            print(says, file=sys.stderr, flush=True)
            last[:] = [says]

    yield line
