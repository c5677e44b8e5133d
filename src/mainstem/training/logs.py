"""What a run says: a JSONL file that a resumed run goes on with, and lines for people."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mainstem.errors import MissingExtraError
from mainstem.training._files import replace_text, whole_lines
from mainstem.training.checkpoints import TrainingStoppedError

try:
    from transformers import ProgressCallback, TrainerCallback
except ImportError as error:
    raise MissingExtraError("Training", "transformers", "train") from error

LOG = "log.jsonl"


class LogFile(TrainerCallback):
    """Writes what the Trainer logs to a JSONL file, a line a record with its ``step``.

    A resumed run first drops the lines of steps that are done again, and the line that a kill left torn.
    """

    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the records up to the step from which the run goes on.

        Raises:
            TrainingStoppedError: the file cannot be written.
        """
        if not state.is_world_process_zero:
            return
        lines = whole_lines(self.path) if state.global_step else []
        kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
        try:
            replace_text(self.path, "".join(kept))
        except OSError as error:
            raise self._stopped(error) from error

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Append one record.

        Raises:
            TrainingStoppedError: the file cannot be written.
        """
        if not state.is_world_process_zero or not logs:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        except OSError as error:
            raise self._stopped(error) from error

    def _stopped(self, error: OSError) -> TrainingStoppedError:
        return TrainingStoppedError(
            f"{self.path} cannot be written ({error.strerror or error}); go on with --resume when it can."
        )


class Lines(TrainerCallback):
    """Says how a run goes, a line a record, with the time left: for where no bar can be drawn."""

    def __init__(self, tell: Callable[[str], None]):
        self.tell = tell
        self._first_step = 0
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._first_step, self._began = state.global_step, time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Say it."""
        if not state.is_world_process_zero or not logs:
            return
        if (what := _in_words(logs)) is None:
            return
        done, left = state.global_step - self._first_step, state.max_steps - state.global_step
        seconds = (time.monotonic() - self._began) * left / done if done else None
        self.tell(f"step {state.global_step}/{state.max_steps}: {what}{_time_left(seconds)}")


class Bar(ProgressCallback):
    """The Trainer's bar, with its time left, and each record in words above it; for a terminal."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Say it."""
        bar: Any = self.training_bar
        if bar is not None and state.is_world_process_zero and (what := _in_words(logs or {})) is not None:
            bar.write(f"step {state.global_step}: {what}", file=sys.stderr)


def _in_words(logs: Mapping[str, Any]) -> str | None:
    if "loss" in logs:
        parts = [f"loss {logs['loss']:.4f}"]
        if "grad_norm" in logs:
            parts.append(f"gradient norm {logs['grad_norm']:.3g}")
        if "learning_rate" in logs:
            parts.append(f"learning rate {logs['learning_rate']:.3g}")
        return ", ".join(parts)
    if "eval_loss" in logs:
        bits = logs.get("eval_bits_per_byte")
        return f"held-out loss {logs['eval_loss']:.4f}" + (
            "" if bits is None else f", {bits:.4f} bits a byte"
        )
    return None


def _time_left(seconds: float | None) -> str:
    if not seconds:
        return ""
    minutes = seconds / 60
    if minutes < 1:
        return f", {seconds:.0f} s left"
    return f", {minutes:.0f} min left" if minutes < 90 else f", {minutes / 60:.1f} h left"
