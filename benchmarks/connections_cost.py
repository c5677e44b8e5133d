"""Write ``docs/connections-cost.md``: time and kept memory of every residual connection beside plain Pre-LN.

    python -m benchmarks.connections_cost --out out/connections-cost.jsonl --page docs/connections-cost.md

Forward and backward of 24 blocks with the tower's own branches, eager and in fp32, of ours and of other
packages' connections around the very same branches. Every run stands between two of plain Pre-LN, and its
ratio is that to them; pairs that the machine disturbed are run again.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._harness import emit, pair, saved_bytes, versions
from benchmarks._stacks import ByHand, Ours, peer_stacks, tower_branches
from mainstem.connections import NormConfig, PreNorm, make_scheme, scheme_names

BASE = "pre_norm"
BY_HAND = "Pre-LN by hand"
VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "hyper_connections, static": ("hyper_connections", {"dynamic": False}),
    "attention_residuals, by 6": ("attention_residuals", {"block_size": 6}),
    "frac_connections, static": ("frac_connections", {"dynamic": False}),
}
RECOMPUTED = (
    *("hyper_connections", "hyper_connections, static", "identity_hc", "independent_hc", "mhc"),
    *("gated_streams", "attention_residuals, by 6", "siamese_norm", "laurel"),
)
RECOMPUTE = ", recompute"

HEADER = """# What a residual connection costs

Made by `make connections-cost`; do not edit. {versions}; {threads} threads{clock}.

Time of forward and backward, and bytes kept for the backward pass (each memory once, parameters not),
relative to plain Pre-LN: {blocks} blocks, width {width}, {heads} heads, {sequences} x {tokens} tokens, fp32,
eager; the same branches for all. Median and quartiles of {repetitions} pairs in one interleaved run; a run of
Pre-LN takes {seconds:.2f} s and keeps {saved_mb:.0f} MB. *recompute*: the reads and writes of a block are run
again in the backward pass (`recompute`), its branches are not.

| connection | time | quartiles | kept |
|---|---|---|---|"""


def trains(stack: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return a run of forward and backward that leaves no gradients behind."""

    def run() -> None:
        stack(x).square().mean().backward()
        for parameter in stack.parameters():
            parameter.grad = None
        x.grad = None

    return run


def build_stacks(names: list[str], options: tuple[int, ...]) -> tuple[dict[str, nn.Module], list[str]]:
    """Return the contestants asked for (all, if none is), and which are left out."""
    torch.manual_seed(0)
    branches = tower_branches(PreNorm(), options)
    every = {name: (name, {}) for name in scheme_names()} | dict(VARIANTS)
    wanted = [*every, *(name + RECOMPUTE for name in RECOMPUTED)]
    stacks: dict[str, nn.Module] = {BASE: Ours(PreNorm(), branches)}
    if not names or BY_HAND in names:
        stacks[BY_HAND] = ByHand(branches)
    for label in sorted(wanted):
        name, values = every[label.removesuffix(RECOMPUTE)]
        if label == BASE or (names and label not in names and name not in names):
            continue
        scheme = make_scheme(name, **values)
        inner = scheme.build_inner_norm(width=1, norm=NormConfig()) is not None
        policies = {"recompute": 2} if label.endswith(RECOMPUTE) else {}
        stacks[label] = Ours(scheme, tower_branches(scheme, options) if inner else branches, **policies)
    peers, missing = peer_stacks(branches) if not names or "peers" in names else ({}, [])
    return stacks | peers, missing


def page(result: dict[str, Any]) -> str:
    """Return the page that the result makes."""
    packages = versions("torch", "transformers") | result["peers"]
    made_with = ", ".join(f"{name} {version}" for name, version in packages.items() if version != "absent")
    clock = " (CPU time)" if result["setting"]["threads"] == 1 else ""
    lines = [HEADER.format(versions=made_with, clock=clock, **result["setting"], **result["base"])]
    for name, row in result["results"].items():
        spread = f"{row['ratio_q1']:.2f} to {row['ratio_q3']:.2f}"
        lines.append(f"| {name} | {row['ratio']:.2f} | {spread} | {row['saved']:.2f} |")
    if result["left_out"]:
        lines += ["", "Left out, their packages missing: " + ", ".join(result["left_out"]) + "."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="*", default=[], help="names of connections, and 'peers'")
    parser.add_argument("--repetitions", type=int, default=5, help="pairs for each contestant")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines to this file")
    parser.add_argument("--page", type=Path, default=None, help="write the table to this file")
    arguments = parser.parse_args()
    if arguments.repetitions < 2:
        parser.error(f"--repetitions is {arguments.repetitions}; a spread needs at least 2.")
    torch.set_num_threads(arguments.threads)
    result = measure(arguments)
    emit(result, arguments.out)
    if arguments.page is not None:
        arguments.page.write_text(page(result), encoding="utf-8")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build, count and time the contestants."""
    options = (arguments.blocks, arguments.width, arguments.heads, arguments.tokens)
    stacks, missing = build_stacks(arguments.families, options)
    x = torch.randn(arguments.sequences, arguments.tokens, arguments.width).requires_grad_()
    runs = {name: trains(stack, x) for name, stack in stacks.items()}
    saved = {name: saved_bytes(functools.partial(stack, x), stack) for name, stack in stacks.items()}
    timings = pair(
        {name: run for name, run in runs.items() if name != BASE},
        runs[BASE],
        arguments.repetitions,
        clock=time.process_time if arguments.threads == 1 else time.perf_counter,
    )
    base = statistics.median(
        t / r for timing in timings.values() for t, r in zip(timing.seconds, timing.ratios, strict=True)
    )
    results = {
        name: timing.summary() | {"saved": round(saved[name] / saved[BASE], 4)}
        for name, timing in timings.items()
    }
    return {
        "benchmark": "connections_cost",
        "setting": {
            name: getattr(arguments, name)
            for name in ("blocks", "width", "heads", "sequences", "tokens", "threads", "repetitions")
        },
        "base": {"seconds": round(base, 4), "saved_mb": round(saved[BASE] / 1e6, 1)},
        "peers": versions("hyper-connections", "x-transformers"),
        "left_out": missing,
        "results": results,
    }


if __name__ == "__main__":
    main()
