"""Interleaved timing in one process, and results as JSON lines that say what they were measured on."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one contender, in seconds, and its ratio to the reference run in the same round.

    Attributes:
        seconds: one a round.
        ratios: the same divided by the reference's time of that round.
    """

    seconds: tuple[float, ...]
    ratios: tuple[float, ...]

    def summary(self) -> dict[str, float]:
        """Return medians, and the quartiles of the ratio as its spread."""
        low, middle, high = statistics.quantiles(self.ratios, n=4)
        return {
            "median_s": round(statistics.median(self.seconds), 4),
            "min_s": round(min(self.seconds), 4),
            "ratio": round(middle, 4),
            "ratio_q1": round(low, 4),
            "ratio_q3": round(high, 4),
        }


def interleave(contenders: Mapping[str, Callable[[], Any]], reference: str, rounds: int) -> dict[str, Timing]:
    """Time all contenders once a round, so that what else the machine does falls on all of them alike.

    Each round begins with another contender, and each is run once untimed before.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        contenders[name]()
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - start)
    base = seconds[reference]
    return {
        name: Timing(tuple(taken), tuple(t / b for t, b in zip(taken, base, strict=True)))
        for name, taken in seconds.items()
    }


def pair(
    contenders: Mapping[str, Callable[[], Any]],
    reference: Callable[[], Any],
    rounds: int,
    *,
    tolerance: float = 0.1,
    repeats: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time every contender between two runs of the reference, once a round.

    On a machine that others use, and with one thread, ``clock=time.process_time`` counts what the process
    used rather than what it waited for.

    The ratio of a round is that to the mean of the two. Where these differ by more than ``tolerance`` the
    machine was disturbed, and the pair is run again, at most ``repeats`` times; the calmest counts.
    """
    for run in (reference, *contenders.values()):
        run()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    before = _seconds(reference, clock)
    for _ in range(rounds):
        for name, run in contenders.items():
            tries: list[tuple[float, float, float]] = []
            while len(tries) <= repeats:
                taken, after = _seconds(run, clock), _seconds(reference, clock)
                tries.append((abs(after - before) / min(after, before), taken, (before + after) / 2))
                before = after
                if tries[-1][0] <= tolerance:
                    break
            _, taken, base = min(tries)
            found[name].append((taken, base))
    return {
        name: Timing(tuple(t for t, _ in pairs), tuple(t / base for t, base in pairs))
        for name, pairs in found.items()
    }


def _seconds(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def saved_bytes(forward: Callable[[], Any], module: torch.nn.Module) -> int:
    """Return the bytes that a forward pass keeps for backward: each memory once, parameters not."""
    known = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
    kept: list[torch.UntypedStorage] = []

    def pack(
        t: torch.Tensor,
    ) -> None:  # a packed tensor that is an output of its node would keep itself alive
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            kept.append(storage)  # so that no later tensor gets the same address

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda _: None):
        forward()
    return sum(storage.nbytes() for storage in kept)


def summarize(timings: Mapping[str, Timing], reference: str) -> dict[str, dict[str, float]]:
    """Return the summaries; ``ratio_of_minima`` is the ratio least disturbed by a busy machine."""
    fastest = min(timings[reference].seconds)
    return {
        name: timing.summary() | {"ratio_of_minima": round(min(timing.seconds) / fastest, 4)}
        for name, timing in timings.items()
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of packages, ``"absent"`` for what is not installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def machine() -> dict[str, Any]:
    """Return what matters of the machine; no name, no path."""
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def emit(result: dict[str, Any], out: Path | None) -> None:
    """Print one result as a JSON line, with versions and machine, and append it to ``out``."""
    line = json.dumps(
        result
        | {"versions": versions("mainstem", "torch", "transformers", "numpy"), "machine": machine()}
        | {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    )
    print(line, flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
