"""Connections x depths x seeds: trained alike, compared honestly, resumable cell by cell."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mainstem.errors import ConfigError, MainstemError
from mainstem.sources import load_text, require
from mainstem.training._compare_files import CELL, RESULT, STEPS, read_steps, write_json
from mainstem.training._compare_launch import OUTPUT, Job, Submit, launcher
from mainstem.training._compare_plan import Cell, CompareConfig, check_cells, parse_numbers
from mainstem.training._compare_statistics import LEVEL, Noise, Paired, Spread, paired, seed_noise, spread
from mainstem.training.data import prepare_text
from mainstem.training.run import Tell

__all__ = [
    "LEVEL",
    "CellResult",
    "CompareConfig",
    "Comparison",
    "Cost",
    "Noise",
    "Paired",
    "Spread",
    "compare",
    "parse_numbers",
    "read_comparison",
]

SCHEMA = "mainstem.compare/1"
FILE = "compare.json"
SAY_EVERY = 30.0
"""Seconds between two lines of progress."""

Status = Literal["finished", "diverged", "failed", "waiting"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellResult:
    """What one run came to.

    Attributes:
        status: ``"finished"``; ``"diverged"``: a loss or gradient was not finite, or the held-out loss ended
            above the one it began with; ``"failed"``: there is no result; ``"waiting"``: there is none yet.
        says: why it diverged or failed.
        figures: what its process wrote down; empty where it failed.
        config: of its run, with all that followed from the depth.
    """

    name: str
    connection: str
    depth: int
    seed: int
    status: Status
    says: str | None
    figures: Mapping[str, Any]
    config: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What a connection costs at one depth.

    Attributes:
        seconds_per_step: median over its seeds of each one's median, by the wall clock.
        cpu_seconds_per_step: the same of the time that the process's cores worked, which another load on the
            machine changes far less. On CUDA it is what launching the work takes.
        peak_memory: bytes, median over its seeds: of a process on a CPU, of the device on CUDA.
        num_parameters: that are trained.
    """

    seconds_per_step: float
    cpu_seconds_per_step: float | None
    peak_memory: int
    num_parameters: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result.

    Attributes:
        settings: of the comparison; see :meth:`CompareConfig.to_dict`.
        cells: in the order in which they were run.
        spreads: by depth, then in the order of the connections.
        costs: beside ``spreads``; None where no seed has a result.
        pairs: every connection but the baseline, at every depth.
        noise: one a depth, where it can be told.
    """

    settings: dict[str, Any]
    cells: list[CellResult]
    spreads: list[Spread]
    costs: list[Cost | None]
    pairs: list[Paired]
    noise: list[Noise]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data in the form that ``docs/compare.md`` describes."""
        return {
            "schema": SCHEMA,
            "settings": self.settings,
            "provenance": self.provenance(),
            "groups": [
                {
                    **_listed(dataclasses.asdict(one), "losses", "loss"),
                    "cost": cost and dataclasses.asdict(cost),
                }
                for one, cost in zip(self.spreads, self.costs, strict=True)
            ],
            "pairs": [_listed(dataclasses.asdict(one), "differences", "difference") for one in self.pairs],
            "noise": [dataclasses.asdict(one) for one in self.noise],
            "cells": [_cell_dict(cell) for cell in self.cells],
        }

    def provenance(self) -> dict[str, Any]:
        """Return text, versions and devices of the cells; a list where they differ."""
        found: dict[str, Any] = {}
        for name in ("data", "versions", "device"):
            seen: list[Any] = []
            for cell in self.cells:
                if name in cell.figures and cell.figures[name] not in seen:
                    seen.append(cell.figures[name])
            found[name] = seen[0] if len(seen) == 1 else seen
        return found


