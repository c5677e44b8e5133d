"""One offline HTML file: sentence, charts, table and provenance of each question, also without scripts."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from mainstem.audit import SCHEMA
from mainstem.errors import MainstemError
from mainstem.report._bundle import embedded, read_bundle
from mainstem.report._svg import draw
from mainstem.report._text import visible
from mainstem.report.figure import Figure, Report, plain

_NEEDED = ("provenance", "books", "blocks", "findings", "angular_distance", "first_nonfinite")


def read_audit(path: Path) -> dict[str, Any]:
    """Return the JSON of a saved audit.

    Raises:
        MainstemError: the file cannot be read, is not whole, or is not an ``audit.json`` of this schema.
    """
    place = path / "audit.json" if path.is_dir() else path
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise MainstemError(
            f"{place} cannot be read ({error.strerror or error}); give an audit.json."
        ) from None
    except ValueError:  # torn JSON, or bytes that are not UTF-8
        raise MainstemError(
            f"{place} is not whole JSON; give an audit.json that `mainstem audit` wrote."
        ) from None
    schema = found.get("schema") if isinstance(found, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if schema != SCHEMA:
        raise MainstemError(
            f"{place} has the schema {schema!r} where {SCHEMA!r} was expected; give an audit.json that this "
            "version's `mainstem audit` wrote."
        )
    missing = [name for name in _NEEDED if name not in found]
    if missing:
        raise MainstemError(f"{place} has no {', '.join(missing)}; make it again with `mainstem audit`.")
    return found  # pyright: ignore[reportUnknownVariableType]


def to_html(report: Report) -> str:
    """Return the page: no request, light or dark as the reader's system is, light on paper.

    Its charts are drawn in it; where scripts run, those of ``web/`` put charts that answer in their place.
    """
    here = files("mainstem.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    environment.filters["cell"] = _cell
    template = environment.from_string((here / "page.html.jinja").read_text(encoding="utf-8"))
    drawn = {figure.id: _drawn(figure, report.subjects) for figure in report.figures}
    bundle = read_bundle()
    style = Markup((here / "page.css").read_text(encoding="utf-8"))
    provenance = {
        name: json.dumps(plain(about), indent=1, ensure_ascii=False)
        for name, about in report.provenance.items()
    }
    return template.render(
        report=report,
        drawn=drawn,
        style=style,
        provenance=provenance,
        bundle=bundle,
        data=embedded(report),
    )


def check_page(path: Path) -> None:
    """Make sure, before the work, that no folder is where `write_html` will put the page.

    Raises:
        MainstemError: there is one.
    """
    if path.is_dir():
        raise MainstemError(f"{path} is a folder where a file would go; choose another --out.")


def write_html(report: Report, path: Path) -> Path:
    """Write the page beside its place first and move it there, so a reader sees the old or the new.

    Raises:
        MainstemError: the place cannot be written.
    """
    check_page(path)
    text = to_html(report)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as work:
            made = Path(work) / "report.html"
            made.write_text(text, encoding="utf-8")
            os.replace(made, path)
    except OSError as error:
        raise MainstemError(
            f"The report could not be written to {path}: {error.strerror or error}; choose another "
            "place with --out."
        ) from error
    return path


def _drawn(figure: Figure, subjects: Sequence[str]) -> list[tuple[Markup, int]]:
    """Return each chart and the column that it stands in; 0 where all are of one model."""
    own = {chart.subject for chart in figure.charts}
    columns = {name: number for number, name in enumerate(subjects, 1)} if len(own) > 1 else {}
    return [
        (Markup(draw(chart, f"{figure.id}-{i}")), columns.get(chart.subject, 0))
        for i, chart in enumerate(figure.charts)
    ]


def _shown(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return "\n".join(map(visible, value.split("\n")))
    return value


def _cell(value: str | float | int | None) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:.5g}" if isinstance(value, float) and math.isfinite(value) else str(value)
