"""Write ``docs/convert-smollm2.md``: SmolLM2 converted to other connections, and trained on from there.

    python -m benchmarks.convert --out out/convert-smollm2.jsonl --page docs/convert-smollm2.md

Of each connection: how far the converted model's predictions are from the source's before it is saved, and
the loss of every training step beside that of the unconverted model on the same batches. A line of JSON a
model; one that is there already is not measured again, and the page is made from the lines alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._harness import emit
from mainstem.sources import load_model, load_text, make_windows
from mainstem.surgery import convert_tower, measure_distance
from mainstem.tower.pretrained import tower_from_transformers

SOURCE = "unconverted"
CONNECTIONS = ("mhc", "identity_hc", "attention_residuals", "dense_former", "x0_reinjection")
STEPS = 100
START = 20
"""Steps that count as the start, in which a spike would be seen."""

HEADER = """# SmolLM2-135M with another connection

Made by `make convert-smollm2`; do not edit. {versions}; fp32, {threads} thread(s).

**Before saving**: {model} and its conversion on the same {tokens} tokens of `{held_out}` in windows of
{window}. *rounding* is the largest logit difference between the unconverted model in fp32 and in fp64: what
fp32 itself leaves open. *fp64* is the conversion in fp64 beside the source in fp64; what is left there is
that transformers makes its rotary tables in fp32 whatever the dtype (with tables in fp64: 1.4e-13 on 256
tokens).

**Training**: {steps} steps of {batch} x {window} tokens of `{text}` with the Hugging Face Trainer and AdamW,
as `mainstem train` sets them up: learning rate {rate:g}, {warmup} warm-up steps, then cosine; every model
sees the same batches in the same order (hash `{batches}`). *first* is the loss of step 1 less the
unconverted model's; *worst of the first {start}* the largest such difference of a step, where a spike at
the start would show; *last 10* the mean loss of the last ten steps.
"""
COLUMNS = (
    *("connection", "logits, fp32", "rounding", "logits, fp64", "mean KL, nats", "loss", "first"),
    *(f"worst of the first {START}", "last 10", "CPU seconds a step"),
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run alike for every model."""

    model: str = "smollm2"
    text: str = "sotu"
    held_out: str = "sotu-held-out"
    tokens: int = 1024
    window: int = 256
    batch: int = 1
    steps: int = STEPS
    warmup: int = 10
    rate: float = 1e-4


@torch.no_grad()
def distances(plan: Plan, connection: str | None) -> dict[str, Any]:
    """Return the distance from the source in fp32 and in fp64; of the source, that between its two dtypes."""
    found: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    for dtype in ("float32", "float64"):
        loaded = load_model(plan.model, dtype=dtype)
        text = load_text(plan.held_out)
        windows = make_windows(
            loaded.tokenizer, text, num_tokens=plan.tokens, window=plan.window, batch_size=1
        )
        if connection is None:
            sources[dtype] = loaded.model
            continue
        found[dtype] = measure_distance(loaded.model, _converted(loaded.model, connection), windows).to_dict()
    if connection is None:
        found["rounding"] = measure_distance(sources["float64"], sources["float32"], windows).to_dict()
    return found


def _converted(model: Any, connection: str) -> Any:
    from mainstem.tower.hf import MainstemForCausalLM

    return MainstemForCausalLM.from_tower(convert_tower(tower_from_transformers(model), connection)[0])


def train(plan: Plan, connection: str | None) -> dict[str, Any]:
    """Train the source or its conversion; returns every step's loss, the batches' hash, and the time."""
    from mainstem.training.config import TrainConfig
    from mainstem.training.run import collate, training_arguments
    from mainstem.training.trainer import StreamTrainer

    torch.manual_seed(0)
    loaded = load_model(plan.model)
    model: nn.Module = loaded.model if connection is None else _converted(loaded.model, connection)
    num_tokens = plan.steps * plan.batch * plan.window
    windows = make_windows(
        loaded.tokenizer, load_text(plan.text), num_tokens=num_tokens, window=plan.window, batch_size=1
    )
    rows = [{"input_ids": batch.input_ids[0].tolist()} for batch in windows]
    losses: list[float] = []
    seen = hashlib.sha256()

    class Recorded(StreamTrainer):
        """A Trainer that keeps every step's loss unrounded."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            ids: Tensor = inputs["input_ids"]
            seen.update(ids.cpu().numpy().tobytes())
            result = super().compute_loss(model, inputs, *args, **kwargs)
            losses.append(float(result[0] if isinstance(result, tuple) else result))
            return result

    options = {
        "max_steps": plan.steps,
        "learning_rate": plan.rate,
        "warmup_steps": plan.warmup,
        "per_device_train_batch_size": plan.batch,
        "eval_strategy": "no",
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(TrainConfig(trainer=options), Path(folder))
        trainer = Recorded(model=model, args=arguments, train_dataset=rows, data_collator=collate)
        began = time.process_time()
        trainer.train()
        took = time.process_time() - began
    return {"losses": losses, "batches": seen.hexdigest()[:12], "cpu_seconds_a_step": took / plan.steps}


def measured(out: Path, plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the lines of this plan that are there, by connection; a torn last line is left out."""
    if not out.exists():
        return {}
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines() if line.endswith("}")]
    return {line["connection"]: line for line in lines if line["plan"] == dataclasses.asdict(plan)}


