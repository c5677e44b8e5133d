"""The run: config -> text, tower, Trainer -> a folder with the model, its curve and how it was made."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from mainstem.errors import ConfigError, MainstemError
from mainstem.sources import load_text, require, versions
from mainstem.tower import Tower
from mainstem.training.checkpoints import checkpoints, last_whole
from mainstem.training.config import TrainConfig
from mainstem.training.data import TrainingText, prepare_text

RECORD = "train.json"
OWN_ARGUMENTS = {
    "output_dir": "--out",
    "resume_from_checkpoint": "--resume",
    "do_train": "nothing",
    "do_eval": "nothing",
}
"""Arguments of TrainingArguments that have an option of ours."""

Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to.

    Attributes:
        folder: holds the model, tokenizer, ``train.json``, ``log.jsonl`` and checkpoints.
        steps: optimiser steps done.
        train_loss: mean over the steps of this call, nats a token.
        eval_loss: of the held-out text, nats a token.
        bits_per_byte: the same in bits for each byte of UTF-8.
        tokens_per_second: trained on, in this call.
        sample: what the model wrote, or None.
    """

    folder: Path
    steps: int
    train_loss: float
    eval_loss: float
    bits_per_byte: float
    tokens_per_second: float
    sample: str | None


def train(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    tell: Tell = lambda _: None,
    callbacks: Sequence[Any] = (),
) -> TrainResult:
    """Train a tower and leave a folder that ``AutoModelForCausalLM.from_pretrained`` reads.

    Works as one process, or as one of several under ``torchrun`` or ``accelerate launch``. Everything that
    can be refused is refused before the first step.

    Args:
        config: what to train.
        out: folder of the run. A folder that holds a run is taken up with ``resume`` only.
        resume: go on from the newest whole checkpoint; from the beginning where there is none.
        tell: is handed lines for the user, on the first process only.
        callbacks: of :class:`transformers.TrainerCallback`, beside our own.

    Raises:
        ConfigError: the config cannot be built, or is another than that of the run to be resumed.
        SourceError: the text or the tokenizer cannot be used.
        TrainingStoppedError: see :class:`StreamTrainer`.
    """
    transformers = require("transformers", feature="Training", extra="train")
    require("accelerate", feature="Training", extra="train")
    config = config.resolve()
    arguments = training_arguments(config, out)
    first = arguments.process_index == 0
    _check_folder(out, resume)
    with torch.device("meta"):
        Tower(config.tower_config(vocab_size=257))  # refuses what cannot be built, before anything is read
    text = load_text(config.text)
    with arguments.main_process_first(desc="packing the text"):
        prepared = prepare_text(config, text)
    transformers.set_seed(arguments.seed)
    tower_config = config.tower_config(len(prepared.tokenizer))
    record = _record(config, prepared)
    _make_folder(out)
    with _only_run(out) if first else contextlib.nullcontext():
        if first:
            _check_same(out, record, resume)
            _write_json(out / RECORD, record)
            tell(_summary(config, prepared, out))
        trainer = _trainer(config, tower_config, arguments, prepared)
        for callback in callbacks:
            trainer.add_callback(callback)
        checkpoint = _checkpoint(out, tell if first else lambda _: None) if resume else None
        return _run(trainer, checkpoint, config, prepared, out)


