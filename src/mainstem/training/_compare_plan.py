"""What is compared: the cells, each a whole training run with a folder of its own."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mainstem.errors import ConfigError
from mainstem.tower import Tower
from mainstem.training._compare_files import CELL
from mainstem.training.arguments import options
from mainstem.training.config import TrainConfig
from mainstem.training.run import training_arguments

NO_END = 10**9
"""Steps of a run that time alone ends."""
OWN_ARGUMENTS = {"seed": "--seeds", "data_seed": "--seeds"}
"""Arguments of the Trainer that a comparison sets itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Connections x depths x seeds, all else alike.

    Attributes:
        connections: names of schemes, with options behind colons: ``"mhc:num_streams=2"``.
        depths: blocks.
        seeds: a run each. The same seed gives every scheme the same order of the text, and the same initial
            embedding, attention and feed-forward matrices up to the scale that the scheme asks for.
        baseline: what the others are compared with; ``pre_norm`` where it is there, else the first.
        minutes: train each cell for so long instead of for a number of steps. Evaluation, checkpoints and
            start-up do not count.
        base: what is alike. Its depth and connection are not used; widths, learning rates, batches and steps
            that it leaves open follow from each depth.
    """

    connections: tuple[str, ...]
    depths: tuple[int, ...] = (24,)
    seeds: tuple[int, ...] = (0, 1, 2)
    baseline: str | None = None
    minutes: float | None = None
    base: TrainConfig = dataclasses.field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        for name in ("connections", "depths", "seeds"):
            values = getattr(self, name)
            if not values:
                raise ConfigError(f"{name} is empty; give at least one.")
            if doubled := [value for value in values if values.count(value) > 1]:
                raise ConfigError(f"{name} has {doubled[0]!r} twice; give each once.")
        if self.baseline is not None and self.baseline not in self.connections:
            raise ConfigError(
                f"baseline {self.baseline!r} is none of those compared: {', '.join(self.connections)}."
            )
        for name, option in OWN_ARGUMENTS.items():
            if name in self.base.trainer:
                raise ConfigError(f"{name!r} is set by the comparison; use {option} instead.")
        if self.minutes is None:
            return
        if not self.minutes > 0:
            raise ConfigError(f"minutes={self.minutes!r} must be above 0.")
        for name in ("max_steps", "num_train_epochs", "lr_scheduler_type", "warmup_steps", "warmup_ratio"):
            if name in self.base.trainer:
                raise ConfigError(
                    f"{name!r} counts steps, and --minutes ends a cell by time; leave one of them out."
                )

    @property
    def against(self) -> str:
        """The connection that the others are compared with."""
        if self.baseline is not None:
            return self.baseline
        return "pre_norm" if "pre_norm" in self.connections else self.connections[0]

    def cells(self) -> list[Cell]:
        """Return every run, seed by seed within a depth, so that pairs are there as early as can be."""
        return [
            Cell(connection=connection, depth=depth, seed=seed, minutes=self.minutes, config=config)
            for depth in self.depths
            for seed in self.seeds
            for connection in self.connections
            for config in (self._train_config(connection, depth, seed),)
        ]

    def _train_config(self, connection: str, depth: int, seed: int) -> TrainConfig:
        name, *pairs = connection.split(":")
        given = dict(self.base.trainer)
        if self.minutes is not None:
            given |= {"max_steps": NO_END, "lr_scheduler_type": "constant", "warmup_steps": 0}
        config = dataclasses.replace(
            self.base,
            depth=depth,
            connection=name,
            connection_options={**self.base.connection_options, **options(pairs, f"of {connection!r}:")},
            sample=None,
            monitor=0,  # its records would count as steps' cost
            trainer=given,
        ).resolve()
        fifth = max(1, config.trainer.get("max_steps", 2500) // 5)
        defaults = {"eval_on_start": True, "eval_steps": fifth, "save_steps": fifth, "save_total_limit": 1}
        trainer = {**defaults, "disable_tqdm": True, **config.trainer, "seed": seed}
        return dataclasses.replace(config, trainer=trainer)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that survives JSON."""
        return {
            "connections": list(self.connections),
            "depths": list(self.depths),
            "seeds": list(self.seeds),
            "baseline": self.against,
            "minutes": self.minutes,
            "base": self.base.to_dict(),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a comparison."""

    connection: str
    depth: int
    seed: int
    minutes: float | None
    config: TrainConfig

    @property
    def name(self) -> str:
        """Of its folder: ``mhc-d24-s0``."""
        return f"{re.sub(r'[^A-Za-z0-9_.=-]+', '-', self.connection)}-d{self.depth}-s{self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Return what its process reads."""
        return {
            "connection": self.connection,
            "depth": self.depth,
            "seed": self.seed,
            "minutes": self.minutes,
            "config": self.config.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cell:
        """Return the cell that `to_dict` gave."""
        config = TrainConfig(**data["config"])
        return cls(**{name: value for name, value in data.items() if name != "config"}, config=config)


def parse_numbers(given: str, what: str) -> tuple[int, ...]:
    """Read ``"12,24"``.

    Raises:
        ConfigError: it is not a list of whole numbers.
    """
    try:
        return tuple(int(number) for number in given.split(","))
    except ValueError:
        raise ConfigError(f"{what} {given!r} must be whole numbers with commas, such as 12,24.") from None


def check_cells(cells: list[Cell], out: Path) -> None:
    """Refuse what cannot be trained, before anything is.

    Raises:
        ConfigError: a tower that cannot be built, an argument that the Trainer refuses, or a folder that
            holds a comparison with other settings.
    """
    built: set[tuple[str, int]] = set()
    for cell in cells:
        if (cell.connection, cell.depth) not in built:
            built.add((cell.connection, cell.depth))
            training_arguments(cell.config, out)
            with torch.device("meta"):
                Tower(cell.config.tower_config(vocab_size=257))
        file = out / "cells" / cell.name / CELL
        if file.exists():
            _check_same(cell, file, out)


def _check_same(cell: Cell, file: Path, out: Path) -> None:
    try:
        before = _flat(Cell.from_dict(json.loads(file.read_text("utf-8"))))
    except TypeError as error:
        raise ConfigError(
            f"{file} was written by another version of mainstem ({error}); choose another folder with --out."
        ) from error
    now = _flat(Cell.from_dict(json.loads(json.dumps(cell.to_dict()))))
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise ConfigError(
                f"{out} holds a comparison with {name}={before.get(name)!r}, now it is {now.get(name)!r}. "
                "Give the same settings, or choose another folder with --out. Connections, depths and seeds "
                "may be added."
            )


def _flat(cell: Cell) -> dict[str, Any]:
    """Settings by their own name: those of the cell, its run and the Trainer side by side."""
    data = cell.to_dict()
    config = data.pop("config")
    return {**data, **config, **config["trainer"], "trainer": None}