def compare(
    config: CompareConfig,
    out: Path,
    *,
    cluster: str | None = None,
    cluster_options: Mapping[str, Any] | None = None,
    tell: Tell = lambda _: None,
) -> Comparison:
    """Train every cell that has no result yet, and compare.

    ``out`` holds ``compare.json``, written anew after each cell, and ``cells/NAME`` with each run. Called
    again after an interruption, finished cells are read and a broken-off one goes on from its last
    checkpoint; connections, depths and seeds may be added. A cell that fails does not end the others.

    Args:
        config: what to compare.
        out: folder of the comparison.
        cluster: where cells run; see :func:`mainstem.training._compare_launch.launcher`.
        cluster_options: its parameters.
        tell: is handed lines about progress.

    Raises:
        ConfigError: a cell cannot be built, or ``out`` holds a comparison with other settings, or one that
            is running.
        SourceError: the text or the tokenizer cannot be used.
    """
    filelock = require("filelock", feature="Comparing", extra="train")
    require("scipy", feature="Comparing seeds", extra="train")
    cells = config.cells()
    check_cells(cells, out)
    open_cells = [cell for cell in cells if not (_folder(out, cell) / RESULT).exists()]
    if len(cells) > len(open_cells):
        tell(f"{len(cells) - len(open_cells)} of {len(cells)} cells are there already")
    with launcher(cluster, out, cluster_options or {}) as submit:
        if open_cells:  # packs the text once for all of them, or says what is wrong with it
            prepare_text(open_cells[0].config, load_text(open_cells[0].config.text))
        _make_folders(cells, out)
        try:
            with filelock.FileLock(out / ".lock", timeout=0):
                _run(open_cells, cells, config, out, submit, tell)
        except filelock.Timeout:
            raise ConfigError(f"Another comparison is running in {out}; choose another folder.") from None
    result = read_comparison(config, out)
    write_json(out / FILE, result.to_dict())
    return result


def read_comparison(config: CompareConfig, out: Path, waiting: Collection[str] = ()) -> Comparison:
    """Compare the cells that are there; those without a result count as failed, or wait if they are named."""
    cells = [_read_cell(cell, _folder(out, cell), cell.name in waiting) for cell in config.cells()]
    spreads: list[Spread] = []
    costs: list[Cost | None] = []
    pairs: list[Paired] = []
    noise: list[Noise] = []
    for depth in config.depths:
        of_depth: dict[str, Spread] = {}
        for connection in config.connections:
            group = [c for c in cells if (c.connection, c.depth) == (connection, depth)]
            of_depth[connection] = spread(
                connection,
                depth,
                {c.seed: c.figures["loss"] for c in group if c.status == "finished"},
                diverged=sum(c.status == "diverged" for c in group),
                failed=sum(c.status == "failed" for c in group),
            )
            costs.append(_cost(group))
        spreads += of_depth.values()
        pairs += [
            paired(one, of_depth[config.against]) for name, one in of_depth.items() if name != config.against
        ]
        pooled = seed_noise(list(of_depth.values()))
        noise += [pooled] if pooled else []
    return Comparison(
        settings=config.to_dict(), cells=cells, spreads=spreads, costs=costs, pairs=pairs, noise=noise
    )


def seconds_left(
    waiting: Sequence[Cell], taken: Mapping[tuple[str, int], Sequence[float]], running: Mapping[str, float]
) -> float | None:
    """Estimate the seconds until all of ``waiting`` are done, one after another.

    A cell takes what finished ones of its connection and depth took; where there is none, what those of its
    depth took; else what all took, in proportion to depth.

    Args:
        waiting: cells without a result, those that run included.
        taken: seconds of finished cells by connection and depth.
        running: share that is done of those that run, by name.

    Returns:
        None where nothing is finished yet.
    """
    if not taken:
        return None
    of_depth: dict[int, list[float]] = {}
    for (_, depth), seconds in taken.items():
        of_depth.setdefault(depth, []).append(statistics.fmean(seconds))
    a_block = statistics.fmean(statistics.fmean(seconds) / depth for depth, seconds in of_depth.items())
    left = 0.0
    for cell in waiting:
        known = taken.get((cell.connection, cell.depth)) or of_depth.get(cell.depth)
        whole = statistics.fmean(known) if known else a_block * cell.depth
        left += whole * (1 - running.get(cell.name, 0.0))
    return left


def _run(
    open_cells: Sequence[Cell],
    cells: Sequence[Cell],
    config: CompareConfig,
    out: Path,
    submit: Submit,
    tell: Tell,
) -> None:
    jobs: dict[str, Job] = {cell.name: submit(_folder(out, cell)) for cell in open_cells}
    waiting = list(open_cells)
    said = time.monotonic()
    while waiting:
        ended = [cell for cell in waiting if jobs[cell.name].done()]
        waiting = [cell for cell in waiting if cell not in ended]
        left = _left(waiting, cells, out)
        for cell in ended:
            result = _read_cell(cell, _folder(out, cell))
            tell(f"{len(cells) - len(waiting)}/{len(cells)} {cell.name}: {_outcome(result)}{left}")
        if ended:
            now = read_comparison(config, out, [cell.name for cell in waiting])
            write_json(out / FILE, now.to_dict())
            said = time.monotonic()
        elif time.monotonic() - said > SAY_EVERY:
            under_way = "; ".join(f"{name} {share:.0%}" for name, share in _shares(waiting, out).items())
            tell(f"{len(cells) - len(waiting)}/{len(cells)} {under_way or 'waiting'}{left}")
            said = time.monotonic()
        time.sleep(0.2)


