"""The Hugging Face Trainer with our optimiser, checkpoints written whole, and a stop before the first NaN."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mainstem.errors import MissingExtraError
from mainstem.sources import obey_umask, quiet_transformers
from mainstem.tower import Tower, shard_tower
from mainstem.training._non_finite import first_non_finite
from mainstem.training.checkpoints import (
    STAGE,
    NonFiniteError,
    TrainingStoppedError,
    last_whole,
    remove_old,
    staged,
    step_of,
)
from mainstem.training.config import Optimizer
from mainstem.training.logs import LOG, LogFile
from mainstem.training.optimizers import make_optimizer

try:
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, gather_object
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise MissingExtraError("Training", "transformers", "train") from error

__all__ = ["LOG", "StreamTrainer"]


class StreamTrainer(Trainer):
    """A Trainer for a model with a residual stream.

    Differs from :class:`transformers.Trainer` in the optimiser (:func:`make_optimizer`), in checkpoints that
    appear whole or not at all and carry a manifest with hashes, in stopping, with the parameters still sound
    and saved, when a loss or a gradient is not finite, and in ``fsdp``, which shards a tower by
    :func:`mainstem.tower.shard_tower`. It raises where the Trainer would go on.

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
        self._micro_batches: list[tuple[Mapping[str, Tensor], Tensor]] = []
        super().__init__(*args, **kwargs)
        if self.is_world_process_zero():  # what a killed run had not finished writing
            shutil.rmtree(self.folder / STAGE, ignore_errors=True)
        self.add_callback(LogFile(self.folder / LOG))
        self.add_callback(_Guard(self))

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(str(self.args.output_dir))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; with ``fsdp`` on CPUs too, for which Accelerate would use DDP unasked."""
        super().create_accelerator_and_postprocess()
        if not self.args.fsdp or self.accelerator.distributed_type != DistributedType.MULTI_CPU:
            return
        state: Any = self.accelerator.state
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**cast(Any, self.args.fsdp_plugin_args))
        self.is_fsdp_enabled = True

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the optimiser from the connections' parameter groups; shard the model first, if asked to."""
        if cast(Any, self.optimizer) is None:
            model = cast(nn.Module, self.model) if model is None else model
            if self.is_fsdp_enabled:
                self._shard(model)
            self.optimizer = make_optimizer(
                model,
                self.optimizer_kind,
                learning_rate=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
            )
            self._grouped = [list(group["params"]) for group in self.optimizer.param_groups]
        return self.optimizer

    def _shard(self, model: nn.Module) -> None:
        """Shard a tower our way; Accelerate takes a model that is sharded as it is."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        towers = [module for module in model.modules() if isinstance(module, Tower)]
        plugin: Any = self.accelerator.state.fsdp_plugin
        if not towers or plugin.fsdp_version != 2:
            return
        model.to(self.args.device)
        dtype = torch.bfloat16 if self.args.bf16 else None
        shard_tower(towers[0], param_dtype=dtype, reshard_after_forward=bool(plugin.reshard_after_forward))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        plugin.auto_wrap_policy = None  # there is nothing left to wrap, and sharded classes have other names

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the schedule, once the optimiser holds the parameters that it was made with.

        Accelerate looks sharded parameters up by their address, which empty shards have in common.
        """
        if self.is_fsdp_enabled and self._grouped and isinstance(self._grouped[0][0], DTensor):
            for group, parameters in zip(self.optimizer.param_groups, self._grouped, strict=True):
                group["params"][:] = parameters
        return super().create_scheduler(num_training_steps, optimizer)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the mean loss of a batch, and hand the Trainer that of each window where it asks for it.

        The Trainer counts a batch's mean once a row, rows included that fill up the last batch when several
        processes share the text; the mean over windows is the same for any number of processes.
        """
        inputs = self._prepare_inputs(inputs)
        labels = inputs.pop("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**inputs).logits[:, :-1].float()
        losses = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none").mean(-1)

        def gather(_: Tensor) -> Any:
            return self.accelerator.gather_for_metrics(losses)

        self.gather_function = gather
        return losses.mean(), None, None

    # ---- what is not finite ----

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward, and keep the batch until its update is made."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._micro_batches.append((inputs, loss))
        return loss

    def check_finite(self) -> None:
        """Stop before an update with a loss or a gradient that is not finite, on all processes together.

        Gradients are left to a loss scaler where there is one.

        Raises:
            NonFiniteError: the message names the step and the first place in the model; the checkpoint of
                the step before has been written.
        """
        losses = torch.stack([loss for _, loss in self._micro_batches])
        wrong = [~torch.isfinite(losses).all()]
        if self.accelerator.scaler is None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters() if p.grad is not None])
            wrong.append(~torch.isfinite(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        counts = cast(Tensor, self.accelerator.reduce(torch.stack(wrong).float(), "sum")).tolist()
        if any(counts):
            self._stop("loss" if counts[0] else "gradient")
        self._micro_batches.clear()

    def _parameters(self) -> list[nn.Parameter]:
        return list(cast(nn.Module, self.model).parameters())

    def _stop(self, what: str) -> None:
        model = cast(nn.Module, self.accelerator.unwrap_model(self.model))
        # Every process looks at as many batches: sharded parameters are gathered by all of them together.
        sites = [first_non_finite(model, inputs) for inputs, _ in self._micro_batches]
        told = [site.describe() for site in sites if site is not None]
        told = gather_object(told) or [
            "Run again on its own, the batch gives finite numbers: look at the loss scale and the batch size."
        ]
        model.zero_grad()
        saved = self._save_before()
        raise NonFiniteError(
            f"Training stopped: the {what} of step {self.state.global_step + 1} is not finite; {told[0]} "
            f"{saved} Try a lower learning rate, a longer warm-up or a wider stream dtype, in another folder."
        )

    def _save_before(self) -> str:
        """Write the checkpoint of the last update, if it is not there; say where it is."""
        step = self.state.global_step
        if not step:
            return "No update was made before it."
        kept, _ = last_whole(self.folder)
        if kept is None or step_of(kept) != step:
            try:
                self._save_checkpoint(cast(nn.Module, self.model), None)
            except TrainingStoppedError as error:
                return str(error)
            kept = self.folder / f"checkpoint-{step}"
        return f"{kept} holds the parameters from before it."

    # ---- what is written ----

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log; bits per byte beside a loss of the evaluation, which is nats per token."""
        if self.bytes_per_token is not None and "eval_loss" in logs:
            logs["eval_bits_per_byte"] = logs["eval_loss"] / math.log(2) / self.bytes_per_token
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model so that ``from_pretrained`` reads it, a sharded one gathered.

        Raises:
            TrainingStoppedError: the disk does not take it.
        """
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
            return
        folder = Path(output_dir) if output_dir is not None else self.folder
        try:
            if self.is_fsdp_enabled:
                self._save(str(folder), state_dict=self._gathered())
            else:
                super().save_model(str(folder))
            if self.args.should_save:
                obey_umask(folder)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise TrainingStoppedError(
                f"The model could not be written to {folder}: {error}. Make room and go on with --resume."
            ) from error

    def _gathered(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        model = cast(nn.Module, self.model)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        gathered = get_model_state_dict(model, options=options)
        seen: set[int] = set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in seen:  # tied: gathered, nothing shows it any more
                gathered.pop(name, None)
            seen.add(id(parameter))
        return gathered

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with quiet_transformers():
            super()._save(output_dir, state_dict)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._stage) if self._stage is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(super()._get_output_dir(trial))
        step = self.state.global_step
        limit = self.args.save_total_limit
        self.args.save_total_limit = None  # ours are counted in their place
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


class _Guard(TrainerCallback):
    """Looks at every update before it is made, and logs at every checkpoint.

    The mean loss since the last log is not in a checkpoint; logged there, a resumed run's log is the same.
    """

    def __init__(self, trainer: StreamTrainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.check_finite()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log |= control.should_save
