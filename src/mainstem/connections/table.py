"""The table of all schemes: every cell computed from the scheme itself."""

from __future__ import annotations

import dataclasses
from typing import Any

from mainstem.connections._base import Scheme
from mainstem.connections._registry import make_scheme, scheme_names
from mainstem.connections.cost import count_cost

WIDTH = 256
"""Width at which costs are counted."""
NUM_SUBLAYERS = 24
"""Depth at which costs are counted: 12 blocks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchemeRow:
    """One scheme at its published defaults.

    Attributes:
        name, family, year, paper, formula: see `Scheme`.
        streams: parallel streams.
        has_history: whether the stream grows with depth.
        exact_start: ``"always"``, ``"option"`` (with ``exact_start=True``) or ``"no"``.
        start_distance: from plain Pre-LN, as published; see `Properties`.
        parameters, flops, bytes_moved, bytes_saved: see `Cost`, at width 256 and 24 sublayers, fp32.
        refuses: what it cannot be combined with, and why.
    """

    name: str
    family: str
    year: int
    paper: str
    formula: str
    streams: int
    has_history: bool
    exact_start: str
    start_distance: float
    parameters: float
    flops: float
    bytes_moved: float
    bytes_saved: float
    refuses: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return dataclasses.asdict(self)


def scheme_rows() -> list[SchemeRow]:
    """Return a row for every registered scheme, by family and year, costs counted now."""
    rows = [scheme_row(make_scheme(name)) for name in scheme_names()]
    return sorted(rows, key=lambda row: (row.family != "none", row.family, row.year, row.name))


def scheme_row(scheme: Scheme) -> SchemeRow:
    """Return the row of one scheme."""
    cost = count_cost(scheme, width=WIDTH, num_sublayers=NUM_SUBLAYERS)
    properties = scheme.properties
    option = "no" if scheme.no_exact_start is not None else "option"
    return SchemeRow(
        name=scheme.name,
        family=scheme.family,
        year=scheme.year,
        paper=scheme.paper,
        formula=scheme.formula,
        streams=properties.num_streams,
        has_history=properties.has_history,
        exact_start="always" if properties.equals_pre_norm_at_start else option,
        start_distance=properties.start_distance,
        parameters=cost.parameters,
        flops=cost.flops,
        bytes_moved=cost.bytes_moved,
        bytes_saved=cost.bytes_saved,
        refuses=dict(scheme.refuses),
    )
