"""Two audits side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mainstem.audit import AuditResult, BlockFigures
from mainstem.report.terminal import fixed, loss_line, short

ROWS = 17
"""Blocks shown, evenly spread."""


def print_pair(results: Mapping[str, AuditResult], console: Console) -> None:
    """Print figures by block of several audits beside each other, then what each question found in each.

    Args:
        results: by the name to print; all of one text.
        console: where to.
    """
    first = next(iter(results.values()))
    text = first.provenance["text"]
    console.print(
        f"[bold]{' and '.join(map(escape, results))}[/bold] on {text['num_tokens']:,} tokens of "
        f"{escape(text['text']['name'])}",
        highlight=False,
    )
    console.print(_table(results))
    for name, result in results.items():
        if result.loss is not None:
            console.print(f"{escape(name)}: {loss_line(result.loss)}", highlight=False)
    questions = {f.number: f.question for result in results.values() for f in result.findings}
    for number, question in sorted(questions.items()):
        console.print(f"[bold]{number} {question}[/bold]", highlight=False)
        for name, result in results.items():
            said = next((f.finding for f in result.findings if f.number == number), "no figure")
            console.print(f"  [dim]{escape(name)}:[/dim] {escape(said)}", highlight=False)


_FIGURES: tuple[tuple[str, Callable[[BlockFigures], str]], ...] = (
    ("norm", lambda b: short(b.resid_norm_median)),
    ("write", lambda b: fixed(b.write_ratio)),
    ("infl.", lambda b: fixed(b.block_influence)),
    ("KL", lambda b: fixed(b.lens_kl, 2)),
    ("top-1", lambda b: fixed(b.lens_top1)),
)


def _table(results: Mapping[str, AuditResult]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("block", justify="right")
    for name in results:
        for number, (head, _) in enumerate(_FIGURES):
            table.add_column(
                f"{escape(name)}\n{head}" if number == 0 else f"\n{head}", justify="right", no_wrap=True
            )
    depth = max(len(result.blocks) for result in results.values())
    shown = sorted({round(i * (depth - 1) / (min(ROWS, depth) - 1 or 1)) for i in range(min(ROWS, depth))})
    for block in shown:
        cells = [str(block)]
        for result in results.values():
            there = block < len(result.blocks)
            cells += [figure(result.blocks[block]) if there else "" for _, figure in _FIGURES]
        table.add_row(*cells)
    return table
