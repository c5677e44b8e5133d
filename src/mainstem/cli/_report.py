"""`mainstem report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mainstem.cli._terminal import output


def report(
    audits: Annotated[
        list[Path],
        typer.Argument(
            help="One audit.json, or two to show side by side; folders do too.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="The HTML file to write.", metavar="FILE")] = Path("report.html"),
) -> None:
    """Write one HTML file from saved audits: each question's answer, chart, figures and provenance.

    It opens offline, needs no script and asks for nothing from a network.
    """
    from mainstem.errors import MainstemError
    from mainstem.report import make_report, read_audit, write_html

    if len(audits) > 2:
        raise MainstemError(f"{len(audits)} audits were given; a report shows one, or two side by side.")
    path = write_html(make_report([read_audit(audit) for audit in audits]), out)
    with output():
        print(f"wrote {path}")
