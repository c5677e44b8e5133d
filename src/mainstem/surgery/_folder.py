"""A new folder that is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

from mainstem.errors import MainstemError
from mainstem.sources import obey_umask


def check_out(out: Path, model: str) -> None:
    """Make sure, before the work, that a new folder can be made at ``out``.

    Raises:
        MainstemError: something is there already, the source among it, or its parent cannot be written.
    """
    source = Path(model).expanduser()
    if source.exists() and out.resolve() == source.resolve():
        raise MainstemError(f"{out} is the source itself, which is never written over; choose another --out.")
    if out.exists():
        raise MainstemError(f"{out} is there already; choose an --out that is not.")
    parent = out.resolve().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise MainstemError(f"No folder can be made in {parent}; choose another --out.")


@contextlib.contextmanager
def new_folder(out: Path) -> Generator[Path]:
    """Give an empty folder beside ``out``; when the block ends well it is moved to ``out``, else it goes.

    Raises:
        MainstemError: it cannot be written, or something came to ``out`` meanwhile.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as work:
            folder = Path(work) / out.name
            folder.mkdir()
            yield folder
            obey_umask(folder)
            os.rename(folder, out)
    except OSError as error:
        raise MainstemError(
            f"{out} could not be written ({error.strerror or error}); nothing was left half written."
        ) from error
