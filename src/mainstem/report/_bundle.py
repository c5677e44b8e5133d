"""The scripts that a page carries, and the figures that they draw from, safe inside HTML."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import json
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from mainstem.report.figure import Report

DIGITS = 6
"""Significant digits of a figure in the page; ``audit.json`` has all."""

_LONG = 100_000


@dataclasses.dataclass(frozen=True)
class Bundle:
    """The scripts and their style as built from ``web/``.

    Attributes:
        script, style: what goes into ``<script>`` and ``<style>``.
        policy: the source expression of a content security policy that allows the script alone.
    """

    script: Markup
    style: Markup
    policy: str


def read_bundle() -> Bundle:
    """Return the bundle that ships with the package (``make web`` builds it)."""
    here = files("mainstem.report") / "bundle"
    # newline as built: the policy is of the very bytes that the page holds
    script = (here / "mainstem.js").read_bytes().decode("utf-8")
    style = (here / "mainstem.css").read_bytes().decode("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return Bundle(script=Markup(script), style=Markup(style), policy=f"'sha256-{digest}'")


def embedded(report: Report) -> Markup:
    """Return the charts of a report as a ``<script type="application/json">``.

    ``<`` is ``\\u003c``, so that no word of a text ends the element. What is long is compressed (gzip,
    base64): a grid of 97 x 256 cells with their words would be megabytes. Tables and provenance are in the
    page itself.
    """
    figures = [dataclasses.replace(figure, table=None) for figure in report.figures]
    said = dataclasses.replace(report, figures=figures, provenance={}).to_dict()
    # ASCII alone: half of a surrogate pair in a word has no UTF-8
    text = json.dumps(_rounded(said), allow_nan=False, separators=(",", ":"))
    kind = '<script type="application/json" id="report-data"'
    if len(text) <= _LONG:
        return Markup(f"{kind}>{text.replace('<', chr(92) + 'u003c')}</script>")
    # mtime 0: the same report makes the same page
    packed = base64.b64encode(gzip.compress(text.encode("ascii"), 9, mtime=0)).decode("ascii")
    return Markup(f'{kind} data-encoding="gzip">{packed}</script>')


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]
    return value
