"""The run: config -> text, tower, Trainer -> a folder with the model, its curve and how it was made."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mainstem.errors import ConfigError, MainstemError
from mainstem.sources import load_text, quiet_transformers, require, versions
from mainstem.tower import Tower, compile_blocks
from mainstem.training._files import write_whole
from mainstem.training.checkpoints import checkpoints, last_whole, set_aside
from mainstem.training.config import TrainConfig
from mainstem.training.data import TrainingText, prepare_text

RECORD = "train.json"
OWN_ARGUMENTS = {
    "output_dir": "--out",
    "resume_from_checkpoint": "--resume",
    "optim": "--optimizer",
    "torch_compile": "--compile",
    "do_train": "nothing",
    "do_eval": "nothing",
}
"""Arguments of TrainingArguments that have an option of ours."""
HARMLESS = re.compile(
    "(logging|save|eval|dataloader|ddp|fsdp|hub|log|activation_checkpointing|gradient_checkpointing)_.*"
    "|(per_device_(train|eval)_batch|gradient_accumulation)_.*|fsdp|push_to_hub|report_to|run_name|project"
    "|trackio_.*|disable_tqdm|activation_checkpointing|gradient_checkpointing|torch_empty_cache_steps"
)
"""Arguments that may be another in a resumed run: what is computed is the same.

Of the batch, the windows of all processes and accumulated passes together must be as many as before.
"""

Tell = Callable[[str], None]


def _nothing(line: str) -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to.

    Attributes:
        folder: holds the model, tokenizer, ``train.json``, ``log.jsonl`` and checkpoints.
        steps: optimiser steps done.
        train_loss: the last one logged, nats a token.
        eval_loss: of the held-out text, nats a token.
        bits_per_byte: the same in bits for each byte of UTF-8.
        tokens_per_second: trained on, in this call; None where no step was left to do.
        sample: what the model wrote, or None.
    """

    folder: Path
    steps: int
    train_loss: float
    eval_loss: float
    bits_per_byte: float
    tokens_per_second: float | None
    sample: str | None


def train(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    tell: Tell = _nothing,
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
    given, config = config, config.resolve()
    arguments = training_arguments(config, out)
    first = arguments.process_index == 0
    tell = tell if first else _nothing
    if first:
        _check_folder(out, resume)
    with torch.device("meta"):
        tower = Tower(config.tower_config(vocab_size=257))  # refuses what cannot be built before reading
    if config.compile:
        tower.config.check_served("compile", "be compiled", "Leave out --compile.")
    text = load_text(config.text, streaming=config.streaming)
    with arguments.main_process_first(desc="packing the text"):
        prepared = prepare_text(config, text)
    transformers.set_seed(arguments.seed)
    record = _record(config, prepared, arguments)
    if first:
        _make_folder(out)
    with _only_run(out) if first else contextlib.nullcontext():
        if first:
            _check_folder(out, resume)  # again, for another run may have begun and ended meanwhile
            _check_same(out, record, resume)
        trainer = _trainer(config, arguments, prepared, tell, callbacks)
        if first:
            write_whole(out / RECORD, json.dumps(record, indent=1) + "\n")
        for line in _summary(given, config, prepared, trainer, out):
            tell(line)
        checkpoint = _checkpoint(out, tell, first) if resume else None
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
    if "gradient_checkpointing" in given and "activation_checkpointing" in known:
        given["activation_checkpointing"] = given.pop("gradient_checkpointing")  # renamed in 5.24
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
        "disable_tqdm": not sys.stderr.isatty(),
        "seed": 0,
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": False,
    }
    if given.get("fsdp"):
        own = given.get("fsdp_config")
        if not isinstance(own, str):
            given["fsdp_config"] = {"state_dict_type": "SHARDED_STATE_DICT"} | dict(own or {})
    if "lr_scheduler_kwargs" not in given and given.get("lr_scheduler_type", "cosine") == "cosine":
        defaults["lr_scheduler_type"] = "cosine_with_min_lr"
        defaults["lr_scheduler_kwargs"] = {"min_lr_rate": 0.1}
        given.pop("lr_scheduler_type", None)
    try:
        return transformers.TrainingArguments(output_dir=str(out), **defaults | given)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"the Trainer refuses its arguments: {error}") from error


