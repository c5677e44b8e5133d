"""What a cell of a comparison adds to its run: an equal start, a clock, an end by time."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mainstem.connections import Connection
from mainstem.errors import MissingExtraError
from mainstem.tower import Tower
from mainstem.training._compare_files import StepTime, read_steps, step_line
from mainstem.training._files import replace_text

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError("Training", "transformers", "train") from error

WARM_UP = 0.05
LEAST_RATE = 0.1
PARTS = 5
"""Equal parts of the time, at whose ends a run that time ends is evaluated and saved."""


def draw_branches(tower: Tower, seed: int) -> None:
    """Draw everything but the connections and the trunk anew, from a generator that they do not touch.

    Two towers that differ in their connection only have the same embedding, attention and feed-forward
    matrices after it, up to the factors by which their schemes scale them.
    """
    owned = {id(m) for c in tower.modules() if isinstance(c, Connection) for m in c.modules()}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, module in tower.named_modules():
            if id(module) not in owned and name.partition(".")[0] != "trunk":
                tower.reset_module(name)


class EqualStart(TrainerCallback):
    """Gives a run that starts from the beginning the branches that its seed stands for."""

    def __init__(self, seed: int):
        self.seed = seed

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw them, before the first evaluation."""
        if state.global_step == 0:
            for module in kwargs["model"].modules():
                if isinstance(module, Tower):
                    draw_branches(module, self.seed)


class Clock(TrainerCallback):
    """Times each step, and appends a line to a file that outlives the process.

    A step is forward, backward and update; not evaluation, checkpoints, or the start of the process.

    Attributes:
        steps: what each took, those of the process before a resume included.
        num_parameters: of the model.
        memory_before: bytes in use when training began, on the device.
    """

    def __init__(self, path: Path):
        self.path = path
        self.steps: list[StepTime] = []
        self.num_parameters = 0
        self.memory_before = 0
        self._began = StepTime(0.0, 0.0)

    @property
    def seconds(self) -> float:
        """Of all steps so far."""
        return sum(step.seconds for step in self.steps)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take up the steps that are not done again."""
        self.num_parameters = count_parameters(kwargs["model"])
        self.steps = read_steps(self.path)[: state.global_step]
        replace_text(self.path, "".join(map(step_line, self.steps)))
        self.memory_before = start_memory_watch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start."""
        self._began = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = _now()
        self.steps.append(
            StepTime(now.seconds - self._began.seconds, now.cpu_seconds - self._began.cpu_seconds)
        )
        with self.path.open("a", encoding="utf-8") as file:
            file.write(step_line(self.steps[-1]))


class EndByTime(TrainerCallback):
    """Trains for a number of seconds: the learning rate follows the share of them that is gone.

    Warm-up over :data:`WARM_UP` of the time, then a cosine down to :data:`LEAST_RATE` of the rate: the
    schedule that a run of so many steps has by default, with time in the place of steps.

    Args:
        clock: comes before this one in the Trainer's list.
        seconds: of training steps.
    """

    def __init__(self, clock: Clock, seconds: float):
        self.clock = clock
        self.budget = seconds
        self._part = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the learning rate."""
        factor = rate_at(self.clock.seconds / self.budget)
        for group in kwargs["optimizer"].param_groups:
            group["lr"] = group["initial_lr"] * factor

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate and save at equal parts of the time; stop at its end."""
        gone = self.clock.seconds / self.budget
        part = int(PARTS * gone)
        if part > self._part and gone < 1:
            control.should_evaluate = control.should_save = True
        self._part = part
        control.should_training_stop |= gone >= 1


class StopWithParent(TrainerCallback):
    """Ends the process when the one that started it is gone; the next comparison resumes the cell.

    Args:
        parent: its process id, as it knows it: it may be gone before this process is so far as to ask.
    """

    def __init__(self, parent: int):
        self.parent = parent

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look."""
        if os.getppid() != self.parent:
            raise SystemExit("the comparison that started this cell is gone")


def _now() -> StepTime:
    return StepTime(time.perf_counter(), time.process_time())


def rate_at(share: float) -> float:
    """Return the learning rate's factor when ``share`` of the time is gone.

    The first step, before any time is gone, gets a hundredth of the warm-up rather than none of it.
    """
    if share < WARM_UP:
        return max(share / WARM_UP, 0.01)
    along = min(1.0, (share - WARM_UP) / (1 - WARM_UP))
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * along))


def count_parameters(model: nn.Module) -> int:
    """Return the numbers that are trained; a tied matrix counts once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def start_memory_watch() -> int:
    """Forget the peak so far, where the system can, and return the bytes in use."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with contextlib.suppress(OSError):  # Linux: 5 sets the high-water mark to what is resident now
        Path("/proc/self/clear_refs").write_text("5")
    import psutil

    return psutil.Process().memory_info().rss


def peak_memory() -> int:
    """Return the most bytes that were in use: of the device on CUDA, else of this process.

    On Linux the mark of the address space itself: ``ru_maxrss`` begins with the parent's at a fork.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text("utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
