"""docs/measures.md has a row for every number of the schema, and for nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mainstem.audit.schema_page import load_schema

PAGE = Path(__file__).parents[2] / "docs" / "measures.md"
NUMBERS = {"number", "integer"}


def numeric(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Keys of every number, and of every list whose entries are numbers, by the rules of audit-schema.md."""
    types = schema.get("type", [])
    if NUMBERS & set([types] if isinstance(types, str) else types):
        yield path.removesuffix("[]")
    for name, inner in schema.get("properties", {}).items():
        yield from numeric(inner, f"{path}.{name}" if path else name)
    if isinstance(rest := schema.get("additionalProperties"), dict):
        yield from numeric(rest, f"{path}.*")
    if "items" in schema:
        yield from numeric(schema["items"], f"{path}[]")


def rows() -> list[list[str]]:
    """Cells of every row of the tables: as Markdown has it, a bar in a formula is escaped."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_number_has_a_row_and_every_row_a_number() -> None:
    wanted = {
        key.replace("blocks[].", "b.", 1) if key.startswith("blocks[].") else key
        for key in numeric(load_schema())
        if not key.startswith("provenance.")
    }
    named = [key for row in rows() for key in re.findall(r"`([^`]+)`", row[0])]
    assert sorted(named) == sorted(set(named)), "a key has two rows"
    assert wanted - set(named) == set(), "numbers of the schema without a row in docs/measures.md"
    assert set(named) - wanted == set(), "rows of docs/measures.md whose key is not in the schema"


def test_a_row_has_all_its_cells() -> None:
    assert {len(row) for row in rows()} == {6}
    for row in rows():
        assert row[1], f"{row[0]} has no formula"
