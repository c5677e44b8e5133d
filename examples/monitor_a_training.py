"""Train a small Llama-type model with a plain Trainer, watch its stream, and draw what was seen.

    python examples/monitor_a_training.py out/monitored

One line is mainstem's: ``StreamMonitor(...).attach(trainer)``. The rest is how a training script looks
anyway: a model from a config, the bytes of a text as tokens, a Trainer. About two minutes on 2 cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from training_picture import draw
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from mainstem.training import StreamMonitor, read_monitor

TEXT = Path(__file__).parents[1] / "tests" / "data" / "gpl-3.0.txt"


def byte_windows(path: Path, size: int) -> list[dict[str, torch.Tensor]]:
    """Cut a text into windows of that many bytes, a byte a token."""
    ids = torch.tensor(list(path.read_bytes()))
    rows = ids[: len(ids) // size * size].reshape(-1, size)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--every", type=int, default=20)
    arguments = parser.parse_args()

    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=arguments.depth,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        )
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            str(arguments.out), max_steps=arguments.steps, per_device_train_batch_size=8, learning_rate=2e-3,
            warmup_steps=arguments.steps // 10, lr_scheduler_type="cosine", logging_steps=arguments.every,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=byte_windows(arguments.text, 128),
    )  # fmt: skip
    StreamMonitor(every=arguments.every).attach(trainer)
    trainer.train()

    records = read_monitor(arguments.out / "stream.jsonl")
    picture = arguments.out / "training.svg"
    picture.write_text(draw(records), encoding="utf-8")
    last = records[-1]
    print(
        f"{len(records)} records of {last['num_blocks']} blocks; at step {last['step']} the stream grows "
        f"from {last['stream_rms'][0]:.3f} to {last['stream_rms'][-1]:.3f} and the gradient at the bottom is "
        f"{last['gradient_norm'][0] / last['gradient_norm'][-1]:.2f} of that at the top"
    )
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
