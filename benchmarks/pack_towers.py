"""Put the twin towers into the package: weights in bf16, config, tokenizer, curve, and a card that says how.

    python -m benchmarks.pack_towers RUN_WITH RUN_WITHOUT

The runs are those of ``mainstem train tower96 --out RUN_WITH`` and ``mainstem train tower96 --connection
no_residual --out RUN_WITHOUT``. Also writes the text that was held out of both, as it was packed.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import mainstem.tower.hf  # noqa: F401  registers the towers
from mainstem.sources import load_text
from mainstem.training.config import TrainConfig
from mainstem.training.data import prepare_text
from mainstem.training.run import write_sample

SOURCES = Path(__file__).parents[1] / "src" / "mainstem" / "sources"
NAMES = {"tower96": "with residuals (Pre-LN)", "tower96_no_residual": "without residuals"}
LIMIT = 12_000_000
"""Bytes a tower may have."""

CARD = """# {name}: a tower of 96 blocks {what}

One of the twin towers of mainstem: two decoder-only transformers with the same width, data, seed, budget and
schedule, one with Pre-LN residual connections and one without any. They are for looking at, not for use.

| | |
|---|---|
| command | `{command}` |
| architecture | 96 blocks, width 64, 2 heads, SwiGLU, RMSNorm, rotary positions; {parameters:,} parameters |
| text | `sotu`: State of the Union addresses 1946 to 2021, public domain; 5 % held out (`sotu-held-out`) |
| tokenizer | byte-level BPE of 2,048 tokens, trained on that text |
| budget | {steps:,} steps of {tokens:,} tokens, {epochs:.1f} passes over the training windows |
| time | {hours:.1f} hours of the wall clock, one thread on a busy 2-core machine, its twin beside it |
| held-out loss | {loss:.3f} nats a token, {bits:.3f} bits a byte, of these bf16 weights |
| lowest on the way | {best:.3f} nats a token, at step {best_step:,} |
| guessing by frequency | {unigram:.3f} nats a token |

It writes (temperature 0.8, the 40 likeliest tokens, seed 0):

> {sample}

Curve: `log.jsonl`. Weights: Apache-2.0.
"""


def held_out_loss(model: Any, windows: list[list[int]]) -> float:
    """Mean nats a token."""
    total = count = 0.0
    with torch.no_grad():
        for start in range(0, len(windows), 16):
            ids = torch.tensor(windows[start : start + 16])
            total += float(model(input_ids=ids, labels=ids).loss) * len(ids)
            count += len(ids)
    return total / count


def unigram_loss(train: Any, held_out: list[list[int]], size: int) -> float:
    """Loss of the frequencies of the training windows, one added to each count."""
    counts: Tensor = torch.ones(size, dtype=torch.float64)
    for start in range(0, len(train), 512):
        counts += torch.bincount(
            torch.tensor(train[start : start + 512]["input_ids"]).flatten(), minlength=size
        )
    log_p = (counts / counts.sum()).log()
    return float(-log_p[torch.tensor(held_out)[:, 1:].flatten()].mean())


def pack(name: str, run: Path, prepared: Any) -> None:
    """Write one tower's folder."""
    place = SOURCES / "towers" / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(run, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(place)
    AutoTokenizer.from_pretrained(run).save_pretrained(place)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    windows = prepared.held_out["input_ids"]
    loss = held_out_loss(model, [list(w) for w in windows])
    record = json.loads((run / "train.json").read_text("utf-8"))
    steps = record["config"]["trainer"]["max_steps"]
    tokens = record["config"]["trainer"]["per_device_train_batch_size"] * record["config"]["window"]
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
    kept = [
        {k: v for k, v in line.items() if k in ("step", "loss", "eval_loss", "grad_norm")} for line in lines
    ]
    curve = [line for line in kept if len(line) > 1 and ("eval_loss" in line or line["step"] % 50 == 0)]
    (place / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in curve), "utf-8")
    (place / "train.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    best, best_step = min((line["eval_loss"], line["step"]) for line in lines if "eval_loss" in line)
    command = "mainstem train tower96" + (" --connection no_residual" if name != "tower96" else "")
    runtime = sum(line["train_runtime"] for line in lines if "train_runtime" in line)
    windows_seen = steps * tokens / record["config"]["window"]
    card = CARD.format(
        name=name,
        what=NAMES[name],
        command=command,
        parameters=model.num_parameters(),
        steps=steps,
        tokens=tokens,
        epochs=windows_seen / len(prepared.train),
        hours=runtime / 3600,
        loss=loss,
        best=best,
        best_step=best_step,
        bits=loss / math.log(2) / prepared.bytes_per_token,
        unigram=unigram_loss(prepared.train, [list(w) for w in windows], len(prepared.tokenizer)),
        sample=write_sample(place, prepared.tokenizer, "The ").replace("\n", " "),
    )
    (place / "README.md").write_text(card, "utf-8")
    for path in place.iterdir():
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in place.iterdir())
    assert size <= LIMIT, f"{place} has {size:,} bytes"
    print(f"{name}: {size:,} bytes, held-out loss {loss:.4f}")


def main() -> None:
    """Pack both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs=2, type=Path)
    runs = parser.parse_args().runs
    record = json.loads((runs[0] / "train.json").read_text("utf-8"))
    prepared = prepare_text(TrainConfig(**record["config"]), load_text("sotu"))
    for name, run in zip(NAMES, runs, strict=True):
        pack(name, run, prepared)
    text = prepared.tokenizer.decode([t for w in prepared.held_out["input_ids"] for t in w])
    text = text.replace(prepared.tokenizer.eos_token, "\n\n").replace("\ufffd", "")
    packed = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
    (SOURCES / "texts" / "state_of_the_union_held_out.txt.xz").write_bytes(packed)


if __name__ == "__main__":
    main()
