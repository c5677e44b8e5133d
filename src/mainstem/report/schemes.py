"""The table of residual connections for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from mainstem.connections.table import NUM_SUBLAYERS, WIDTH, SchemeRow

NUMBERS = ("params", "flops", "moved", "saved")


def print_schemes(rows: Sequence[SchemeRow], console: Console) -> None:
    """Print one line a scheme: how it starts and what it costs beside plain Pre-LN."""
    plain = next(row for row in rows if row.name == "pre_norm")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for head in ("connection", "year", "paper", "n", "start", *NUMBERS):
        table.add_column(head, justify="right" if head in ("n", "start", *NUMBERS) else "left", no_wrap=True)
    family = ""
    for row in rows:
        if row.family != family:
            family = row.family
            table.add_row(f"[bold]{family}[/bold]")
        table.add_row(row.name, str(row.year), row.paper, _streams(row), _start(row), *_costs(row, plain))
    console.print(table)
    console.print(
        f"n: streams, + for a history. start: distance from Pre-LN as published, 0 for the same function, "
        f"* where exact_start=True makes it 0. Counted on the residual path of {NUM_SUBLAYERS} sublayers of "
        f"width {WIDTH}, norms included, in units of Pre-LN's own: parameters, operations, bytes moved, "
        "bytes saved for backward.",
        highlight=False,
        style="dim",
    )


def _streams(row: SchemeRow) -> str:
    return f"{row.streams}{'+' if row.has_history else ''}"


def _start(row: SchemeRow) -> str:
    return f"{row.start_distance:.2g}{'*' if row.exact_start == 'option' else ' '}"


def _costs(row: SchemeRow, plain: SchemeRow) -> list[str]:
    pairs = (
        (row.parameters, plain.parameters),
        (row.flops, plain.flops),
        (row.bytes_moved, plain.bytes_moved),
        (row.bytes_saved, plain.bytes_saved),
    )
    return [f"{mine / base:.2f}" for mine, base in pairs]
