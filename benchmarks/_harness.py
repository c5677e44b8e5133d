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
