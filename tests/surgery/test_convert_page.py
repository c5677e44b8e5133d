"""The page's table is what the code does today."""

from __future__ import annotations

import re

import pytest
from benchmarks.convert_table import KEPT, MARKS, PAGE, rows, table

from mainstem.connections import scheme_names


def test_the_table_of_the_page_is_measured() -> None:
    said = PAGE.read_text("utf-8").split(MARKS[0])[1].split(MARKS[1])[0]
    found = rows()
    assert [row.name for row in found] == re.findall(r"^\| `(\w+)` ", said, re.MULTILINE)
    assert sorted(row.name for row in found) == scheme_names()
    assert f"{sum(row.kept for row in found)} of {len(found)} schemes keep it." in said
    lines = {line.split("`")[1]: line for line in said.splitlines() if line.startswith("| `")}
    for row in found:
        cells = [cell.strip() for cell in lines[row.name].strip("|").split("|")]
        now = next(line for line in table([row]).splitlines() if line.startswith("| `"))
        expected = [cell.strip() for cell in now.strip("|").split("|")]
        # The last digit of what is drawn at random may differ with the machine's order of sums.
        assert float(cells[2]) == pytest.approx(float(expected[2]), rel=0.1)
        assert cells[:2] + cells[3:] == expected[:2] + expected[3:]
        assert row.kept or row.distance > 1e6 * KEPT
        assert row.later == 1.0 or not row.kept