def _trainer(
    config: TrainConfig, arguments: Any, prepared: TrainingText, tell: Tell, callbacks: Sequence[Any]
) -> Any:
    from transformers import PrinterCallback, ProgressCallback

    from mainstem.tower.hf import MainstemForCausalLM
    from mainstem.training.logs import Bar, Lines
    from mainstem.training.monitor import StreamMonitor
    from mainstem.training.trainer import StreamTrainer

    tokenizer = prepared.tokenizer
    tower = Tower(config.tower_config(len(tokenizer)))
    refused = "compile" in tower.config.scheme().refuses
    if config.compile or (config.compile is None and arguments.device.type == "cuda" and not refused):
        compile_blocks(tower)
    model: Any = MainstemForCausalLM.from_tower(tower)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for part in (model.config, model.generation_config):
            setattr(part, name, getattr(tokenizer, name))
    try:
        trainer = StreamTrainer(
            model=model,
            args=arguments,
            train_dataset=prepared.train,
            eval_dataset=prepared.held_out,
            processing_class=tokenizer,
            data_collator=collate,
            callbacks=list(callbacks),
            optimizer_kind=config.optimizer,
            bytes_per_token=prepared.bytes_per_token,
        )
    except MainstemError:
        raise
    except (ValueError, ImportError, RuntimeError) as error:  # the last is a logger that is not installed
        raise ConfigError(f"the Trainer refuses its arguments: {error}") from error
    if config.monitor:
        StreamMonitor(every=config.monitor).attach(trainer)
    trainer.remove_callback(PrinterCallback if arguments.disable_tqdm else ProgressCallback)
    trainer.add_callback(Lines(tell) if arguments.disable_tqdm else Bar())
    return trainer


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack windows; the labels are the windows themselves, which the model shifts."""
    token_ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": token_ids, "labels": token_ids}


def _run(
    trainer: Any, checkpoint: Path | None, config: TrainConfig, prepared: TrainingText, out: Path
) -> TrainResult:
    speed: float | None = None
    try:
        if checkpoint is not None and _is_last(checkpoint):
            _take_up(trainer, checkpoint)
        else:
            finished = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            speed = finished.metrics["train_samples_per_second"] * config.window
    except ValueError as error:
        if "only supported when using PyTorch FSDP" not in str(error):
            raise
        raise ConfigError(
            f"{checkpoint} is sharded: go on with --fsdp, under torchrun or accelerate launch with any "
            "number of processes, one too."
        ) from error
    metrics = _held_out(trainer)
    trainer.save_model()
    sample = None
    if trainer.is_world_process_zero() and config.sample is not None:
        sample = write_sample(out, prepared.tokenizer, config.sample, device=trainer.args.device)
    history = trainer.state.log_history
    result = TrainResult(
        folder=out,
        steps=trainer.state.global_step,
        train_loss=next(entry["loss"] for entry in reversed(history) if "loss" in entry),
        eval_loss=metrics["eval_loss"],
        bits_per_byte=metrics["eval_bits_per_byte"],
        tokens_per_second=speed,
        sample=sample,
    )
    if trainer.is_world_process_zero():
        record = json.loads((out / RECORD).read_text("utf-8"))
        record["result"] = dataclasses.asdict(result) | {"folder": out.name}
        write_whole(out / RECORD, json.dumps(record, indent=1) + "\n")
    return result


def _is_last(checkpoint: Path) -> bool:
    """Whether no step is left to do: the Trainer would do one more."""
    state = json.loads((checkpoint / "trainer_state.json").read_text("utf-8"))
    return state["global_step"] >= state["max_steps"]


def _take_up(trainer: Any, checkpoint: Path) -> None:
    """Load a finished run's model and state, and take no step."""
    path = str(checkpoint)
    trainer.state = type(trainer.state).load_from_json(str(checkpoint / "trainer_state.json"))
    if trainer.is_fsdp_enabled:
        trainer._prepare_for_training(trainer.state.max_steps, trainer.get_train_dataloader(), path)
    else:
        trainer._load_from_checkpoint(path)


def _held_out(trainer: Any) -> dict[str, float]:
    """Return the evaluation of the model as it is: the last one of training, or a new one."""
    state = trainer.state
    if not trainer.args.load_best_model_at_end:
        for entry in reversed(state.log_history):
            if "eval_loss" in entry and entry["step"] == state.global_step:
                return entry
    return trainer.evaluate()


