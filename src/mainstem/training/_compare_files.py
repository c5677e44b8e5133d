"""The files of a cell, and how they are written and read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mainstem.errors import MainstemError

CELL, RESULT, RUN, STEPS = "cell.json", "result.json", "run", "steps.jsonl"
"""What is to be trained; what it came to; the folder of the run; the seconds of each step."""


def write_json(path: Path, data: Any) -> None:
    """Write a file whole or not at all.

    Raises:
        MainstemError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise MainstemError(f"{path} cannot be written ({error.strerror or error}).") from error


def read_steps(path: Path) -> list[float]:
    """Return the seconds of each step; a last line that is torn is dropped, and no file is no step."""
    if not path.exists():
        return []
    lines = path.read_text("utf-8").splitlines(keepends=True)
    return [json.loads(line)["seconds"] for line in lines if line.endswith("}\n")]


def step_line(seconds: float) -> str:
    """Return the line of one step."""
    return json.dumps({"seconds": round(seconds, 6)}) + "\n"
