"""The page of the audit's schema, made from ``schema.json``.

``python -m mainstem.audit.schema_page > docs/audit-schema.md``
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

_HEAD = """\
# The audit's result: `{title}`

<!-- Made from src/mainstem/audit/schema.json by `python -m mainstem.audit.schema_page`; change it there. -->

{description}

**What a version promises.** Within `/1` fields may be added, so a reader passes over keys it does not know.
A field that goes, or that comes to mean something else, makes `/2`. The JSON Schema (2020-12) that ships as
`mainstem/audit/schema.json` describes the results of its own release to the last key.

`a.b` is the key `b` of the object `a`, `a[].b` that of every entry of the list `a`, `a.*` any key of `a`.
Blocks, positions and channels are 0-based, ranges half-open. `audit.csv` holds `blocks[]`, one row a block;
an empty cell is a null.

| key | type | meaning |
|---|---|---|
"""


def load_schema() -> dict[str, Any]:
    """Return the JSON Schema of the audit's result."""
    return json.loads(resources.files("mainstem.audit").joinpath("schema.json").read_text("utf-8"))


def schema_page() -> str:
    """Return the page, Markdown."""
    schema = load_schema()
    rows = (f"| `{key}` | {_type(field)} | {_meaning(field)} |\n" for key, field in _fields(schema, ""))
    return _HEAD.format(title=schema["title"], description=schema["description"]) + "".join(rows)


def _fields(schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every described key below an object or list, with its path."""
    if "items" in schema:
        yield from _fields(schema["items"], f"{prefix}[]")
        return
    inner: dict[str, dict[str, Any]] = dict(schema.get("properties", {}))
    if isinstance(rest := schema.get("additionalProperties"), dict) and "description" in rest:
        inner["*"] = rest
    for name, field in inner.items():
        key = f"{prefix}.{name}" if prefix else name
        yield key, field
        yield from _fields(field, key)


def _type(field: dict[str, Any]) -> str:
    if "const" in field:
        return f"`{field['const']}`"
    types = field["type"] if isinstance(field["type"], list) else [field["type"]]
    return " or ".join(types)


def _meaning(field: dict[str, Any]) -> str:
    items = field.get("items", {})
    about = f" {items['description']}" if "description" in items else ""
    return (field.get("description", "") + about).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(schema_page(), end="")