def write_sample(
    folder: Path, tokenizer: Any, prompt: str, *, device: Any = "cpu", new_tokens: int = 64, seed: int = 0
) -> str:
    """Let the model in ``folder`` go on from ``prompt``: at temperature 0.8, from the 40 likeliest tokens."""
    from mainstem.tower.hf import MainstemForCausalLM

    with quiet_transformers():
        model: Any = MainstemForCausalLM.from_pretrained(folder).to(device).eval()
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"].to(device)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        written = model.generate(
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
    return tokenizer.decode(written[0], skip_special_tokens=True)


def _record(config: TrainConfig, prepared: TrainingText, arguments: Any) -> dict[str, Any]:
    return {
        "format": "mainstem.train/1",
        "config": config.to_dict(),
        "data": prepared.provenance,
        "processes": arguments.world_size,
        "windows_a_step": _windows_a_step(arguments),
        "versions": versions("transformers", "accelerate", "datasets", "tokenizers"),
    }


def _windows_a_step(arguments: Any) -> int:
    return arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size


def _summary(
    given: TrainConfig, config: TrainConfig, prepared: TrainingText, trainer: Any, out: Path
) -> Iterator[str]:
    """Say what will be trained, and what of it followed from depth."""

    def followed(*names: str) -> str:
        open_ones = [n for n in names if getattr(given, n, None) is None and n not in given.trainer]
        return " (from depth)" if len(open_ones) == len(names) else ""

    arguments, facts = trainer.args, prepared.provenance
    parameters = sum(p.numel() for p in trainer.model.parameters())
    yield (
        f"tower: {config.depth} blocks, width {config.width}{followed('width')}, {config.num_heads} heads"
        f"{followed('num_heads')}, {config.connection}: {parameters:,} parameters"
    )
    windows = "a stream of" if config.streaming else f"{facts['windows']:,}"
    yield (
        f"text: {config.text}, {windows} windows of {config.window} tokens ({config.tokenizer}: "
        f"{len(prepared.tokenizer):,}), {facts['held_out_windows']} of them held out"
    )
    batch = _windows_a_step(arguments)
    steps = arguments.max_steps
    many = f"{steps:,} steps{followed('max_steps', 'num_train_epochs')}"
    if steps <= 0:
        many = f"{arguments.num_train_epochs:g} times through the text"
    elif not config.streaming:
        many += f", {steps * batch / len(prepared.train):.3g} times through the text"
    yield (
        f"training: {many}, {batch} windows a step{followed('per_device_train_batch_size')}, "
        f"{config.optimizer}, learning rate {arguments.learning_rate:g}{followed('learning_rate')}"
    )
    if arguments.world_size > 1:
        how = "FSDP2" if trainer.is_fsdp_enabled else "DDP"
        yield f"processes: {arguments.world_size}, {how}"
    yield f"the whole config: {out / RECORD}"


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
    before = _what_counts(json.loads((out / RECORD).read_text("utf-8")))
    now = _what_counts(json.loads(json.dumps(record)))
    for name in {**before, **now}:  # settings first, then what follows from the text
        if before.get(name) != now.get(name):
            raise ConfigError(
                f"{out} was trained with {name}={before.get(name)!r}, now it is {now.get(name)!r}. "
                "Resume with the same settings, or choose another folder."
            )


def _what_counts(record: dict[str, Any]) -> dict[str, Any]:
    """Settings that a resumed run must share, by name."""
    config = dict(record["config"])
    trainer = {name: value for name, value in config.pop("trainer").items() if not HARMLESS.fullmatch(name)}
    for name in ("sample", "compile", "monitor"):
        config.pop(name, None)
    return {**config, **trainer, **record["data"], "windows a step": record["windows_a_step"]}


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


def _checkpoint(out: Path, tell: Tell, first: bool) -> Path | None:
    """Return the checkpoint to go on from, as the first process finds it."""
    from accelerate.utils import broadcast_object_list

    found: list[str | None] = [None]
    if first:
        kept, torn = last_whole(out)
        for path in torn:
            tell(
                f"{path.name} is torn or was changed (a file is missing, or its hash differs): "
                f"passed over, and renamed to torn-{path.name}"
            )
        set_aside(torn)
        tell(f"going on from {kept.name}" if kept else "no whole checkpoint: starting from the beginning")
        found = [str(kept) if kept else None]
    broadcast_object_list(found)
    return Path(found[0]) if found[0] is not None else None
