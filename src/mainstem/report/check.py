"""A `CheckReport` for people and programs: a table on a terminal, JSON, and a section of a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mainstem.check import CheckReport

_STYLES = {"finding": "bold red", "passed": "green", "skipped": "dim"}


def check_to_json(report: CheckReport) -> str:
    """Return the report as one JSON object."""
    return json.dumps(report.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def print_check(report: CheckReport, console: Console) -> None:
    """Print a row for each finding, pass and skip, then the count."""
    found = report.to_dict()
    depths = ", ".join(map(str, report.depths))
    console.print(
        f"[bold]{escape(report.subject)}[/bold] ({found['subject_kind']}) at depths {depths}", highlight=False
    )
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in ("check", "", "figure"):
        table.add_column(head, justify="right" if head == "figure" else "left", no_wrap=True)
    table.add_column("what was found", overflow="fold")
    for kind, verdict, figure, says in rows(found):
        style = _STYLES[verdict]
        table.add_row(
            kind, f"[{style}]{verdict}[/]", figure, escape(says), style="dim" if verdict == "skipped" else ""
        )
    console.print(table)
    number = len(report.findings)
    console.print(
        "[bold green]no finding[/]"
        if not number
        else f"[bold red]{number} finding{'s' if number > 1 else ''}[/]",
        highlight=False,
    )


def rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, verdict, figure and sentence of everything in the JSON of a report, findings first."""
    for finding in found["findings"]:
        yield (
            finding["kind"],
            "finding",
            figure(finding["figure"]),
            f"{finding['says']} At {finding['where']}.",
        )
    for passed in found["passed"]:
        yield passed["kind"], "passed", figure(passed["figure"]), passed["says"]
    for skipped in found["skipped"]:
        yield skipped["kind"], "skipped", "-", skipped["reason"]


def figure(value: float | str | None) -> str:
    """Return a figure with three digits: ``4``, ``0.211``, ``1.2e-07``, ``-`` for none."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.3g}"
