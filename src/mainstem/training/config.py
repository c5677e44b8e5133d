"""What a training run is made of, and what follows from its depth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from mainstem.connections import DepthScaled, make_scheme
from mainstem.errors import ConfigError
from mainstem.tower import TowerConfig

BLOCKS_A_WIDTH = 48
"""Blocks for which the stream gets another 64 channels."""
BASE_LEARNING_RATE = 2e-3
"""AdamW's, at 24 blocks and width 64; it falls with the square root of depth and of width."""
TOKENS_A_PARAMETER = 4.0
"""Of training text for each parameter inside the blocks; a fifth of the compute-optimal 20 (2203.15556)."""

Optimizer = Literal["adamw", "muon"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run. Depth is the one dial: what is None follows from it when :meth:`resolve` is called.

    Attributes:
        depth: blocks.
        width: size of the stream; 64 for every 48 blocks begun.
        num_heads: attention heads; one for every 32 channels.
        connection: a name from :func:`mainstem.connections.scheme_names`.
        connection_options: that scheme's options.
        tower: further fields of :class:`mainstem.tower.TowerConfig`.
        text: what :func:`mainstem.sources.load_text` takes; ``"sotu"`` comes with mainstem.
        streaming: read a dataset row by row instead of packing all of it first.
        tokenizer: ``"byte"``, ``"bpe:SIZE"`` (trained on the text), or a hub id or folder.
        window: tokens in a training example.
        held_out: share of the text that is kept for evaluation, spread over it in runs of windows.
        optimizer: ``"adamw"``, or ``"muon"`` for the matrices inside the blocks and AdamW for the rest.
        compile: compile each block; None: on CUDA only.
        monitor: steps from one record of :class:`StreamMonitor` to the next, in ``stream.jsonl``; 0 for none.
        sample: what the finished model is asked to go on from; None for no sample.
        trainer: arguments of :class:`transformers.TrainingArguments`. ``max_steps``, ``learning_rate`` and
            ``per_device_train_batch_size`` follow from depth and width when absent.
    """

    depth: int = 24
    width: int | None = None
    num_heads: int | None = None
    connection: str = "pre_norm"
    connection_options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    tower: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    text: str = "sotu"
    streaming: bool = False
    tokenizer: str = "bpe:2048"
    window: int = 128
    held_out: float = 0.05
    optimizer: Optimizer = "adamw"
    compile: bool | None = None
    monitor: int = 50
    sample: str | None = "The "
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name in ("depth", "window", "width", "num_heads"):
            value = getattr(self, name)
            least = 2 if name == "window" else 1
            if value is not None and value < least:
                raise ConfigError(f"{name}={value!r} must be at least {least}.")
        if not 0 < self.held_out < 0.5:
            raise ConfigError(
                f"held_out={self.held_out!r} must lie between 0 and 0.5: the share to evaluate on."
            )
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer {self.optimizer!r} is not known; choose 'adamw' or 'muon'.")

    def resolve(self) -> TrainConfig:
        """Return the config with everything filled in that follows from depth and width.

        Per-device batch: 8 windows at width 64, growing with width. Learning rate: see
        :data:`BASE_LEARNING_RATE`; a ``depth_scaled`` connection scales it with depth itself, and gets that
        of its base depth. Steps: :data:`TOKENS_A_PARAMETER` times the parameters inside the blocks.

        Raises:
            ConfigError: there is no such connection, or it has no such option.
        """
        scheme = make_scheme(self.connection, **self.connection_options)
        depth = self.depth
        if isinstance(scheme, DepthScaled) and scheme.rule != "gpt2":
            depth = max(1, scheme.base_num_sublayers // 2)
        width = self.width or 64 * math.ceil(self.depth / BLOCKS_A_WIDTH)
        trainer = dict(self.trainer)
        trainer.setdefault("per_device_train_batch_size", max(1, width // 8))
        trainer.setdefault("learning_rate", _rounded(BASE_LEARNING_RATE * (24 * 64 / depth / width) ** 0.5))
        if "max_steps" not in trainer and "num_train_epochs" not in trainer:
            step = trainer["per_device_train_batch_size"] * self.window
            step *= trainer.get("gradient_accumulation_steps", 1)
            trainer["max_steps"] = math.ceil(TOKENS_A_PARAMETER * 12 * self.depth * width**2 / step)
        return dataclasses.replace(
            self, width=width, num_heads=self.num_heads or max(1, width // 32), trainer=trainer
        )

    def tower_config(self, vocab_size: int) -> TowerConfig:
        """Return the tower of a resolved config.

        Raises:
            ConfigError: the parts cannot go together, or ``tower`` names what has a field of its own.
        """
        own = {
            "vocab_size": vocab_size,
            "width": self.width,
            "num_blocks": self.depth,
            "num_heads": self.num_heads,
            "connection": self.connection,
            "connection_options": self.connection_options,
        }
        if doubled := sorted(own.keys() & self.tower.keys()):
            raise ConfigError(f"tower option {doubled[0]!r} has an option of its own; use that one.")
        return TowerConfig.from_dict({"max_positions": max(2048, self.window), **self.tower, **own})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that survives JSON."""
        return {
            field.name: dict(value) if isinstance(value := getattr(self, field.name), Mapping) else value
            for field in dataclasses.fields(self)
        }


def _rounded(value: float) -> float:
    """Two significant digits: a figure that follows from a rule of thumb should look like one."""
    return float(f"{value:.1e}")