def training_arguments(config: TrainConfig, out: Path) -> Any:
    """Return the :class:`transformers.TrainingArguments` of a resolved config: our defaults under its own.

    Raises:
        ConfigError: an argument is unknown, has a value that cannot be used, or an option of ours.
    """
    transformers = require("transformers", feature="Training", extra="train")
    given = dict(config.trainer)
    for name, option in OWN_ARGUMENTS.items():
        if name in given:
            raise ConfigError(f"TrainingArguments' {name!r} is set by mainstem; use {option} instead.")
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments) if field.init}
    if unknown := sorted(given.keys() - known):
        raise ConfigError(f"TrainingArguments has no argument {unknown[0]!r}; see `mainstem train --help`.")
    steps = int(given.get("max_steps", -1))
    tenth = max(1, steps // 10)
    defaults: dict[str, Any] = {
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        "logging_steps": max(1, min(10, steps // 20)) if steps > 0 else 10,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": tenth if steps > 0 else 500,
        "save_total_limit": 2,
        "eval_strategy": "steps",
        "eval_steps": tenth if steps > 0 else 500,
        "per_device_eval_batch_size": 2 * int(given["per_device_train_batch_size"]),
        "prediction_loss_only": True,
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "bf16": torch.cuda.is_available(),
        "seed": 0,
        "remove_unused_columns": False,
    }
    if "lr_scheduler_kwargs" not in given and given.get("lr_scheduler_type", "cosine") == "cosine":
        defaults["lr_scheduler_type"] = "cosine_with_min_lr"
        defaults["lr_scheduler_kwargs"] = {"min_lr_rate": 0.1}
        given.pop("lr_scheduler_type", None)
    try:
        return transformers.TrainingArguments(output_dir=str(out), **defaults | given)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"the Trainer refuses its arguments: {error}") from error


def _trainer(config: TrainConfig, tower_config: Any, arguments: Any, prepared: TrainingText) -> Any:
    from mainstem.tower.hf import MainstemForCausalLM
    from mainstem.training.trainer import StreamTrainer

    model = MainstemForCausalLM.from_tower(Tower(tower_config))
    return StreamTrainer(
        model=model,
        args=arguments,
        train_dataset=prepared.train,
        eval_dataset=prepared.held_out,
        processing_class=prepared.tokenizer,
        data_collator=collate,
        optimizer_kind=config.optimizer,
        bytes_per_token=prepared.bytes_per_token,
    )


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack windows; the labels are the windows themselves, which the model shifts."""
    token_ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": token_ids, "labels": token_ids}


def _run(
    trainer: Any, checkpoint: Path | None, config: TrainConfig, prepared: TrainingText, out: Path
) -> TrainResult:
    finished = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    metrics = trainer.evaluate()
    trainer.save_model()
    sample = None
    if trainer.is_world_process_zero() and config.sample is not None:
        sample = write_sample(
            trainer.accelerator.unwrap_model(trainer.model), prepared.tokenizer, config.sample
        )
    runtime = finished.metrics["train_runtime"]
    tokens = finished.metrics["train_samples_per_second"] * runtime * config.window
    result = TrainResult(
        folder=out,
        steps=finished.global_step,
        train_loss=finished.training_loss,
        eval_loss=metrics["eval_loss"],
        bits_per_byte=metrics["eval_bits_per_byte"],
        tokens_per_second=tokens / runtime,
        sample=sample,
    )
    if trainer.is_world_process_zero():
        record = json.loads((out / RECORD).read_text("utf-8"))
        record["result"] = dataclasses.asdict(result) | {"folder": out.name}
        _write_json(out / RECORD, record)
    return result


def write_sample(model: Any, tokenizer: Any, prompt: str, *, new_tokens: int = 64, seed: int = 0) -> str:
    """Let the model go on from ``prompt``: sampled at temperature 0.8 from the 40 likeliest tokens."""
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
    training = model.training
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        written = model.eval().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=True,
            temperature=0.8,
            top_k=40,
            pad_token_id=tokenizer.pad_token_id or 0,
            eos_token_id=tokenizer.eos_token_id,
            use_cache=model.tower.refuses_cache is None,
        )
    model.train(training)
    return tokenizer.decode(written[0], skip_special_tokens=True)


def _record(config: TrainConfig, prepared: TrainingText) -> dict[str, Any]:
    return {
        "format": "mainstem.train/1",
        "config": config.to_dict(),
        "data": prepared.provenance,
        "versions": versions("transformers", "accelerate", "datasets", "tokenizers"),
    }


def _summary(config: TrainConfig, prepared: TrainingText, out: Path) -> str:
    trainer = config.trainer
    batch = trainer["per_device_train_batch_size"] * trainer.get("gradient_accumulation_steps", 1)
    steps = trainer.get("max_steps") or f"{trainer.get('num_train_epochs')} epochs"
    return (
        f"tower: {config.depth} blocks, width {config.width}, {config.num_heads} heads, {config.connection}\n"
        f"text: {config.text}, {len(prepared.tokenizer)} tokens ({config.tokenizer}), "
        f"{prepared.provenance.get('windows', '?')} windows of {config.window}\n"
        f"training: {steps} steps of {batch} windows a process, {config.optimizer}, "
        f"learning rate {trainer['learning_rate']:g}\n"
        f"the whole config: {out / RECORD}"
    )


def _check_folder(out: Path, resume: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder.")
    if not resume and (checkpoints(out) or (out / RECORD).exists()):
        raise ConfigError(f"{out} holds a run already; go on with --resume, or choose another folder.")


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The folder {out} cannot be made ({error.strerror or error}).") from error
    if not os.access(out, os.W_OK):
        raise ConfigError(f"The folder {out} cannot be written to; choose another with --out.")


def _check_same(out: Path, record: dict[str, Any], resume: bool) -> None:
    if not resume or not (out / RECORD).exists():
        return
    before = json.loads((out / RECORD).read_text("utf-8"))
    plain = json.loads(json.dumps(record))
    for part in ("config", "data"):
        for name, value in plain[part].items():
            was = before[part].get(name)
            if was != value and name != "sample":
                raise ConfigError(
                    f"{out} was trained with {name}={was!r}, now it is {value!r}. Resume with the same "
                    "settings, or choose another folder."
                )


@contextlib.contextmanager
def _only_run(out: Path) -> Generator[None]:
    """Keep a second run out of the folder while this one lasts."""
    filelock = require("filelock", feature="Training", extra="train")
    lock = filelock.FileLock(out / ".lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ConfigError(f"Another run is training in {out}; choose another folder with --out.") from None
    try:
        yield
    finally:
        lock.release()


def _checkpoint(out: Path, tell: Tell) -> Path | None:
    found, torn = last_whole(out)
    for path in torn:
        tell(f"{path.name} is torn or was changed (a file is missing, or its hash differs): passed over")
    tell(f"going on from {found.name}" if found else "no whole checkpoint: starting from the beginning")
    return found


def _write_json(path: Path, data: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise MainstemError(f"{path} cannot be written ({error.strerror or error}).") from error
