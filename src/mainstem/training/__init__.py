"""Training on the Hugging Face Trainer: towers, recipes, and what a run writes down.

Needs the extra ``[train]`` when used, not when imported.

    >>> from mainstem.training import TrainConfig, train
    result = train(TrainConfig(depth=24, connection="mhc"), Path("out/mhc24"))
"""

from mainstem.training._non_finite import NonFiniteSite, first_non_finite
from mainstem.training.checkpoints import TrainingStoppedError
from mainstem.training.config import TrainConfig
from mainstem.training.optimizers import MuonWithAdamW, make_optimizer
from mainstem.training.recipes import RECIPES, recipe
from mainstem.training.run import TrainResult, train

__all__ = [
    "RECIPES",
    "MuonWithAdamW",
    "NonFiniteSite",
    "TrainConfig",
    "TrainResult",
    "TrainingStoppedError",
    "first_non_finite",
    "make_optimizer",
    "recipe",
    "train",
]
