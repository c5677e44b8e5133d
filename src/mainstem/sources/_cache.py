"""A folder for what is expensive to make twice: keyed by content, written atomically, checked when read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "mainstem.json"
_STALE_SECONDS = 24 * 3600


def cache_root() -> Path:
    """The folder mainstem caches in: ``$MAINSTEM_CACHE``, else ``mainstem`` in the platform's cache folder.

    Linux: ``$XDG_CACHE_HOME`` or ``~/.cache``; macOS: ``~/Library/Caches``; Windows: ``%LOCALAPPDATA%``.
    """
    if named := os.environ.get("MAINSTEM_CACHE"):
        return Path(named).expanduser()
    if sys.platform == "darwin":
        base = Path("~/Library/Caches").expanduser()
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local").expanduser()
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "mainstem"


def sha256_of_file(path: Path) -> str:
    """Hex SHA-256 of the file's bytes, the figure that ``sha256sum`` prints."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_files(paths: list[Path]) -> str:
    """One file: its SHA-256. Several: that of their ``sha256sum`` listing (``HASH  NAME`` lines, by name)."""
    if len(paths) == 1:
        return sha256_of_file(paths[0])
    lines = [f"{sha256_of_file(path)}  {path.name}\n" for path in sorted(paths, key=lambda path: path.name)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def cached_folder(final: Path, make: Callable[[Path], dict[str, Any]]) -> Path:
    """Return ``final``, filled by ``make`` if it is not there whole.

    ``make`` writes into a temporary neighbour, which is renamed into place when complete together with a
    manifest of its files; so a reader sees all or nothing. Of several processes that make the same folder at
    once the first one wins and the others use its result. A folder that fails its manifest is made again.

    Args:
        final: the folder; its name is the key and must change with the content's source.
        make: fills the empty folder it is given, and returns what the manifest shall say beside the files.
    """
    if is_whole(final):
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(final.parent)
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        work = (
            temporary / final.name
        )  # mkdtemp's own folder is closed to other users; this one obeys the umask
        work.mkdir()
        write_manifest(work, make(work))
        _move_into_place(work, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def is_whole(folder: Path) -> bool:
    """Whether every file of the folder's manifest is there with its size and SHA-256."""
    try:
        files: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_text("utf-8"))["files"]
        return all(
            (folder / name).stat().st_size == entry["bytes"]
            and sha256_of_file(folder / name) == entry["sha256"]
            for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_manifest(folder: Path, says: dict[str, Any]) -> None:
    """Write the list of the folder's files, with their sizes and SHA-256, and what ``says`` says beside it.

    To be written last: a folder without one is not whole.
    """
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    (folder / MANIFEST).write_text(json.dumps({**says, "files": files}, indent=1, sort_keys=True), "utf-8")


def obey_umask(folder: Path) -> None:
    """Give the weights in ``folder`` the mode of any new file: safetensors writes for the owner alone."""
    made = folder / ".mode"
    made.touch()
    mode = made.stat().st_mode & 0o777
    made.unlink()
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)


def _move_into_place(work: Path, final: Path) -> None:
    """Rename ``work`` to ``final``; where another process was faster, keep its result if it is whole."""
    for _ in range(3):
        try:
            os.replace(work, final)  # a folder replaces nothing but an empty folder
            return
        except OSError:
            if is_whole(final):
                return
            aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
            with contextlib.suppress(OSError):  # another process may have moved it first
                os.replace(final, aside)
            shutil.rmtree(aside, ignore_errors=True)
    os.replace(work, final)


def _remove_stale(parent: Path) -> None:
    """Delete the temporary folders of processes that died more than a day ago."""
    for path in parent.glob(".*"):
        with contextlib.suppress(OSError):
            if path.is_dir() and time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
