"""A comparison of two models for people and programs: a table on a terminal, JSON, a row a block."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mainstem.report.files import rows_to_csv, write_texts
from mainstem.surgery.diff import BlockDiff, Change, Diff

FILES = ("diff.json", "diff.csv")
NOTHING = 1e-5
"""A relative change up to this is fp32's own rounding over a deep stack, and called none."""


def diff_to_json(result: Diff) -> str:
    """Return the result as one JSON object."""
    return json.dumps(result.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def diff_to_csv(result: Diff) -> str:
    """Return one row a pair of blocks; names that only one has are counted, not listed."""
    rows = [block.to_dict() for block in result.blocks]
    for row in rows:
        for name in ("only_a", "only_b"):
            if row["weights"] is not None:
                row["weights"][name] = len(row["weights"][name])
    return rows_to_csv(rows)


def write_diff(result: Diff, folder: Path) -> list[Path]:
    """Write ``diff.json`` and ``diff.csv``; see `mainstem.report.files.write_texts`."""
    return write_texts(dict(zip(FILES, (diff_to_json(result), diff_to_csv(result)), strict=True)), folder)


def print_diff(result: Diff, console: Console) -> None:
    """Print a row a pair of blocks, then what was found."""
    kinds = list(dict.fromkeys(kind for block in result.blocks for kind in block.writes))
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    heads = ["A", "B", *(head for kind in kinds for head in (f"{kind} change", "cosine"))]
    for head in (*heads, "stream change", "cosine", "weights"):
        table.add_column(head, justify="right", no_wrap=True)
    for block in result.blocks:
        table.add_row(*_cells(block, kinds))
    console.print(table)
    for line in diff_lines(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _cells(block: BlockDiff, kinds: Sequence[str]) -> list[str]:
    changes = [block.writes.get(kind) for kind in kinds] + [block.stream]
    cells = [cell for change in changes for cell in _pair(change)]
    weights = "-" if block.weights is None else _figure(block.weights.change)
    return [str(block.a), str(block.b), *cells, weights]


def _pair(change: Change | None) -> tuple[str, str]:
    if change is None:
        return "-", "-"
    return _figure(change.change), "-" if math.isnan(change.cosine) else f"{change.cosine:.4f}"


def _figure(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "from 0" if math.isinf(value) else f"{value:.3g}"


def diff_lines(result: Diff) -> list[str]:
    """Return what was found, in sentences."""
    loss = result.loss
    error = "" if math.isnan(loss.standard_error) else f" +- {loss.standard_error:.2g} (standard error)"
    lines = [
        f"loss of A {loss.a:.4f}, of B {loss.b:.4f} nats a token: B - A = {loss.difference:+.2g}{error} over "
        f"{loss.num_windows} windows, {loss.num_tokens:,} tokens; KL {loss.mean_kl:.2g} nats, largest logit "
        f"difference {loss.max_logit_difference:.2g}",
        f"blocks are matched {result.matched}; {_alone(result)}",
        _most(result),
    ]
    if result.outside is not None:
        outside = result.outside
        lines.append(
            f"weights outside the blocks changed by {_figure(outside.change)}"
            + ("" if outside.largest is None else f", most of all {outside.largest}")
        )
    else:
        lines.append("the weights of the two have other names and were not compared")
    return lines


def _alone(result: Diff) -> str:
    said = [
        f"{name} alone has {', '.join(map(str, blocks))}"
        for name, blocks in (("A", result.only_a), ("B", result.only_b))
        if blocks
    ]
    return "; ".join(said) or "each has a partner"


def _most(result: Diff) -> str:
    """Say which writes changed most."""
    changed = [
        (change.change, f"{kind} of {block.a}" if block.a == block.b else f"{kind} of {block.a}/{block.b}")
        for block in result.blocks
        for kind, change in block.writes.items()
        if change.change > NOTHING
    ]
    if not changed:
        return f"no block writes otherwise by more than {NOTHING:g} of what it wrote"
    total = sum(len(block.writes) for block in result.blocks)
    best = sorted(changed, key=lambda entry: -entry[0])[:3]
    named = ", ".join(f"{what} ({_figure(change)})" for change, what in best)
    return f"{len(changed)} of {total} writes changed; most: {named}"
