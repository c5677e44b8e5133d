"""What an interrupted audit has summed so far, so that the same command goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from mainstem.audit._ranks import Ranks
from mainstem.errors import MainstemError
from mainstem.measure import state_from_bytes, state_to_bytes

FORMAT = "mainstem.resume/1"


class Resume:
    """Keeps an audit's sums in a folder: a hidden file a process, there whole or not at all.

    Going on from it gives what an uninterrupted run gives, to the bit.

    Args:
        folder: made where it is not there.
        fresh: begin again, whatever the folder holds.
        every: windows between two writings, at least; what an interruption costs.

    Attributes:
        done: batches of the text that what is kept stands for; 0 where nothing is.
    """

    def __init__(self, folder: Path, *, fresh: bool = False, every: int = 64):
        self.folder, self.fresh, self.every = folder, fresh, every
        self.done = 0
        self._rank, self._key = 0, {}

    def _path(self) -> Path:
        return self.folder / f".resume-{self._rank}.safetensors"

    def load(self, key: Mapping[str, Any], ranks: Ranks) -> dict[str, Any] | None:
        """Return what was kept by a run of the same ``key``, None where there is nothing.

        Raises:
            MainstemError: what is there is of another run (what differs is named) or cannot be read.
        """
        self._rank, self._key = ranks.rank, json.loads(json.dumps(key))
        path = self._path()
        if self.fresh:
            path.unlink(missing_ok=True)
        if not path.exists():
            return None
        try:
            kept = state_from_bytes(path.read_bytes())
        except (OSError, ValueError) as error:
            raise MainstemError(
                f"{path} is no audit to go on with ({error}); --fresh begins again."
            ) from error
        now, before = _flat({"format": FORMAT, **self._key}), _flat(kept["key"])
        differ = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if differ:
            said = "; ".join(f"{n} was {before.get(n)!r}, now {now.get(n)!r}" for n in differ[:3])
            raise MainstemError(
                f"{self.folder} holds an interrupted audit with other choices: {said}"
                f"{'; and more' if len(differ) > 3 else ''}. Ask for the same to go on with it, choose "
                "another --out, or begin again with --fresh."
            )
        self.done = kept["done"]
        return kept

    def save(self, done: int, tokens_sha256: str, state: Mapping[str, Any]) -> None:
        """Keep the sums over the first ``done`` batches of the text.

        Raises:
            MainstemError: the folder cannot be written.
        """
        path = self._path()
        kept = {"key": {"format": FORMAT, **self._key}, "done": done, "tokens": tokens_sha256, "state": state}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            with temporary.open("wb") as file:
                file.write(state_to_bytes(kept))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            raise MainstemError(
                f"What was done so far cannot be kept in {self.folder} ({error.strerror or error}); choose "
                "another --out."
            ) from error
        self.done = done

    def remove(self) -> None:
        """Forget the audit, of all processes: its results are safe."""
        for path in self.folder.glob(".resume-*"):
            path.unlink(missing_ok=True)
        self.done = 0


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): value}
    found: dict[str, Any] = {}
    for name, inner in cast("dict[str, Any]", value).items():
        found |= _flat(inner, f"{prefix}{name}.")
    return found
