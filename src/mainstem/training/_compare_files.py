"""The files of a cell, and how they are written and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from mainstem.training._files import whole_lines, write_whole

CELL, RESULT, RUN, STEPS = "cell.json", "result.json", "run", "steps.jsonl"
"""What is to be trained; what it came to; the folder of the run; what each step took."""


def write_json(path: Path, data: Any) -> None:
    """Write a file whole or not at all.

    Raises:
        MainstemError: it cannot be written.
    """
    write_whole(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


class StepTime(NamedTuple):
    """What one step took: by the wall clock, and of this process's cores together."""

    seconds: float
    cpu_seconds: float


def read_steps(path: Path) -> list[StepTime]:
    """Return what each step took; a last line that is torn is dropped, and no file is no step."""
    return [StepTime(**json.loads(line)) for line in whole_lines(path)]


def step_line(step: StepTime) -> str:
    """Return the line of one step."""
    return json.dumps({name: round(value, 6) for name, value in step._asdict().items()}) + "\n"
