"""Results for a terminal: a table by block and a sentence or two a question."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mainstem.audit import AuditResult, BlockFigures, Loss, Outlier

PLAIN_WIDTH = 120
"""Columns where the output is no terminal: a file or a pipe has no width to fit."""


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column: its head, its cells, and what goes first where there is no room (the lowest rank)."""

    head: str
    cell: Callable[[BlockFigures], str]
    rank: int = 99


def plain_console() -> Console:
    """Return a console on standard output: the terminal's width on one, `PLAIN_WIDTH` elsewhere."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def print_result(result: AuditResult, console: Console) -> None:
    """Print the table by block, then what was found."""
    stream, model, text = (result.provenance[k] for k in ("stream", "model", "text"))
    console.print(
        f"[bold]{escape(model['requested'])}[/bold] ({model['architecture']}, {model['num_parameters']:,} "
        f"parameters, {model['dtype']}): {_count(stream['num_blocks'], 'block')}, width {stream['width']}"
        + (f", {stream['num_streams']} streams" if stream["num_streams"] > 1 else ""),
        highlight=False,
    )
    console.print(
        f"{text['num_tokens']:,} tokens of {escape(text['text']['name'])} in "
        f"{_count(text['num_windows'], 'window')}; {escape(text['first_token_policy'])}",
        highlight=False,
        style="dim",
    )
    table, left_out = _table(result, console.width)
    console.print(table)
    asides = ["means leave out the first token of each window, which is in first, max and the lens"]
    if _skipped(result):
        asides.append("skip: the loss without the block minus that with it, nats a token")
    if any(o.massive for o in result.outliers):
        asides.append("* massive: over 100 and 1,000 medians")
    if left_out:
        asides.append(f"left out for lack of room: {', '.join(left_out)}")
    console.print("; ".join(asides), highlight=False, style="dim")
    if result.loss is not None:
        console.print(loss_line(result.loss), highlight=False)
    for note in result.provenance["notes"]:
        console.print(escape(note), highlight=False, style="dim")
    for finding in result.findings:
        console.print(
            f"[bold]{finding.number} {finding.question}[/bold] {escape(finding.finding)}", highlight=False
        )


def _columns(result: AuditResult) -> list[_Column]:
    outliers = {o.block: o for o in result.outliers}
    kinds = [
        _Column(head, lambda b, name=f"{kind}_write_ratio": fixed(getattr(b, name)))
        for kind, head in (("attn", "attn"), ("cross_attn", "cross"), ("mlp", "mlp"), ("mixer", "mixer"))
        if any(getattr(b, f"{kind}_write_ratio") is not None for b in result.blocks)
    ]
    carries = any(b.write_cosine is not None for b in result.blocks)
    has_lens = any(b.lens_kl is not None for b in result.blocks)
    skipped = _skipped(result)
    return [
        _Column("block", lambda b: str(b.block)),
        _Column("norm", lambda b: short(b.resid_norm_median)),
        _Column("first", lambda b: short(b.resid_norm_first), rank=0),
        *kinds,
        *([_Column("cos", lambda b: fixed(b.write_cosine), rank=4)] if carries else []),
        _Column("infl.", lambda b: fixed(b.block_influence, 4)),
        *([_Column("skip", lambda b: fixed(skipped.get(b.block)), rank=7)] if skipped else []),
        _Column("angle", lambda b: fixed(b.angular_distance_next, 4), rank=1),
        _Column("max", lambda b: _largest(b, outliers.get(b.block)), rank=3),
        _Column("at", lambda b: _place(outliers.get(b.block)), rank=2),
        *([_Column("KL", lambda b: fixed(b.lens_kl, 2), rank=6)] if has_lens else []),
        *([_Column("top-1", lambda b: fixed(b.lens_top1), rank=5)] if has_lens else []),
    ]


def _skipped(result: AuditResult) -> dict[int, float]:
    """The loss of removing each block, where it was measured."""
    blocks = result.damage.blocks if result.damage is not None else ()
    return {b.block: b.removal_loss for b in blocks if b.removal_loss is not None}


def _table(result: AuditResult, width: int) -> tuple[Table, list[str]]:
    """Return the table, and the heads of the columns that it has no room for."""
    columns = [(c, [c.cell(block) for block in result.blocks]) for c in _columns(result)]
    widths = {c.head: max(map(len, [c.head, *cells])) for c, cells in columns}

    def room() -> int:
        return sum(widths[c.head] for c, _ in columns) + len(columns) - 1

    left_out: list[str] = []
    while room() > width and (spare := min(columns, key=lambda entry: entry[0].rank))[0].rank < 99:
        columns.remove(spare)
        left_out.append(spare[0].head)
    gap = 2 if room() + len(columns) - 1 <= width else 1
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for column, _ in columns:
        table.add_column(column.head, justify="right", no_wrap=True, min_width=widths[column.head])
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    return table, left_out


def _largest(block: BlockFigures, outlier: Outlier | None) -> str:
    return short(block.max_abs) + ("*" if outlier is not None and outlier.massive else "")


def _place(outlier: Outlier | None) -> str:
    return "-" if outlier is None else f"{outlier.position}:{outlier.channel}"


def _count(number: int, one: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}s"


def loss_line(loss: Loss) -> str:
    """Say the loss in one line."""
    return f"loss {loss.nll:.4f} nats a token (perplexity {loss.perplexity:.2f}) over {loss.tokens:,} tokens"


def fixed(value: float | None, digits: int = 3) -> str:
    """Return ``digits`` figures after the point, or three in all if that is shorter; ``-`` for none."""
    if value is None or value != value:
        return "-"
    text = f"{value:.{digits}f}"
    return text if len(text) <= digits + 4 else f"{value:.3g}"


def short(value: float) -> str:
    """Return at most four figures: ``25,805``, ``123.4``, ``0.0053``; ``-`` where there is none."""
    if value != value:
        return "-"
    if abs(value) >= 1e6:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
