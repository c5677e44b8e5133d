"""Whole runs with a name. Each docstring says what it needs and what it came to when it was measured."""

from __future__ import annotations

from collections.abc import Callable

from mainstem.errors import ConfigError
from mainstem.training.config import TrainConfig


def quick() -> TrainConfig:
    """12 blocks, width 64, 300 steps of 1,024 tokens, to see that everything works.

    45 s of one core's CPU time (39 and 43 s, torch 2.13 on one thread), start and evaluation included.
    Held-out loss 5.58 and 5.82 nats a token, 2.17 and 2.26 bits a byte, for seeds 0 and 1: as far apart as
    that, for a run of this length has just left the plateau of word frequencies.
    """
    return TrainConfig(depth=12, trainer={"max_steps": 300, "learning_rate": 3e-3})


def tower96() -> TrainConfig:
    """96 blocks, width 64, 4,500 steps of 1,024 tokens of the State of the Union addresses, with Muon.

    The towers that come with mainstem are two of these: as it is, and with ``--connection no_residual``.

    69 minutes of one core's CPU time; both took 99 minutes of a busy 2-core machine side by side. Held-out
    loss 3.73 nats a token, 6.44 without residuals (word frequencies give 6.44); one seed, so its spread is
    not known. The text is read 6.3 times, which is too often: the held-out loss was lowest, 3.63, at step
    3,500.
    """
    return TrainConfig(
        depth=96,
        width=64,
        optimizer="muon",
        trainer={"max_steps": 4500, "learning_rate": 6e-3, "save_steps": 250, "eval_steps": 250},
    )


RECIPES: dict[str, Callable[[], TrainConfig]] = {"quick": quick, "tower96": tower96}


def recipe(name: str) -> TrainConfig:
    """Return the config of a recipe.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in RECIPES:
        raise ConfigError(f"There is no recipe {name!r}; there is {', '.join(RECIPES)}.")
    return RECIPES[name]()
