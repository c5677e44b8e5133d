"""The report: a page from saved audits."""

from __future__ import annotations

import copy
import importlib
import json
import re
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mainstem.audit import AuditResult, run_audit
from mainstem.errors import MainstemError
from mainstem.report import to_json
from mainstem.report._axes import label
from mainstem.report._colours import cividis
from mainstem.report._png import png
from mainstem.report._svg import draw
from mainstem.report._text import visible
from mainstem.report.figure import Axis, Grid, Lines, Report, Series
from mainstem.report.figures import make_report
from mainstem.report.html import read_audit, to_html, write_html

HOSTILE = "</script><img src=x onerror=alert(1)>\u202etxt.exe"


@pytest.fixture
def audit(llama: AuditResult) -> dict[str, Any]:
    return json.loads(to_json(llama))


class Page(HTMLParser):
    """Tags, addresses and text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def series(report: Report, question: int, chart: str, name: str) -> Series:
    figure = next(f for f in report.figures if f.question == question)
    panel = next(c for c in figure.charts if chart in c.title)
    assert isinstance(panel, Lines)
    return next(s for s in panel.series if s.name.startswith(name))


def test_every_question_has_its_own_numbers(audit: dict[str, Any]) -> None:
    report = make_report([audit])
    assert [f.question for f in report.figures] == [f["number"] for f in audit["findings"]]
    assert [f.finding for f in report.figures] == [f["finding"] for f in audit["findings"]]
    blocks = audit["blocks"]
    for question, chart, name, key in (
        (2, "Size", "median", "resid_norm_median"),
        (2, "Size", "first", "resid_norm_first"),
        (3, "each sublayer", "attention", "attn_write_ratio"),
        (3, "each sublayer", "feed-forward", "mlp_write_ratio"),
        (3, "erase", "block", "write_cosine"),
        (5, "How far", "all", "lens_kl"),
        (5, "Top word", "all", "lens_top1"),
        (7, "turns", "block", "block_influence"),
    ):
        assert list(series(report, question, chart, name).y) == [b[key] for b in blocks]
    norms = series(report, 2, "Size", "median")
    assert norms.low == [b["resid_norm_p5"] for b in blocks]
    nearest = [b["nearest_embedding"] for b in blocks]
    assert list(series(report, 4, "nearest", "tokens").y) == [audit["identity"]["nearest_before"], *nearest]
    gradients = [audit["gradient"]["norm_before"], *(b["gradient_norm"] for b in blocks)]
    assert list(series(report, 8, "Gradient", "mean").y) == gradients
    running = series(report, 5, "way up", "embedding").y
    assert running[-1] == pytest.approx(audit["attribution"]["before"], abs=1e-4)


def test_the_table_has_the_figures_of_the_chart(audit: dict[str, Any]) -> None:
    table = next(f for f in make_report([audit]).figures if f.question == 8).table
    assert table is not None
    assert [row[1] for row in table.rows][1:] == [b["gradient_norm"] for b in audit["blocks"]]


def test_two_audits_share_their_axes(audit: dict[str, Any]) -> None:
    larger = copy.deepcopy(audit)
    for block in larger["blocks"]:
        block["gradient_norm"] *= 1000.0
    report = make_report([audit, larger])
    charts = next(f for f in report.figures if f.question == 8).charts
    assert len(charts) == 2
    assert len(set(report.subjects)) == 2
    one, two = charts
    assert isinstance(one, Lines)
    assert isinstance(two, Lines)
    assert one.y == two.y
    domain = one.y.domain
    assert domain is not None
    assert domain[1] >= max(b["gradient_norm"] for b in larger["blocks"])


def test_books_that_do_not_balance_have_no_chart(audit: dict[str, Any]) -> None:
    audit["books"]["additivity"] = 0.25
    report = make_report([audit])
    assert all(not f.charts and f.refused and "2.5e-01" in f.refused for f in report.figures)
    page = to_html(report)
    assert "<svg" not in page
    assert "do not balance" in page


def test_the_honesty_line(audit: dict[str, Any]) -> None:
    line = make_report([audit]).figures[0].honesty
    about = audit["provenance"]
    for part in (
        about["model"]["weights_sha256"][:16],
        about["model"]["dtype"],
        about["created"][:10],
        "torch",
    ):
        assert part in line


def test_the_page_asks_for_nothing(audit: dict[str, Any]) -> None:
    text = to_html(make_report([audit, audit]))
    page = Page(text)
    assert page.tags.count("script") == 2  # the figures, and what draws from them
    assert not page.handlers
    assert page.addresses
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in page.addresses)
    styles = "".join(re.findall(r"<style>.*?</style>", text, re.DOTALL))
    assert not re.search(r"url\((?!#)|@import", styles)
    assert "default-src 'none'" in text
    assert len(text.encode()) <= 1_000_000


def test_hostile_words_are_text(audit: dict[str, Any]) -> None:
    audit["attribution"]["token"] = HOSTILE
    audit["attribution"]["parts"][0]["label"] = HOSTILE
    audit["provenance"]["model"]["requested"] = HOSTILE
    audit["findings"][0]["finding"] = HOSTILE
    text = to_html(make_report([audit]))
    page = Page(text)
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert not page.handlers
    assert "\u202e" not in text
    assert "</script><img src=x onerror=alert(1)><U+202E>txt.exe" in page.text


def test_what_is_not_finite_has_a_lane(audit: dict[str, Any]) -> None:
    audit["blocks"][2]["resid_norm_median"] = None
    chart = next(f for f in make_report([audit]).figures if f.question == 2).charts[0]
    assert "1 not finite" in draw(chart, "x")


def test_zeros_on_a_log_axis_have_a_lane() -> None:
    line = Series(name="a", role="stream", x=[0, 1, 2, 3], y=[1.0, 0.0, 0.0, 100.0])
    svg = draw(Lines(title="t", x=Axis(label="x"), y=Axis(label="y", scale="log"), series=[line]), "x")
    assert "2 at or below 0" in svg


def test_a_missing_figure_breaks_the_line() -> None:
    line = Series(name="a", role="stream", x=[0, 1, 2, 3, 4], y=[1.0, 2.0, None, 2.0, 1.0])
    svg = draw(Lines(title="t", x=Axis(label="x"), y=Axis(label="y"), series=[line]), "x")
    found = re.search(r'class="line" d="([^"]*)"', svg)
    assert found is not None
    assert found.group(1).count("M") == 2


def test_points_are_where_the_figures_are() -> None:
    """Decades of a log axis are evenly spaced, 1 on top of the lower limit and 100 on the upper."""
    axis = Axis(label="y", scale="log", domain=(1.0, 100.0))
    line = Series(name="a", role="stream", x=[0, 1, 2], y=[1.0, 10.0, 100.0])
    svg = draw(Lines(title="t", x=Axis(label="x"), y=axis, series=[line]), "x")
    found = re.search(r'class="line" d="M\S+ (\S+)L\S+ (\S+)L\S+ ([^"]+)"', svg)
    assert found is not None
    low, middle, high = map(float, found.groups())
    assert low - middle == pytest.approx(middle - high, abs=0.11)
    assert low > high


def test_a_picture_of_pixels_is_a_png() -> None:
    rows = [[(1, 2, 3, 255), (4, 5, 6, 0)], [(7, 8, 9, 255), (10, 11, 12, 255)]]
    data = png(rows)
    assert struct.unpack(">II", data[16:24]) == (2, 2)
    at = data.index(b"IDAT")
    (size,) = struct.unpack(">I", data[at - 4 : at])
    body = data[at + 4 : at + 4 + size]
    assert zlib.decompress(body) == bytes([0, 1, 2, 3, 255, 4, 5, 6, 0, 0, 7, 8, 9, 255, 10, 11, 12, 255])
    assert struct.unpack(">I", data[at + 4 + size : at + 8 + size]) == (zlib.crc32(b"IDAT" + body),)


def test_a_grid_is_one_picture() -> None:
    chart = Grid(
        title="t",
        x=Axis(label="x", floors=True),
        y=Axis(label="y", floors=True),
        values=[[0.1, 0.2], [None, 0.4]],
        colour=Axis(label="c"),
    )
    assert draw(chart, "x").count("<image") == 2  # cells and the colour bar
    assert cividis(0.0) == (0, 34, 78)
    assert cividis(1.0) == (254, 232, 56)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\u202eb", "a<U+202E>b"),
        ("\x00", "<U+0000>"),
        ("é 😀 👩\u200d🚀", "é 😀 👩\u200d🚀"),
        ("\u2028", "<U+2028>"),
    ],
)
def test_hidden_characters_are_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        (b'{"schema": "mainstem.audit/1", "blo', "not whole JSON"),
        (b"\xff\xfe\x00", "not whole JSON"),
        (b"[]", "has the schema None"),
        (b'{"schema": "mainstem.compare/1"}', "'mainstem.compare/1'"),
        (b'{"schema": "mainstem.audit/1"}', "has no provenance"),
    ],
)
def test_another_file_is_one_sentence(content: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MainstemError, match=re.escape(says)):
        read_audit(path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("blocks",), 3),
        (("blocks", 1, "lens_kl"), "much"),
        (("blocks", 0, "resid_norm_median"), [1.0]),
        (("provenance",), {}),
        (("books", "tolerance"), None),
        (("findings", 0, "number"), 99),
        (("angular_distance", "distances"), [[0.1], None]),
        (("attribution", "parts", 0), {}),
        (("spectra", 0, "whole"), "all"),
    ],
)
def test_a_damaged_audit_is_one_sentence(
    path: tuple[str | int, ...], value: object, audit: dict[str, Any]
) -> None:
    at: Any = audit
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(MainstemError, match="not as its schema says"):
        to_html(make_report([audit]))


@pytest.mark.parametrize("name", ["one_block", "four_streams", "no_residual", "bert", "encoder", "mamba"])
def test_other_kinds_of_models(name: str, tmp_path: Path) -> None:
    """A page has a section a question that was answered, and in it every figure that was measured."""
    tiny = importlib.import_module("tiny_models")
    result = run_audit(tiny.config(tiny.make(name, tmp_path), sweep=True))
    report = make_report([json.loads(to_json(result))])
    assert [f.question for f in report.figures] == [f.number for f in result.findings]
    page = Page(to_html(report))
    assert page.tags.count("section") == len(result.findings)
    assert page.tags.count("svg") == sum(len(f.charts) for f in report.figures)
    grid = next(c for f in report.figures for c in f.charts if isinstance(c, Grid) and "Damage" in c.title)
    assert result.damage is not None
    for block in result.damage.blocks:
        row = list(grid.values[block.block])
        assert row[block.block :] == pytest.approx(list(block.change), nan_ok=True)
        assert row[: block.block] == [None] * block.block


def test_it_is_written_whole(audit: dict[str, Any], tmp_path: Path) -> None:
    path = write_html(make_report([audit]), tmp_path / "new" / "report.html")
    assert path.read_text("utf-8") == to_html(make_report([audit]))
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    with pytest.raises(MainstemError, match="is a folder"):
        write_html(make_report([audit]), tmp_path)


def test_a_zero_is_not_joined_to_its_neighbours() -> None:
    line = Series(name="a", role="stream", x=[0, 1, 2, 3, 4], y=[1.0, 2.0, 0.0, 2.0, 1.0])
    for scale, runs in (("log", 2), ("linear", 1)):
        axis = Axis(label="y", scale=scale)  # pyright: ignore[reportArgumentType]
        svg = draw(Lines(title="t", x=Axis(label="x"), y=axis, series=[line]), "x")
        found = re.search(r'class="line" d="([^"]*)"', svg)
        assert found is not None
        assert found.group(1).count("M") == runs


def test_a_row_of_the_table_is_one_place(audit: dict[str, Any]) -> None:
    """The state that a block leaves is in the block's row, in every column."""
    table = next(f for f in make_report([audit]).figures if f.question == 5).table
    assert table is not None
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(rows) == ["before", *range(len(audit["blocks"]))]
    before, after = rows["before"], rows[0]
    kl = next(name for name in table.columns if "How far" in name)
    way = next(name for name in table.columns if "way up" in name)
    assert (before[kl], after[kl]) == (None, audit["blocks"][0]["lens_kl"])
    own = [p["logit"] for p in audit["attribution"]["parts"] if p["block"] == 0]
    assert after[way] - before[way] == pytest.approx(sum(own), abs=1e-9)


def test_the_page_says_what_is_missing(audit: dict[str, Any]) -> None:
    assert "--sweep" in Page(to_html(make_report([audit]))).text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.001, "0.001"),
        (1e-5, "10⁻⁵"),
        (2.5e6, "2.5·10⁶"),
        (2000, "2,000"),
        (0.30000000000000004, "0.3"),
    ],
)
def test_labels_of_an_axis(value: float, shown: str) -> None:
    assert label(value) == shown
