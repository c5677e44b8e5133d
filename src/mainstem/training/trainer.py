"""The Hugging Face Trainer with our optimiser, checkpoints written whole, and a stop before the first NaN."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mainstem.errors import MissingExtraError
from mainstem.training._non_finite import first_non_finite
from mainstem.training.checkpoints import (
    STAGE,
    NonFiniteError,
    TrainingStoppedError,
    last_whole,
    remove_old,
    staged,
)
from mainstem.training.config import Optimizer
from mainstem.training.optimizers import make_optimizer

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise MissingExtraError("Training", "transformers", "train") from error

LOG = "log.jsonl"


class StreamTrainer(Trainer):
    """A Trainer for a model with a residual stream.

    Differs from :class:`transformers.Trainer` in the optimiser (:func:`make_optimizer`), in checkpoints that
    appear whole or not at all and carry a manifest with hashes, and in stopping, with the parameters still
    sound and saved, when a loss or a gradient is not finite. It raises where the Trainer would go on.

    Args:
        optimizer_kind: see :func:`make_optimizer`.
        bytes_per_token: of the evaluation text; adds ``eval_bits_per_byte`` to the evaluation.
        args, kwargs: those of the Trainer.
    """

    def __init__(
        self,
        *args: Any,
        optimizer_kind: Optimizer = "adamw",
        bytes_per_token: float | None = None,
        **kwargs: Any,
    ):
        self.optimizer_kind: Optimizer = optimizer_kind
        self.bytes_per_token = bytes_per_token
        self._stage: Path | None = None
        self._batch: Mapping[str, Tensor] | None = None
        super().__init__(*args, **kwargs)
        if self.is_world_process_zero():  # what a killed run had not finished writing
            shutil.rmtree(self.folder / STAGE, ignore_errors=True)
        self.add_callback(LogFile(self.folder / LOG))
        self.add_callback(_GradientGuard(self))

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(str(self.args.output_dir))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the optimiser from the connections' parameter groups."""
        if cast(Any, self.optimizer) is None:
            self.optimizer = make_optimizer(
                cast(nn.Module, self.model) if model is None else model,
                self.optimizer_kind,
                learning_rate=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
            )
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward; stop where the loss is not finite.

        Raises:
            NonFiniteError: it is not; the message names the step and the first place in the model.
        """
        self._batch = inputs
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            self.stop_before_update(f"the loss of step {self.state.global_step + 1} is {loss.item()}")
        return loss

    def stop_before_update(self, what: str) -> None:
        """Save what was before the step that went wrong, and raise.

        Raises:
            NonFiniteError: always.
        """
        model = self.accelerator.unwrap_model(self.model)
        assert self._batch is not None
        site = first_non_finite(model, self._batch)
        where = (
            "run again on its own, its batch gives finite numbers only." if site is None else site.describe()
        )
        model.zero_grad()
        if self.state.global_step and not (self.folder / f"checkpoint-{self.state.global_step}").exists():
            self._save_checkpoint(cast(nn.Module, self.model), None)
        kept, _ = last_whole(self.folder)
        resume = f"{kept} holds the parameters from before." if kept else "No step was done before it."
        raise NonFiniteError(
            f"Training stopped: {what}; {where} {resume} "
            "Try a lower learning rate, more warm-up, or a wider stream dtype."
        )

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """Evaluate; bits per byte beside the loss, which is nats per token."""
        metrics = super().evaluate(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        loss = metrics.get(f"{metric_key_prefix}_loss")
        if loss is not None and self.bytes_per_token:
            bits = {f"{metric_key_prefix}_bits_per_byte": loss / math.log(2) / self.bytes_per_token}
            metrics |= bits
            self.log(dict(bits))
        return metrics

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._stage) if self._stage is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(super()._get_output_dir(trial))
        step = self.state.global_step
        limit, self.args.save_total_limit = (
            self.args.save_total_limit,
            None,
        )  # ours are counted in their place
        try:
            with staged(folder, step, writes=self.is_world_process_zero()) as self._stage:
                super()._save_checkpoint(model, trial)
                self._name_best_in(folder, self._stage / f"checkpoint-{step}")
                self.accelerator.wait_for_everyone()
        except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a full disk as RuntimeError
            kept, _ = last_whole(folder)
            resume = (
                f"{kept} is whole; make room and go on from it with --resume."
                if kept
                else "There is none before it."
            )
            raise TrainingStoppedError(
                f"The checkpoint of step {step} could not be written to {folder}: {error}. {resume}"
            ) from error
        finally:
            self._stage, self.args.save_total_limit = None, limit
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            remove_old(folder, limit, Path(best) if best else None)
        self.accelerator.wait_for_everyone()

    def _name_best_in(self, folder: Path, written: Path) -> None:
        """Name the best checkpoint by the place it will have, not by that in which it is written."""
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).parent.name == STAGE:
            self.state.best_model_checkpoint = str(folder / Path(best).name)
            if self.args.should_save:
                self.state.save_to_json(str(written / "trainer_state.json"))


class _GradientGuard(TrainerCallback):
    """Stops before an update with a gradient that is not finite; a loss scaler looks for itself."""

    def __init__(self, trainer: StreamTrainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.accelerator.scaler is not None:
            return
        gradients = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not torch.isfinite(norm):
            self.trainer.stop_before_update(f"the gradient of step {state.global_step + 1} is not finite")


class LogFile(TrainerCallback):
    """Writes what the Trainer logs to a JSONL file, a line a record with its ``step``.

    A resumed run first drops the lines of steps that are done again.
    """

    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the records up to the step from which the run goes on."""
        if not state.is_world_process_zero:
            return
        kept = [line for line in _lines(self.path) if json.loads(line)["step"] <= state.global_step]
        if state.global_step == 0:
            kept = []
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(kept), "utf-8")
        os.replace(temporary, self.path)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Append one record."""
        if state.is_world_process_zero and logs:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def _lines(path: Path) -> list[str]:
    """Whole lines of a file; the last one is dropped where a killed process left it torn."""
    if not path.exists():
        return []
    return [line for line in path.read_text("utf-8").splitlines(keepends=True) if line.endswith("}\n")]