def _left(waiting: Sequence[Cell], cells: Sequence[Cell], out: Path) -> str:
    taken: dict[tuple[str, int], list[float]] = {}
    for cell in cells:
        figures = _figures(_folder(out, cell))
        if figures:
            taken.setdefault((cell.connection, cell.depth), []).append(figures["seconds"])
    shares = _shares(waiting, out)
    seconds = seconds_left(waiting, taken, shares)
    if not seconds:
        return ""
    seconds /= max(1, len(shares))
    return f"; {seconds / 60:.0f} min left" if seconds >= 90 else f"; {seconds:.0f} s left"


def _shares(waiting: Sequence[Cell], out: Path) -> dict[str, float]:
    """How far each cell is that has taken a step."""
    found: dict[str, float] = {}
    for cell in waiting:
        steps = read_steps(_folder(out, cell) / STEPS)
        if not steps:
            continue
        if cell.minutes is not None:
            found[cell.name] = min(1.0, sum(step.seconds for step in steps) / (60 * cell.minutes))
        elif most := cell.config.trainer.get("max_steps"):
            found[cell.name] = min(1.0, len(steps) / most)
    return found


def _outcome(result: CellResult) -> str:
    if result.status == "failed":
        return f"failed: {result.says}"
    figures = result.figures
    loss = "loss not finite" if figures["loss"] is None else f"loss {figures['loss']:.4f}"
    return f"{loss}{', diverged' if result.status == 'diverged' else ''}, {figures['seconds']:.0f} s"


def _folder(out: Path, cell: Cell) -> Path:
    return out / "cells" / cell.name


def _make_folders(cells: Sequence[Cell], out: Path) -> None:
    for cell in cells:
        folder = _folder(out, cell)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MainstemError(f"The folder {folder} cannot be made ({error.strerror or error}).") from error
        if not (folder / CELL).exists():
            write_json(folder / CELL, cell.to_dict())


def _figures(folder: Path) -> dict[str, Any]:
    file = folder / RESULT
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def _read_cell(cell: Cell, folder: Path, waits: bool = False) -> CellResult:
    figures = _figures(folder)
    status: Status = "finished"
    says: str | None = None
    if not figures and waits:
        status = "waiting"
    elif not figures:
        status, says = "failed", _last_line(folder / OUTPUT)
    elif figures["stopped"] is not None:
        status, says = "diverged", figures["stopped"]
    elif figures["start_loss"] is not None and figures["loss"] > figures["start_loss"]:
        status = "diverged"
        says = f"the held-out loss went from {figures['start_loss']:.4f} up to {figures['loss']:.4f}"
    return CellResult(
        name=cell.name,
        connection=cell.connection,
        depth=cell.depth,
        seed=cell.seed,
        status=status,
        says=says,
        figures=figures,
        config=cell.config.to_dict(),
    )


def _last_line(file: Path) -> str:
    lines = file.read_text("utf-8", errors="replace").split("\n") if file.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it was not begun")


def _cost(group: Sequence[CellResult]) -> Cost | None:
    figures = [
        cell.figures for cell in group if cell.figures and cell.figures["seconds_per_step"] is not None
    ]
    if not figures:
        return None
    of_cores = [one["cpu_seconds_per_step"] for one in figures if one["cpu_seconds_per_step"] is not None]
    return Cost(
        seconds_per_step=statistics.median(one["seconds_per_step"] for one in figures),
        cpu_seconds_per_step=statistics.median(of_cores) if of_cores else None,
        peak_memory=round(statistics.median(one["peak_memory"] for one in figures)),
        num_parameters=figures[0]["num_parameters"],
    )


def _listed(data: dict[str, Any], name: str, inner: str) -> dict[str, Any]:
    """JSON has no integer keys: ``{0: 1.5}`` becomes ``[{"seed": 0, inner: 1.5}]``."""
    return {**data, name: [{"seed": seed, inner: value} for seed, value in data[name].items()]}


def _cell_dict(cell: CellResult) -> dict[str, Any]:
    plain = {field.name: getattr(cell, field.name) for field in dataclasses.fields(cell)}
    return {
        **plain,
        "figures": {k: v for k, v in cell.figures.items() if k not in ("data", "versions", "device")},
    }
