"""Watch the stream of any model while it trains: a callback for the Hugging Face Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch.distributed
from torch import nn

from mainstem.errors import ConfigError, MissingExtraError
from mainstem.training._monitor_file import MonitorFile
from mainstem.training._monitor_record import Snapshot, make_record, profile, summary
from mainstem.training._monitor_sums import StepSums, StepTally
from mainstem.training._monitor_watch import Layout, Watch, find_watch, is_compiled, named_inputs
from mainstem.training._non_finite import numbered_blocks

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError("StreamMonitor", "transformers", "train") from error


class StreamMonitor(TrainerCallback):
    """Records by depth, every ``every`` steps, how a model's stream and its gradient do in training.

    For any model whose stream :func:`mainstem.observe.find_stream` finds, and for any
    :class:`mainstem.tower.Tower`. A recorded step looks at the forward and backward pass of the training
    itself, so that the parameters are bit for bit what they would be without; all other steps run the
    untouched model. The first step is recorded too.

    ``StreamMonitor().attach(trainer)`` logs a summary (``stream/rms/last`` and a few more) through
    ``trainer.log``, and so into whichever logger is on. Handed to ``Trainer(callbacks=[...])`` it can only
    write its file, for the Trainer does not make itself known to callbacks.

    The file holds one record a recorded step; read it with :func:`read_monitor`. A *state* is the stream
    before the first sublayer (``state_block`` -1) or after one; lists run from the bottom up.

    ========================  ==========================================================================
    ``schema, step``          version of this table, 1; the optimiser's step, counted from 1
    ``source``                how it was seen: ``"calls"`` of every sublayer, ``"connections"`` of a tower
                              whose stream is a history, compiled ``"blocks"``, or ``"none"``
    ``num_blocks, ranks``     blocks; processes
    ``tokens, passes``        real tokens of the step; forward passes: micro-batches times ranks
    ``skipped``               the loss scaler skipped the update
    ``state_block``           block that made the state, -1 for the embedding
    ``stream_rms``            root mean square of its entries, over real tokens
    ``stream_largest``        its entry of largest absolute value, signed
    ``outlier_ratio``         absolute value of that entry over ``stream_rms``
    ``outlier_position``      its place in its row of the batch; ``outlier_channel`` in the width;
                              ``outlier_stream`` of several streams
    ``gradient_norm``         norm, over all tokens of the step, of the gradient of the step's mean loss with
                              respect to the state
    ``write_block``           of each write: its block; ``write_kind``: ``"attn"``, ``"mlp"``, ...
    ``write_ratio``           norm of the write over norm of the state its sublayer found, both over all
                              real tokens
    ``update_ratio``          by block: norm of the change of its trained parameters over their norm before
    ``update_ratio_outside``  the same of all parameters outside the blocks
    ``non_finite``            the first place that was not finite, in words, or null; upwards in the forward
                              pass, else downwards in the backward; ``non_finite_block``: its block
    ``additivity``            largest error of the books: state + writes = next state, relative;
                              ``continuity``: what is carried is what was left. Null but for ``"calls"``
    ``notes``                 what a reader should know
    ========================  ==========================================================================

    A figure that is not finite, or was not seen, is null. Figures of a step are taken over all micro-batches
    of all ranks, as if they were one batch: squares are added up, so that accumulation and data parallelism
    change them by rounding only. The loss scaler's factor is taken out of gradients. A checkpointed block is
    measured in its first run; under re-entrant checkpointing the gradients inside are not seen. Where blocks
    are compiled, only their ends are seen; where the whole model is, only updates.

    Cost: nothing on other steps. On a recorded step one pass over each state and write, no more memory than
    a few temporary states, and a copy of the trained parameters from after the backward pass to after the
    update; docs/LOG.md has the figures.

    Args:
        path: of the file, ``.jsonl`` or ``.parquet``; ``stream.jsonl`` in the Trainer's output folder when
            not given. A resumed run drops the records of steps that it does again; a new one starts it anew.
        every: steps from one record to the next.
        logs: what goes to the logger: ``"summary"``, ``"profile"`` (the summary and every block), or
            ``"none"``.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        every: int = 50,
        logs: Literal["summary", "profile", "none"] = "summary",
    ):
        if every < 1:
            raise ConfigError(f"every={every!r} must be at least 1: the steps from one record to the next.")
        if logs not in ("summary", "profile", "none"):
            raise ConfigError(f"logs={logs!r} is not known; choose 'summary', 'profile' or 'none'.")
        self.every, self.logs = every, logs
        self.log: Callable[[dict[str, float]], Any] | None = None
        self._path = None if path is None else Path(path)
        self._file: MonitorFile | None = None if path is None else MonitorFile(Path(path))
        self._watch: Watch | None = None
        self._looked = self._has_warned = False
        self._step: _Step | None = None

    def attach(self, trainer: Any) -> Self:
        """Add this callback to a Trainer, log through it, and return this."""
        self.log = trainer.log
        trainer.add_callback(self)
        return self

    # ---- the Trainer's events ----

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the file: of a resumed run, keep the records of steps that stay done."""
        if args.n_gpu > 1:
            raise ConfigError(
                f"StreamMonitor cannot follow the {args.n_gpu} copies that nn.DataParallel makes of a model; "
                "start the training with torchrun, or show it one GPU."
            )
        self._file = MonitorFile(self._path or Path(args.output_dir) / "stream.jsonl")
        if state.is_world_process_zero:
            self._file.begin(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch, where the step is to be recorded."""
        self._stop()
        step = state.global_step + 1
        if step != 1 and step % self.every:
            return
        self._step = _Step(step, self, kwargs["model"])
        if args.torch_compile or is_compiled(kwargs["model"]):
            self._cannot_see("the whole model is compiled; compile it block by block to have them")
        else:
            self._step.hook()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take in what the passes showed, and keep the parameters as they are."""
        if self._step is not None:
            scaler = getattr(kwargs.get("optimizer"), "scaler", None)
            self._step.take_in(1.0 if scaler is None else scaler.get_scale())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See how far the parameters went."""
        if self._step is not None:
            self._step.note_update(bool(getattr(kwargs.get("optimizer"), "step_was_skipped", False)))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write and log the record."""
        done, self._step = self._step, None
        if done is None or done.record is None:
            return
        if state.is_world_process_zero and self._file is not None:
            self._file.append(done.record)
        if self.log is not None and self.logs != "none":
            loss_is_due = control.should_log  # logging takes this request back
            self.log(summary(done.record) | (profile(done.record) if self.logs == "profile" else {}))
            control.should_log = loss_is_due

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have on disk what a run resumed from this checkpoint will keep."""
        if state.is_world_process_zero and self._file is not None:
            self._file.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was."""
        self._stop()
        self.on_save(args, state, control)

    # ---- watching ----

    def watch(self, model: nn.Module, inputs: Mapping[str, Any]) -> Watch | None:
        """Return how this model's stream is watched, found at the first pass."""
        if not self._looked:
            self._looked = True
            self._watch = find_watch(model, inputs)
            if self._watch is None:
                self._cannot_see(f"{type(model).__name__} has no stream that its data flow shows")
        return self._watch

    def layout(self, model: nn.Module) -> Layout:
        """Return where the stream is, or where the blocks are that it would be in."""
        return Layout("none", tuple(numbered_blocks(model))) if self._watch is None else self._watch.layout

    def _cannot_see(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"StreamMonitor records updates only: {why}.", stacklevel=3)

    def _stop(self) -> None:
        if self._step is not None:
            self._step.unhook()
            self._step = None