def compared(line: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, float]:
    """Return step 1's difference in loss from the unconverted model's, and the largest of the first steps.

    Raises:
        ValueError: the two were not trained on the same batches.
    """
    if line["training"]["batches"] != base["training"]["batches"]:
        raise ValueError(f"{line['connection']} and {base['connection']} saw other batches.")
    apart = [a - b for a, b in zip(line["training"]["losses"], base["training"]["losses"], strict=True)]
    if not all(math.isfinite(difference) for difference in apart):
        return {"first": apart[0], "worst": math.inf}
    return {"first": apart[0], "worst": max(apart[:START])}


def page(lines: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of what was measured."""
    base = lines[SOURCE]
    versions = ", ".join(f"{name} {base['versions'][name]}" for name in ("torch", "transformers"))
    head = HEADER.format(
        **base["plan"],
        versions=versions,
        threads=base["machine"]["threads"],
        batches=base["training"]["batches"],
        start=START,
    )
    titles = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    rows = [_row(name, line, base) for name, line in lines.items()]
    curve = range(0, len(base["training"]["losses"]), 10)
    table = [
        "",
        "## Loss by step",
        "",
        "| step | " + " | ".join(f"`{name}`" if name != SOURCE else name for name in lines) + " |",
        "|---|" + "---|" * len(lines),
        *(
            f"| {step + 1} | "
            + " | ".join(f"{line['training']['losses'][step]:.4f}" for line in lines.values())
            + " |"
            for step in sorted({*curve, *range(min(5, len(base["training"]["losses"])))})
        ),
    ]
    missing = ", ".join(f"`{name}`" for name in CONNECTIONS if name not in lines)
    note = ["", f"Not measured yet: {missing}."] if missing else []
    return "\n".join(itertools.chain([head, *titles], rows, note, table)) + "\n"


def _row(name: str, line: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    last = statistics.fmean(line["training"]["losses"][-10:])
    ends = [f"{last:.4f}", f"{line['training']['cpu_seconds_a_step']:.2f}"]
    rounding = f"{base['distances']['rounding']['max_logit_difference']:.2g}"
    if name == SOURCE:
        loss = base["distances"]["rounding"]["loss_after"]
        cells = [name, "", rounding, "", "", f"{loss:.4f}", "", "", *ends]
    else:
        single, double = (line["distances"][dtype] for dtype in ("float32", "float64"))
        apart = compared(line, base)
        cells = [
            f"`{name}`",
            f"{single['max_logit_difference']:.2g}",
            rounding,
            f"{double['max_logit_difference']:.2g}",
            f"{single['mean_kl']:.2g}",
            f"{single['loss_after']:.4f}",
            f"{apart['first']:+.1g}",
            f"{apart['worst']:+.4f}",
            *ends,
        ]
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not there yet, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/convert-smollm2.jsonl"))
    parser.add_argument("--page", type=Path)
    parser.add_argument("--as-is", action="store_true", help="measure nothing; the page of what is there")
    parser.add_argument("--model", default=Plan.model)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    given = parser.parse_args(arguments)
    plan = Plan(model=given.model, steps=given.steps)
    for name in (SOURCE, *CONNECTIONS):
        if given.as_is or name in measured(given.out, plan):
            continue
        connection = None if name == SOURCE else name
        result = {"distances": distances(plan, connection), "training": train(plan, connection)}
        emit({"connection": name, "plan": dataclasses.asdict(plan), **result}, given.out)
    if given.page is not None:
        given.page.write_text(page(measured(given.out, plan)), encoding="utf-8")


if __name__ == "__main__":
    main()
