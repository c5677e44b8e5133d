"""What the stream monitor costs: bare, unrecorded and recorded steps of one training, taking turns.

    python -m benchmarks.stream_monitor --rounds 20 --out out/benchmarks.jsonl

One Trainer trains one model; of every three steps one runs without the monitor's callback, one with it but
unrecorded, one recorded. A step is timed from before its first to after its last callback, forward, backward,
clipping, update, file and log included, as wall time and as the process's CPU time, which other work on the
machine disturbs less. ``overhead`` is what the default cadence costs: (recorded - bare) / (every x bare), of
medians of CPU times.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks._harness import Timing, emit, summarize

TURNS = ("bare", "unrecorded", "recorded")
MODELS = {
    # blocks, width, sequences, tokens
    "llama": (12, 256, 4, 256),
    "tower96": (96, 64, 8, 128),
    "mhc48": (48, 64, 8, 128),
}


def build(name: str) -> torch.nn.Module:
    """Return a model with random weights."""
    blocks, width, _, tokens = MODELS[name]
    torch.manual_seed(0)
    if name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=blocks,
                num_attention_heads=width // 64, num_key_value_heads=width // 64,
                max_position_embeddings=tokens,
            )
        )  # fmt: skip
    from mainstem.tower import Tower, TowerConfig
    from mainstem.tower.hf import MainstemForCausalLM

    connection = "mhc" if name == "mhc48" else "pre_norm"
    config = TowerConfig(
        vocab_size=256,
        width=width,
        num_blocks=blocks,
        num_heads=4,
        connection=connection,
        max_positions=tokens,
    )
    return MainstemForCausalLM.from_tower(Tower(config))


def measure(name: str, rounds: int) -> dict[str, dict[str, Timing]]:
    """Train and return the times of each turn, wall and CPU."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from mainstem.training import StreamMonitor

    class InTurn(TrainerCallback):
        """Hands the monitor the events of its turns only, and holds the clock."""

        def __init__(self, monitor: StreamMonitor):
            self.monitor = monitor
            self.wall: dict[str, list[float]] = {turn: [] for turn in TURNS}
            self.cpu: dict[str, list[float]] = {turn: [] for turn in TURNS}

        def hand_on(self, event: str, *args: Any, **kwargs: Any) -> None:
            if self.turn != "bare":
                getattr(self.monitor, event)(*args, **kwargs)

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.monitor.on_train_begin(*args, **kwargs)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.turn = TURNS[state.global_step % 3]
            self.monitor.every = 1 if self.turn == "recorded" else 1_000_000
            self.start = time.perf_counter(), time.process_time()
            if state.global_step:  # the first is always recorded
                self.hand_on("on_step_begin", args, state, control, **kwargs)

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.hand_on("on_pre_optimizer_step", *args, **kwargs)

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.hand_on("on_optimizer_step", *args, **kwargs)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.hand_on("on_step_end", args, state, control, **kwargs)
            self.wall[self.turn].append(time.perf_counter() - self.start[0])
            self.cpu[self.turn].append(time.process_time() - self.start[1])

    _, _, sequences, tokens = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        ids = torch.randint(0, 256, (3 * (rounds + 1) * sequences, tokens))
        trainer = Trainer(
            model=build(name),
            args=TrainingArguments(
                folder, max_steps=3 * (rounds + 1), per_device_train_batch_size=sequences, use_cpu=True,
                save_strategy="no", logging_steps=10_000, report_to="none", disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        )  # fmt: skip
        trainer.pop_callback(PrinterCallback)
        monitor = StreamMonitor()
        monitor.log = trainer.log
        in_turn = InTurn(monitor)
        trainer.add_callback(in_turn)
        trainer.train()
    return {kind: timings(seconds) for kind, seconds in (("wall", in_turn.wall), ("cpu", in_turn.cpu))}


def timings(seconds: dict[str, list[float]]) -> dict[str, Timing]:
    """Leave out the first round, in which the stream is found, and pair each turn with its bare step."""
    bare = seconds["bare"][1:]
    return {
        turn: Timing(tuple(taken[1:]), tuple(t / b for t, b in zip(taken[1:], bare, strict=True)))
        for turn, taken in seconds.items()
    }


def main() -> None:
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=20, help="rounds of three steps, after one untimed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines to this file")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds is {arguments.rounds}; a spread needs at least 2.")
    torch.set_num_threads(arguments.threads)

    from mainstem.training import StreamMonitor

    for name in arguments.models:
        found = measure(name, arguments.rounds)
        medians = {turn: statistics.median(t.seconds) for turn, t in found["cpu"].items()}
        every = StreamMonitor().every
        emit(
            {
                "benchmark": "stream_monitor",
                "model": name,
                "shape": dict(zip(("blocks", "width", "sequences", "tokens"), MODELS[name], strict=True)),
                "rounds": arguments.rounds,
                "every": every,
                "overhead": round((medians["recorded"] / medians["bare"] - 1) / every, 5),
                "cpu": summarize(found["cpu"], "bare"),
                "wall": summarize(found["wall"], "bare"),
            },
            arguments.out,
        )


if __name__ == "__main__":
    main()
