"""The schema holds real results, holds nothing else, and its page is the committed one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tiny_models import MAKERS, config, make

from mainstem.audit import SCHEMA, run_audit
from mainstem.audit.schema_page import load_schema, schema_page
from mainstem.report import to_json

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = load_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make("llama", tmp_path_factory.mktemp("schema"))
    return json.loads(to_json(run_audit(config(folder))))


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_real_results_are_valid(
    name: str, tmp_path: Path, validator: jsonschema.Draft202012Validator
) -> None:
    found = json.loads(to_json(run_audit(config(make(name, tmp_path)))))
    assert [f"{e.json_path}: {e.message}" for e in validator.iter_errors(found)] == []


def _drop(found: dict[str, Any]) -> None:
    del found["blocks"][1]["block_influence"]


def _add(found: dict[str, Any]) -> None:
    found["blocks"][0]["influence"] = 1.0


def _other_type(found: dict[str, Any]) -> None:
    found["blocks"][0]["lens_kl"] = "0.1"


def _out_of_range(found: dict[str, Any]) -> None:
    found["blocks"][0]["write_cosine"] = 1.1


def _other_version(found: dict[str, Any]) -> None:
    found["schema"] = "mainstem.audit/2"


def _no_books(found: dict[str, Any]) -> None:
    found["books"] = None


@pytest.mark.parametrize("spoil", [_drop, _add, _other_type, _out_of_range, _other_version, _no_books])
def test_what_is_wrong_is_refused(
    spoil: Callable[[dict[str, Any]], None],
    valid: dict[str, Any],
    validator: jsonschema.Draft202012Validator,
) -> None:
    assert validator.is_valid(valid)
    found = copy.deepcopy(valid)
    spoil(found)
    assert not validator.is_valid(found)


def test_the_keys_that_readers_were_promised(valid: dict[str, Any]) -> None:
    assert valid["schema"] == SCHEMA == load_schema()["title"]
    assert {"nll", "tokens"} <= valid["loss"].keys()
    assert {"additivity", "continuity"} <= valid["books"].keys()
    assert {"block", "position", "channel", "value"} <= valid["outliers"][0].keys()
    promised = {
        "block",
        "block_influence",
        "angular_distance_next",
        "attn_write_ratio",
        "mlp_write_ratio",
        "write_cosine",
        "resid_norm_median",
        "lens_kl",
        "lens_top1",
    }
    assert all(promised <= block.keys() for block in valid["blocks"])


def fields(schema: dict[str, Any], path: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from fields(inner, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], f"{path}[]")


def test_every_key_is_described_and_every_null_explained() -> None:
    for path, field in fields(load_schema()):
        if path.endswith("]"):
            continue
        assert len(field.get("description", "")) >= 2, path
        if field.get("type") == "null" or "null" in field.get("type", ()):
            assert "Null" in field["description"], path


def test_the_committed_page_is_the_generated_one() -> None:
    page = (ROOT / "docs" / "audit-schema.md").read_text("utf-8")
    assert page == schema_page(), "python -m mainstem.audit.schema_page > docs/audit-schema.md"
    for path, field in fields(load_schema()):
        if field.get("description"):
            assert field["description"].replace("|", "\\|") in page, path
    assert "makes `/2`" in page
