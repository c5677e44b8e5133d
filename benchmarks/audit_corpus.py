"""An audit of a corpus through a packaged tower: memory that stays flat, and speed beside the bare forward.

The text is the one that comes along, again and again, until there are as many tokens as asked for. Peak
resident memory is read after a tenth of the batches and at the end. The bare forward runs on the same
windows, a few times between every so many batches of the audit, so that what else the machine does falls on
both.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks._harness import emit
from mainstem.audit import AuditConfig, audit_windows
from mainstem.audit._passes import Passes
from mainstem.sources import TWINS, TextSource, WindowStream, load_model, load_text


def endless(name: str) -> TextSource:
    """The text, again and again."""
    source = load_text(name)
    return dataclasses.replace(
        source,
        documents=lambda: (piece for _ in itertools.count() for piece in source.documents()),
        num_bytes=None,
    )


def peak_mib() -> float:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


class Clock:
    """Follows the batches of an audit: process time, peak memory, and bare forwards in between."""

    def __init__(self, every: int) -> None:
        self.every, self.batches, self.tokens = every, 0, 0
        self.peaks: dict[int, float] = {}
        self.audit_s = self.bare_s = 0.0
        self.audit_tokens = self.bare_tokens = 0
        self._seconds: list[float] = []

    def watch(self, passes: type[Passes]) -> None:
        """Time every batch of the audits that follow."""
        one_batch = passes._batch

        def timed(job: Passes, window: Any) -> None:
            if self.batches % self.every == 0:
                self._bare(job, window)
            begin = time.process_time()
            one_batch(job, window)
            self.audit_s += time.process_time() - begin
            self.audit_tokens += int(window.attention_mask.sum())
            self.batches += 1
            self.peaks[self.batches] = peak_mib()

        passes._batch = timed

    def _bare(self, job: Passes, window: Any) -> None:
        inputs = job.inputs_of(window)
        job.model(**inputs)
        begin = time.process_time()
        for _ in range(3):
            job.model(**inputs)
        self.bare_s += time.process_time() - begin
        self.bare_tokens += 3 * int(window.attention_mask.sum())


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--model", default=TWINS[0])
    parser.add_argument("--text", default="sotu")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--only", default="", help="questions, as for mainstem audit; all when not given")
    parser.add_argument("--no-lens", action="store_true")
    parser.add_argument("--bare-every", type=int, default=20, help="batches between two timed bare forwards")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    loaded = load_model(args.model)
    config = AuditConfig(
        model=args.model,
        text=args.text,
        tokens=args.tokens,
        window=args.window,
        batch_size=args.batch_size,
        lens=not args.no_lens,
        only=tuple(filter(None, args.only.split(","))),
    )
    windows = WindowStream(
        loaded.tokenizer,
        endless(args.text),
        num_tokens=args.tokens,
        window=args.window,
        batch_size=args.batch_size,
    )
    clock = Clock(args.bare_every)
    clock.watch(Passes)
    begin = time.perf_counter()
    with torch.no_grad():
        result = audit_windows(loaded, windows, config)
    last = max(clock.peaks)
    audit, bare = clock.audit_tokens / clock.audit_s, clock.bare_tokens / clock.bare_s
    emit(
        {
            "benchmark": "audit_corpus",
            "model": args.model,
            "text": args.text,
            "tokens": clock.audit_tokens,
            "window": args.window,
            "batch_size": args.batch_size,
            "lens": config.lens,
            "only": args.only or "all",
            "peak_mib_after_a_tenth": round(clock.peaks[max(1, last // 10)], 1),
            "peak_mib_at_the_end": round(clock.peaks[last], 1),
            "clock": "process",
            "audit_tokens_per_s": round(audit, 1),
            "bare_tokens_per_s": round(bare, 1),
            "ratio": round(bare / audit, 3),
            "wall_s": round(time.perf_counter() - begin, 1),
            "nll": None if result.loss is None else round(result.loss.nll, 4),
        },
        args.out,
    )


if __name__ == "__main__":
    main()
