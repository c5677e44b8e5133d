"""Results as files: written whole or not at all."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mainstem.audit import AuditResult
from mainstem.errors import MainstemError

FILES = ("audit.json", "audit.csv")


def check_folder(folder: Path, names: Sequence[str] = FILES) -> None:
    """Make sure, before the work, that files of these names will have a place; nothing is made.

    Raises:
        MainstemError: a file is in the way, or the place cannot be written.
    """
    for name in names:
        if (folder / name).is_dir():
            raise MainstemError(f"{folder / name} is a folder where a file would go; choose another --out.")
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise MainstemError(f"{place} is a file, so no results can be put in {folder}; choose another --out.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise MainstemError(f"The folder {place} cannot be written; choose another one with --out.")


def write_files(result: AuditResult, folder: Path) -> list[Path]:
    """Write ``audit.json`` and ``audit.csv``; see :func:`write_texts`."""
    return write_texts(dict(zip(FILES, (to_json(result), to_csv(result)), strict=True)), folder)


def write_texts(texts: Mapping[str, str], folder: Path) -> list[Path]:
    """Write texts by file name into ``folder``, making it if need be.

    All are written beside their place first and moved there together, so a reader sees the old or the new.

    Returns:
        The files' paths.

    Raises:
        MainstemError: the folder cannot be made or written.
    """
    check_folder(folder, list(texts))
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as work:
            for name, text in texts.items():
                (Path(work) / name).write_text(text, encoding="utf-8")
            for name in texts:
                os.replace(Path(work) / name, folder / name)
    except OSError as error:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise MainstemError(
            f"The results could not be written to {folder}: {error.strerror or error}. Nothing was left half "
            "written; choose another folder with --out."
        ) from error
    return [folder / name for name in texts]


def check_file(path: Path) -> None:
    """Make sure, before the work, that `write_text` will have a place; nothing is made.

    Raises:
        MainstemError: a folder is in the way, or the place cannot be written.
    """
    if path.is_dir():
        raise MainstemError(f"{path} is a folder where a file would go; name a file in it.")
    place = path.absolute().parent
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise MainstemError(f"No file can be written in {place}; choose another place than {path}.")


def write_text(path: Path, text: str) -> None:
    """Write a file beside its place first and move it there, so a reader sees the old or the new.

    Raises:
        MainstemError: the place cannot be written.
    """
    check_file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as work:
            made = Path(work) / path.name
            made.write_text(text, encoding="utf-8")
            os.replace(made, path)
    except OSError as error:
        raise MainstemError(f"{path} could not be written ({error.strerror or error}).") from error


def to_json(result: AuditResult) -> str:
    """Return the result as one JSON object."""
    return json.dumps(result.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(result: AuditResult) -> str:
    """Return the figures by block, one row a block; nested figures have names with a dot."""
    return rows_to_csv(result.to_dict()["blocks"])


def rows_to_csv(blocks: Sequence[dict[str, Any]]) -> str:
    """Return one row a dictionary, under all names that any has; nested figures have names with a dot."""
    rows = [_flat(block) for block in blocks]
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(value: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): "" if value is None else value}
    found: dict[str, object] = {}
    for key, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
        found |= _flat(inner, f"{prefix}{key}.")
    return found
