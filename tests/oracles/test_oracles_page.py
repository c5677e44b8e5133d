"""docs/oracles.md names every comparison there is, and nothing that is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from oracles_report import HEADER, WITHOUT

from mainstem.connections import scheme_names

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "oracles.md").read_text("utf-8")
ROWS = [
    [cell.strip() for cell in line.split(" | ")]
    for line in PAGE.removeprefix(HEADER).partition("\n## ")[0].splitlines()
]
REMAKE = "run `make oracles-report`"


def comparisons() -> set[str]:
    """``file::function`` of every test that takes ``agree``."""
    return {
        f"{path.name}::{node.name}"
        for path in HERE.glob("test_*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and "agree" in [arg.arg for arg in node.args.args]
    }


def test_every_comparison_is_on_the_page() -> None:
    assert PAGE.startswith(HEADER), REMAKE
    assert {row[-1].strip("` |") for row in ROWS} == comparisons(), REMAKE


def test_every_connection_is_compared_or_said_not_to_be() -> None:
    compared = {row[0].strip("| `") for row in ROWS}
    assert compared | set(WITHOUT) == set(scheme_names()), (
        "compare a new connection in tests/oracles/, or say in WITHOUT of oracles_report.py why not; "
        f"then {REMAKE}"
    )
    assert not compared & set(WITHOUT)
    listed = dict(re.findall(r"^- `(\w+)`: (.+)\.$", PAGE, re.MULTILINE))
    assert listed == WITHOUT, REMAKE


def test_errors_are_what_is_promised() -> None:
    for row in ROWS:
        _, _, version, _, dtype, values, gradients, *_ = row
        assert re.fullmatch(r"[\d.]+", version)
        largest = max(float(values), float(gradients.partition(" ")[0]))
        assert largest <= {"float64": 1e-10, "float32": 1e-4}[dtype]
