"""Files of a run: replaced whole, and read up to the line that a killed process left torn."""

from __future__ import annotations

import os
from pathlib import Path

from mainstem.errors import MainstemError


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` beside the file, then put it in its place: a reader sees the old or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, "utf-8", newline="\n")
    os.replace(temporary, path)


def write_whole(path: Path, text: str) -> None:
    """Replace a file's text.

    Raises:
        MainstemError: it cannot be written.
    """
    try:
        replace_text(path, text)
    except OSError as error:
        raise MainstemError(f"{path} cannot be written ({error.strerror or error}).") from error


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file of JSON objects, line ends included; a torn last one is left out.

    No file is no line.
    """
    if not path.exists():
        return []
    return [line for line in path.read_text("utf-8").splitlines(keepends=True) if line.endswith("}\n")]
