"""The scripts of a page: what they draw from, what they are allowed, and that they ship."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mainstem.report._bundle import DIGITS, embedded, read_bundle
from mainstem.report.figure import Axis, Figure, Grid, Lines, Report, Series, Table
from mainstem.report.html import to_html

HOSTILE = "</script><!--<script>alert(1)"
BUNDLE = Path(__file__).parents[2] / "src" / "mainstem" / "report" / "bundle"


def report(*charts: Lines | Grid) -> Report:
    figure = Figure(
        id="growth",
        question=2,
        title="How?",
        finding=HOSTILE,
        charts=charts,
        table=Table(columns=["a"], rows=[[1.0]]),
        honesty="honest",
    )
    return Report(title="t", subjects=["one"], figures=[figure], provenance={"one": {"secret": 1}})


def line(*y: float | None, name: str = "a") -> Lines:
    series = Series(name=name, role="stream", x=[float(i) for i in range(len(y))], y=y)
    return Lines(title="t", x=Axis(label="x", floors=True), y=Axis(label="y"), series=[series])


def read(markup: str) -> dict[str, Any]:
    found = re.fullmatch(
        r'<script type="application/json" id="report-data"([^>]*)>(.*)</script>', markup, re.S
    )
    assert found is not None
    assert "<" not in found.group(2)
    text = found.group(2)
    if "gzip" in found.group(1):
        text = gzip.decompress(base64.b64decode(text)).decode()
    return json.loads(text)


def test_the_page_allows_its_own_script_and_no_other() -> None:
    text = to_html(report(line(1.0, 2.0)))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert policy is not None
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in html.unescape(policy.group(1))
    assert scripts[0] == (BUNDLE / "mainstem.js").read_text("utf-8")


def test_the_script_holds_nothing_that_ends_it() -> None:
    assert not re.search(r"</script|<!--", read_bundle().script, re.IGNORECASE)
    assert "</style" not in read_bundle().style


def test_the_figures_come_back_as_they_went() -> None:
    values = [1.0, None, 1 / 3, float("nan"), float("inf"), 1.23456789e-7]
    said = read(embedded(report(line(*values, name=HOSTILE + "\ud800"))))
    series = said["figures"][0]["charts"][0]["series"][0]
    assert series["y"] == [1.0, None, 0.333333, "nan", "inf", 1.23457e-7]
    assert series["name"] == HOSTILE + "\ud800"
    assert said["figures"][0]["finding"] == HOSTILE
    assert said["figures"][0]["table"] is None
    assert said["provenance"] == {}


@pytest.mark.parametrize("rows", [4, 97])
def test_long_figures_are_compressed_and_say_the_same(rows: int) -> None:
    """97 blocks x 256 tokens, three words a cell: a megabyte of words is a quarter of that in the page."""
    values = [[(7 * y + 3 * x) % 101 / 101 for x in range(256)] for y in range(rows)]
    says = "word{} 0.{}, the 0.1, of 0.0{}"
    words = [[says.format(y * x % 997, x % 10, y % 10) for x in range(256)] for y in range(rows)]
    chart = Grid(
        title="t", x=Axis(label="x"), y=Axis(label="y"), values=values, colour=Axis(label="c"), cells=words
    )
    markup = embedded(report(chart))
    said = read(markup)["figures"][0]["charts"][0]
    assert said["cells"] == words
    assert said["values"] == [[float(f"{v:.{DIGITS}g}") for v in row] for row in values]
    assert ("gzip" in markup[:100]) == (rows == 97)
    assert len(markup) < 400_000
    assert embedded(report(chart)) == markup
