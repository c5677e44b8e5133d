"""A `Comparison` for people and programs: a table on a terminal, a page, CSV, and the curves as pictures."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mainstem.errors import MainstemError
from mainstem.sources import require
from mainstem.training.compare import LEVEL, CellResult, Comparison, Cost, Paired, Spread

HEADS = (
    *("connection", "held-out loss", "seeds", "diverged", "against baseline", "p", ""),
    *("s a step", "CPU s", "MB", "parameters"),
)
LEFT = {"connection", ""}
_STYLES = {"lower": "green", "higher": "red"}
_COLOUR, _GREY = "#0072B2", "#999999"
_COLUMNS = 4  # pictures side by side


def comparison_to_json(result: Comparison) -> str:
    """Return the comparison as one JSON object."""
    return json.dumps(result.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def print_comparison(result: Comparison, console: Console) -> None:
    """Print a table a depth, then what the verdicts rest on."""
    for depth in result.settings["depths"]:
        console.print(f"[bold]{depth} blocks[/bold], {escape(budget(result, depth))}", highlight=False)
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
        for head in HEADS:
            table.add_column(head, justify="left" if head in LEFT else "right", no_wrap=True)
        for row, verdict in table_rows(result, depth):
            table.add_row(*map(escape, row), style=_STYLES.get(verdict, ""))
        console.print(table)
    for line in notes(result):
        console.print(line, highlight=False, style="dim", markup=False)


def table_rows(result: Comparison, depth: int) -> list[tuple[list[str], str]]:
    """Return the cells under `HEADS` of each connection at one depth, and the verdict on it."""
    pairs = {pair.connection: pair for pair in result.pairs if pair.depth == depth}
    rows: list[tuple[list[str], str]] = []
    seeds = len(result.settings["seeds"])
    for one, cost in zip(result.spreads, result.costs, strict=True):
        if one.depth == depth:
            pair = pairs.get(one.connection)
            rows.append(
                (
                    [*_loss_cells(one, seeds), *_pair_cells(pair), *_cost_cells(cost)],
                    pair.verdict if pair else "",
                )
            )
    return rows


def notes(result: Comparison) -> list[str]:
    """Return sentences: the baseline, the noise of seeds, what the test can see, who diverged or failed."""
    settings, seeds = result.settings, len(result.settings["seeds"])
    says = [
        "Loss: held-out text, nats a token, mean and standard deviation over the seeds that did not diverge. "
        f"Against baseline: mean over seeds of the loss minus that of {settings['baseline']} with the same "
        f"seed; p of a paired t-test; a difference is called one below p = {LEVEL}."
    ]
    for noise in result.noise:
        says.append(
            f"At {noise.depth} blocks seeds alone move the loss by {noise.std:.4f} (standard deviation, "
            f"{noise.degrees_of_freedom} degrees of freedom)."
        )
    widths = [pair.detectable for pair in result.pairs if pair.detectable is not None]
    if widths:
        by_chance = min(1.0, LEVEL * len(widths))
        says.append(
            f"With {seeds} seeds the smallest difference that could have been called one lay between "
            f"{min(widths):.3g} and {max(widths):.3g}, by the spread of each; 'no difference' says no more. "
            f"{len(widths)} tests at {LEVEL}: up to {by_chance:.0%} chance of a false call among them."
        )
    says += [f"{cell.name} {cell.status}: {cell.says}" for cell in result.cells if cell.says is not None]
    return says


def budget(result: Comparison, depth: int) -> str:
    """Say what each cell of a depth was given, and what followed from the depth."""
    cells = [cell for cell in result.cells if cell.depth == depth]
    config, trainer = cells[0].config, cells[0].config["trainer"]
    size = (
        f"width {config['width']}, {trainer['per_device_train_batch_size']} windows a step, "
        f"learning rate {trainer['learning_rate']:g}"
    )
    if (minutes := result.settings["minutes"]) is not None:
        return f"{minutes:g} minutes of training each; {size}"
    figures = [cell.figures for cell in cells if cell.figures]
    if not figures:
        return f"no result yet; {size}"
    most = max(figures, key=lambda one: one["steps"])
    return f"{most['steps']:,} steps, {most['tokens']:,} tokens each; {size}"


def comparison_to_csv(result: Comparison) -> str:
    """Return one row a cell."""
    out = io.StringIO()
    numbers = (
        *(
            "loss",
            "bits_per_byte",
            "start_loss",
            "steps",
            "tokens",
            "seconds_per_step",
            "cpu_seconds_per_step",
        ),
        *("train_seconds", "peak_memory", "memory_before", "num_parameters"),
    )
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["connection", "depth", "seed", "status", *numbers])
    for cell in result.cells:
        values = [cell.figures.get(name) for name in numbers]
        writer.writerow(
            [cell.connection, cell.depth, cell.seed, cell.status, *("" if v is None else v for v in values)]
        )
    return out.getvalue()


def comparison_to_markdown(result: Comparison, pictures: Sequence[str] = ()) -> str:
    """Return the comparison as a page: tables, what they rest on, pictures, and every setting."""
    settings, base = result.settings, result.settings["base"]
    lines = [
        f"# {len(settings['connections'])} connections compared",
        "",
        "Made by `mainstem compare`; do not edit.",
        "",
    ]
    for depth in settings["depths"]:
        lines += [f"## {depth} blocks", "", f"{budget(result, depth)}.", ""]
        lines += ["| " + " | ".join(head or "verdict" for head in HEADS) + " |"]
        lines += ["|" + "".join("---|" if head in LEFT else "---:|" for head in HEADS)]
        lines += ["| " + " | ".join(row) + " |" for row, _ in table_rows(result, depth)]
        lines += ["", *(f"![Held-out loss by step]({name})" for name in pictures if f"-{depth}." in name), ""]
    lines += ["## What it rests on", "", *(f"- {line}" for line in notes(result))]
    alike = {name: base[name] for name in ("text", "tokenizer", "window", "optimizer", "held_out", "tower")}
    lines += [
        f"- Alike in all cells: `{json.dumps(alike | base['trainer'], ensure_ascii=False)}`.",
        f"- Seeds {', '.join(map(str, settings['seeds']))}.",
        f"- On: `{json.dumps(result.provenance(), ensure_ascii=False)}`.",
        "- Seconds a step: the median, of forward, backward and update; CPU s: the same of the time that the "
        "process's cores worked. MB: the most that a cell's process held in training, Python and libraries "
        "included; on CUDA, the most allocated on the device.",
    ]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def plot_curves(result: Comparison, depth: int, path: Path) -> None:
    """Draw the held-out loss by step at one depth: a picture a connection, a line a seed, the baseline grey.

    The range is that of the losses after the first step, so that the fall from the start does not fill it.

    Args:
        path: of the picture; its suffix says which kind: ``.svg``, ``.png``, ``.pdf``.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    figure_class = require("matplotlib.figure", feature="A picture", extra="figures").Figure
    names = result.settings["connections"]
    rows = -(-len(names) // _COLUMNS)
    columns = min(_COLUMNS, len(names))
    figure = figure_class(figsize=(2.3 * columns, 0.4 + 1.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    cells = [cell for cell in result.cells if cell.depth == depth and cell.figures]
    for axis, name in zip(axes, names, strict=False):
        _lines(axis, [c for c in cells if c.connection == result.settings["baseline"]], _GREY)
        if name != result.settings["baseline"]:
            _lines(axis, [c for c in cells if c.connection == name], _COLOUR)
        diverged = sum(c.connection == name and c.status == "diverged" for c in cells)
        axis.set_title(name + (f" ({diverged} diverged)" if diverged else ""), fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(names) - columns : len(names)]:  # the lowest of each column
        axis.tick_params(labelbottom=True)
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    if later := [loss for cell in cells for step, loss in cell.figures["held_out_curve"] if step and loss]:
        margin = 0.1 * (max(later) - min(later)) or 0.1
        axes[0].set_ylim(min(later) - margin, max(later) + margin)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("held-out loss, nats a token", fontsize=8)
    figure.suptitle(f"{depth} blocks: every seed; grey is {result.settings['baseline']}", fontsize=9)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def write_comparison(result: Comparison, folder: Path) -> list[Path]:
    """Write ``compare.csv``, ``compare.md`` and, where Matplotlib is there, ``curves-DEPTH.svg``.

    Each is written beside its place first and moved there.

    Returns:
        The files' paths; ``compare.json`` is written by the comparison itself.

    Raises:
        MainstemError: the folder cannot be written.
    """
    writers: dict[str, Callable[[Path], Any]] = {
        "compare.csv": lambda path: path.write_text(comparison_to_csv(result), encoding="utf-8")
    }
    depths = result.settings["depths"] if _can_draw() else []
    for depth in depths:
        writers[f"curves-{depth}.svg"] = partial(plot_curves, result, depth)
    page = comparison_to_markdown(result, list(writers))
    writers["compare.md"] = lambda path: path.write_text(page, encoding="utf-8")
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as work:
            for name, write in writers.items():
                write(Path(work) / name)
            for name in writers:
                os.replace(Path(work) / name, folder / name)
    except OSError as error:
        raise MainstemError(
            f"The results could not be written to {folder}: {error.strerror or error}."
        ) from error
    return [folder / name for name in writers]


def _can_draw() -> bool:
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def _loss_cells(one: Spread, seeds: int) -> list[str]:
    loss = "-" if one.mean is None else f"{one.mean:.4f}"
    if one.std is not None:
        loss += f" ± {one.std:.4f}"
    return [one.connection, loss, f"{len(one.losses)}/{seeds}", str(one.diverged)]


def _pair_cells(pair: Paired | None) -> list[str]:
    if pair is None:
        return ["", "", "baseline"]
    mean = "-" if pair.mean is None else f"{pair.mean:+.4f}"
    if pair.std is not None:
        mean += f" ± {pair.std:.4f}"
    return [mean, "-" if pair.p is None else f"{pair.p:.2g}", pair.verdict]


def _cost_cells(cost: Cost | None) -> list[str]:
    if cost is None:
        return ["-", "-", "-", "-"]
    cores = "-" if cost.cpu_seconds_per_step is None else f"{cost.cpu_seconds_per_step:.3g}"
    return [
        f"{cost.seconds_per_step:.3g}",
        cores,
        f"{cost.peak_memory / 1e6:,.0f}",
        f"{cost.num_parameters:,}",
    ]


def _lines(axis: Any, cells: Sequence[CellResult], colour: str) -> None:
    for cell in cells:
        points = [(step, loss) for step, loss in cell.figures["held_out_curve"] if loss is not None]
        broken = cell.status == "diverged"
        axis.plot(
            [step for step, _ in points],
            [loss for _, loss in points],
            color=colour,
            linewidth=1,
            linestyle="--" if broken else "-",
            marker="x" if broken else None,
            markevery=[-1] if broken and points else None,
        )