class _Step:
    """One recorded step."""

    _is_looking: ClassVar[bool] = False
    """Whether a monitor is finding the stream, which calls the model: no pass, to any monitor."""

    def __init__(self, number: int, monitor: StreamMonitor, model: nn.Module):
        self.number, self.monitor, self.model = number, monitor, model
        self.tally = StepTally()
        self.record: dict[str, Any] | None = None
        self._handles: list[Any] = []
        self._end_pass: Callable[[], None] | None = None
        self._sums = StepSums()
        self._snapshot: Snapshot | None = None

    def hook(self) -> None:
        """See when the model is called."""
        self._handles = [
            self.model.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.model.register_forward_hook(self._leave, always_call=True),
        ]

    def unhook(self) -> None:
        """Leave no hook."""
        self._leave()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_looking or not module.training:
            return
        inputs = named_inputs(module, args, kwargs)
        _Step._is_looking = True
        try:
            watch = self.monitor.watch(module, inputs)
        finally:
            _Step._is_looking = False
        if watch is not None:
            self._end_pass = watch.begin(module, inputs, self.tally)

    def _leave(self, *_: Any) -> None:
        if self._end_pass is not None and not self._is_looking:
            end, self._end_pass = self._end_pass, None
            end()

    def take_in(self, scale: float) -> None:
        """Close the passes: bring the figures to the host, add up those of all ranks, copy the parameters."""
        self.unhook()
        ranks = _ranks()
        # Every rank's gradient is averaged, so that the loss of the step is a rank's share of it.
        self._sums = self.tally.finish(scale * ranks)
        if ranks > 1:
            every: list[Any] = [None] * ranks
            torch.distributed.all_gather_object(every, self._sums)
            self._sums = StepSums()
            for one in every:
                self._sums.merge(one)
        self._snapshot = Snapshot(self.model, self.monitor.layout(self.model).blocks)

    def note_update(self, skipped: bool) -> None:
        """Compare the parameters with those before, and make the record."""
        if self._snapshot is None:
            return
        updates = self._snapshot.ratios()
        self._snapshot = None
        layout = self.monitor.layout(self.model)
        self.record = make_record(self.number, layout, self._sums, updates, ranks=_ranks(), skipped=skipped)


def _ranks() -> int:
    here = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if here else 1
