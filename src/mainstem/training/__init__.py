"""Training on the Hugging Face Trainer: towers, recipes, and what a run writes down.

Needs the extra ``[train]`` when used, not when imported.

    >>> from mainstem.training import TrainConfig, train
    result = train(TrainConfig(depth=24, connection="mhc"), Path("out/mhc24"))
"""

from typing import TYPE_CHECKING, Any

from mainstem.training._monitor_file import read_monitor
from mainstem.training._non_finite import NonFiniteSite, first_non_finite
from mainstem.training.checkpoints import TrainingStoppedError
from mainstem.training.config import TrainConfig
from mainstem.training.optimizers import MuonWithAdamW, make_optimizer
from mainstem.training.recipes import RECIPES, recipe
from mainstem.training.run import TrainResult, train

if TYPE_CHECKING:
    from mainstem.training.monitor import StreamMonitor

__all__ = [
    "RECIPES",
    "MuonWithAdamW",
    "NonFiniteSite",
    "StreamMonitor",
    "TrainConfig",
    "TrainResult",
    "TrainingStoppedError",
    "first_non_finite",
    "make_optimizer",
    "read_monitor",
    "recipe",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "StreamMonitor":  # a callback of transformers, which is imported when it is asked for
        from mainstem.training.monitor import StreamMonitor

        return StreamMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
