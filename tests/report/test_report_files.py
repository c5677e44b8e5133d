"""JSON and CSV: the same figures, whole files or none."""

from __future__ import annotations

import csv
import dataclasses
import errno
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from mainstem.audit import AuditResult
from mainstem.errors import MainstemError
from mainstem.report import check_folder, to_csv, to_json, write_files


def test_csv_and_json_hold_the_same_figures(llama: AuditResult) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(llama))))
    blocks = json.loads(to_json(llama))["blocks"]
    assert len(rows) == len(blocks) == 3
    for row, block in zip(rows, blocks, strict=True):
        assert (
            float(row["block_influence"])
            == block["block_influence"]
            == llama.blocks[block["block"]].block_influence
        )
        assert float(row["absorbed_bfloat16.mlp.first"]) == block["absorbed_bfloat16"]["mlp"]["first"]
        assert row["cross_attn_write_ratio"] == ""
        assert block["cross_attn_write_ratio"] is None
        assert row["module"] == f"model.layers.{block['block']}"


def test_what_is_not_finite_is_null(llama: AuditResult) -> None:
    blocks = [dataclasses.replace(b, block_influence=math.nan, max_abs=math.inf) for b in llama.blocks]
    result = dataclasses.replace(llama, blocks=blocks)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(to_json(result), parse_constant=refuse)
    assert found["blocks"][0]["block_influence"] is found["blocks"][0]["max_abs"] is None
    assert next(csv.DictReader(io.StringIO(to_csv(result))))["max_abs"] == ""


def test_two_runs_into_one_folder(llama: AuditResult, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    assert write_files(llama, folder) == [folder / "audit.json", folder / "audit.csv"]
    (folder / "mine.txt").write_text("keep")
    before = (folder / "audit.json").read_text("utf-8")
    fewer = dataclasses.replace(llama, blocks=llama.blocks[:1])
    write_files(fewer, folder)
    assert (folder / "audit.json").read_text("utf-8") == to_json(fewer) != before
    assert (folder / "audit.csv").read_text("utf-8") == to_csv(fewer)
    assert sorted(p.name for p in folder.iterdir()) == ["audit.csv", "audit.json", "mine.txt"]


def test_a_full_disk_leaves_what_was_there(
    llama: AuditResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write_files(llama, old)
    before = {p.name: p.read_bytes() for p in old.iterdir()}
    write = Path.write_text

    def half(self: Path, data: str, **kwargs: Any) -> int:
        write(self, data[: len(data) // 2], **kwargs)
        if self.suffix == ".csv":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data, **kwargs)

    monkeypatch.setattr(Path, "write_text", half)
    for folder in (old, new):
        with pytest.raises(MainstemError, match="No space left on device"):
            write_files(dataclasses.replace(llama, blocks=llama.blocks[:1]), folder)
    assert {p.name: p.read_bytes() for p in old.iterdir()} == before
    assert not new.exists()


def test_places_that_cannot_be_written(llama: AuditResult, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    (tmp_path / "taken" / "audit.csv").mkdir(parents=True)
    for folder, says in (
        (file, "is a file, so no results can be put in"),
        (file / "below", "is a file, so no results can be put in"),
        (tmp_path / "taken", "is a folder where a file would go"),
    ):
        for act in (check_folder, lambda place: write_files(llama, place)):
            with pytest.raises(MainstemError, match=says):
                act(folder)
    assert file.read_text() == "mine"
    assert [p.name for p in (tmp_path / "taken").iterdir()] == ["audit.csv"]
    with pytest.raises(MainstemError, match=r"could not be written|cannot be written"):
        write_files(llama, Path("/proc/mainstem"))


def test_checking_makes_nothing(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
