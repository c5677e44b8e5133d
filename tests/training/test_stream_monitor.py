"""The monitor's figures are those of the training itself, and the training does not notice it."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_runs import TORCHRUN
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from mainstem.errors import ConfigError, SourceError
from mainstem.tower import Tower, TowerConfig, compile_blocks
from mainstem.tower.hf import MainstemForCausalLM
from mainstem.training import StreamMonitor, read_monitor

transformers.logging.set_verbosity_error()

WINDOW, VOCAB, WIDTH, BLOCKS = 16, 64, 32, 3


def llama(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=BLOCKS,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            attention_dropout=dropout, initializer_range=0.1,
        )
    )  # fmt: skip


def gpt2(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(5)
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return AutoModelForCausalLM.from_config(
        GPT2Config(n_embd=WIDTH, n_layer=BLOCKS, n_head=4, vocab_size=VOCAB, n_positions=64, **rates)
    )


def tower(connection: str, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(5)
    return MainstemForCausalLM.from_tower(
        Tower(
            TowerConfig(
                vocab_size=VOCAB, width=WIDTH, num_blocks=BLOCKS, num_heads=4, connection=connection,
                dropout=dropout, tied=True,
            )
        )
    )  # fmt: skip


def windows(number: int = 64, padding: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows: list[dict[str, Tensor]] = []
    for _ in range(number):
        ids = torch.randint(0, VOCAB, (WINDOW,), generator=generator)
        mask = (torch.arange(WINDOW) < WINDOW - padding).long()
        rows.append({"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask})
    return rows


@dataclasses.dataclass
class Run:
    model: nn.Module
    trainer: Trainer
    records: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry]


def train(
    model: nn.Module,
    folder: Path,
    monitor: StreamMonitor | None = None,
    *,
    rows: list[dict[str, Tensor]] | None = None,
    trainer_class: type[Trainer] = Trainer,
    callbacks: list[TrainerCallback] | None = None,
    resume: str | None = None,
    **options: Any,
) -> Run:
    options = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
    } | options
    arguments = TrainingArguments(
        str(folder), report_to="none", disable_tqdm=True, use_cpu=True, seed=3, learning_rate=1e-2, **options
    )
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=rows or windows(),
        eval_dataset=windows(4),
        callbacks=callbacks,
    )
    trainer.pop_callback(transformers.PrinterCallback)
    if monitor is not None:
        monitor.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    file = folder / "stream.jsonl"
    return Run(model, trainer, read_monitor(file) if file.is_file() else [])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "pre_norm": lambda: tower("pre_norm"),
    "post_norm": lambda: tower("post_norm"),
    "mhc": lambda: tower("mhc"),
    "attention_residuals": lambda: tower("attention_residuals"),
}


class NothingLeft(TrainerCallback):
    """Looks, at every step that is not recorded, whether the model and torch are as they were."""

    def __init__(self, model: nn.Module, every: int):
        self.model, self.every, self.looked = model, every, 0
        self.before = self.seen()

    def seen(self) -> list[int]:
        tables = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)
        own = (t for m in self.model.modules() for t in (m._forward_hooks, m._forward_pre_hooks))
        return [*(len(t) for t in tables), *(len(t) for t in own), torch._C._len_torch_function_stack()]

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step + 1
        if step != 1 and step % self.every:
            self.look()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.look()

    def look(self) -> None:
        self.looked += 1
        assert self.seen() == self.before


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_training_is_the_same_to_the_bit(name: str, accumulation: int, tmp_path: Path) -> None:
    options = {"max_steps": 10, "gradient_accumulation_steps": accumulation}
    bare = train(MODELS[name](), tmp_path / "bare", **options)
    model = MODELS[name]()
    nothing_left = NothingLeft(model, every=3)
    watched = train(model, tmp_path / "watched", StreamMonitor(every=3), callbacks=[nothing_left], **options)
    assert bare.losses == watched.losses
    assert len(bare.losses) == 10
    pairs = zip(bare.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert nothing_left.looked >= 10
    assert [r["step"] for r in watched.records] == [1, 3, 6, 9]
    assert {r["passes"] for r in watched.records} == {accumulation}
    assert {r["source"] for r in watched.records} == {
        "connections" if name == "attention_residuals" else "calls"
    }
    assert all(None not in r["gradient_norm"] for r in watched.records)
    assert all(r["additivity"] in (0.0, None) for r in watched.records)


# ---- the figures, against hooks and autograd in fp64 ----


def reference(model: nn.Module, batch: dict[str, Tensor], scale: float = 1.0) -> dict[str, list[float]]:
    """Work out the record's figures at the ends of the blocks from module outputs, in fp64."""
    model = model.double()
    states: list[Tensor] = []
    writes: dict[tuple[int, str], Tensor] = {}
    handles = []
    mask = batch["attention_mask"].bool()

    def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not states:
            states.append(args[0] if args else kwargs["hidden_states"])
            states[0].retain_grad()
        states.append(output if isinstance(output, Tensor) else output[0])
        states[-1].retain_grad()

    def keep_write(key: tuple[int, str]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            writes[key] = output if isinstance(output, Tensor) else output[0]

        return hook

    for i, layer in enumerate(model.model.layers):
        handles.append(layer.register_forward_hook(keep, with_kwargs=True))
        handles.append(layer.self_attn.register_forward_hook(keep_write((i, "attn"))))
        handles.append(layer.mlp.register_forward_hook(keep_write((i, "mlp"))))
    loss = model(**batch).loss * scale
    loss.backward()
    for handle in handles:
        handle.remove()
    real = [state.detach()[mask] for state in states]
    middle = [(state + writes[i, "attn"]).detach()[mask] for i, state in enumerate(states[:-1])]
    found_by = {"attn": real, "mlp": middle}
    return {
        "rms": [float(r.pow(2).mean().sqrt()) for r in real],
        "largest": [float(r.flatten()[r.abs().argmax()]) for r in real],
        "gradient": [float(state.grad.norm()) for state in states],
        "write": [
            float(w.detach()[mask].norm() / found_by[kind][i].norm()) for (i, kind), w in writes.items()
        ],
    }


@pytest.mark.parametrize("padding", [0, 5])
def test_figures_equal_those_of_hooks_in_fp64(padding: int, tmp_path: Path) -> None:
    rows = windows(4, padding)
    start = {name: t.clone() for name, t in llama(0.0).state_dict().items()}
    run = train(llama(0.0), tmp_path, StreamMonitor(), rows=rows, max_steps=1)
    (record,) = run.records
    model = llama(0.0)
    expected = reference(model, {key: torch.stack([row[key] for row in rows]) for key in rows[0]})
    ends = [0, *range(2, 2 * BLOCKS + 1, 2)]  # the states between blocks
    assert [record["state_block"][i] for i in ends] == [-1, 0, 1, 2]
    assert record["tokens"] == 4 * (WINDOW - padding)
    assert [record["stream_rms"][i] for i in ends] == pytest.approx(expected["rms"], rel=1e-5)
    assert [record["stream_largest"][i] for i in ends] == pytest.approx(expected["largest"], rel=1e-5)
    assert [record["gradient_norm"][i] for i in ends] == pytest.approx(expected["gradient"], rel=1e-4)
    assert record["write_kind"] == ["attn", "mlp"] * BLOCKS
    assert record["write_ratio"] == pytest.approx(expected["write"], rel=1e-5)
    ratios = [abs(big) / rms for big, rms in zip(expected["largest"], expected["rms"], strict=True)]
    assert [record["outlier_ratio"][i] for i in ends] == pytest.approx(ratios, rel=1e-5)
    after = run.model.state_dict()
    for block in range(BLOCKS):
        names = [name for name in start if f"layers.{block}." in name]
        change = math.sqrt(sum(float((after[n].double() - start[n].double()).pow(2).sum()) for n in names))
        size = math.sqrt(sum(float(start[n].double().pow(2).sum()) for n in names))
        assert record["update_ratio"][block] == pytest.approx(change / size, rel=1e-5)


def close(one: list[Any], other: list[Any], rel: float = 1e-4) -> bool:
    """Whether records say the same of every step, up to rounding; how it was seen may differ."""
    figures = (
        "stream_rms",
        "stream_largest",
        "gradient_norm",
        "write_ratio",
        "update_ratio",
        "outlier_ratio",
    )
    same = ("step", "tokens", "state_block", "write_kind", "outlier_channel", "non_finite")
    for a, b in zip(one, other, strict=True):
        assert [a[key] for key in same] == [b[key] for key in same]
        for key in figures:
            assert a[key] == pytest.approx(b[key], rel=rel), key
    return bool(one)


@pytest.mark.parametrize("name", ["llama", "attention_residuals"])
def test_micro_batches_add_up_to_the_batch(name: str, tmp_path: Path) -> None:
    build = llama if name == "llama" else lambda dropout: tower(name, dropout)
    whole = train(build(0.0), tmp_path / "whole", StreamMonitor(every=2), per_device_train_batch_size=8)
    parts = train(
        build(0.0), tmp_path / "parts", StreamMonitor(every=2),
        per_device_train_batch_size=2, gradient_accumulation_steps=4,
    )  # fmt: skip
    assert {r["passes"] for r in parts.records} == {4}
    assert close(parts.records[:1], whole.records[:1])
    # Later steps start from parameters that rounding has moved apart.
    assert close(parts.records, whole.records, rel=1e-2)


@pytest.mark.parametrize("name", ["llama", "mhc", "attention_residuals"])
def test_a_checkpointed_pass_is_recorded_once(name: str, tmp_path: Path) -> None:
    plain = train(MODELS[name](), tmp_path / "plain", StreamMonitor(every=2))
    model = MODELS[name]()
    enable = "activation_checkpointing_enable"  # transformers 5.24
    getattr(model, enable, model.gradient_checkpointing_enable)({"use_reentrant": False})
    saving = train(model, tmp_path / "saving", StreamMonitor(every=2))
    assert saving.losses == plain.losses
    assert close(saving.records, plain.records, rel=1e-6)


class ScaledTrainer(Trainer):
    """Multiplies the loss by 1,024 before it goes backward, as training in fp16 does."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def test_gradients_are_unscaled(tmp_path: Path) -> None:
    plain = train(llama(), tmp_path / "plain", StreamMonitor(every=2), max_grad_norm=0)
    scaled = train(
        llama(), tmp_path / "scaled", StreamMonitor(every=2), max_grad_norm=0, trainer_class=ScaledTrainer
    )
    assert scaled.trainer.accelerator.scaler.get_scale() == 1024.0
    assert close(scaled.records, plain.records, rel=1e-4)
    assert not any(r["skipped"] for r in scaled.records)


def test_evaluation_is_not_recorded(tmp_path: Path) -> None:
    # Without dropout: an evaluation draws random numbers too.
    plain = train(llama(0.0), tmp_path / "plain", StreamMonitor(every=1))
    evaluating = train(
        llama(0.0), tmp_path / "evaluating", StreamMonitor(every=1), eval_strategy="steps", eval_steps=1
    )
    assert any("eval_loss" in entry for entry in evaluating.trainer.state.log_history)
    assert evaluating.records == plain.records


def test_an_outlier_is_placed(tmp_path: Path) -> None:
    model = llama(0.0)
    rows = windows(4)
    token = int(rows[2]["input_ids"][7])
    for row in rows:  # that token nowhere else
        row["input_ids"][row["input_ids"] == token] = (token + 1) % VOCAB
    rows[2]["input_ids"][7] = token
    with torch.no_grad():
        model.model.embed_tokens.weight[token, 13] = -500.0
    (record,) = train(model, tmp_path, StreamMonitor(), rows=rows, max_steps=1).records
    assert record["stream_largest"][0] == -500.0
    assert (record["outlier_position"][0], record["outlier_channel"][0]) == (7, 13)
    assert record["outlier_ratio"][0] > 10


# ---- compiled ----


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["llama", "mhc", "attention_residuals"])
def test_compiled_blocks_are_seen_from_outside(name: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch._dynamo.reset()
        model = MODELS[name]()
        if name != "llama":
            compile_blocks(model.tower, backend="aot_eager")
            return model
        for block in model.model.layers:
            block.compile(backend="aot_eager")
        return model

    bare = train(build(), tmp_path / "bare")
    run = train(build(), tmp_path / "compiled", StreamMonitor(every=2))
    assert bare.losses == run.losses
    assert all(
        torch.equal(a, b) for a, b in zip(bare.model.parameters(), run.model.parameters(), strict=True)
    )
    eager = train(MODELS[name](), tmp_path / "eager", StreamMonitor(every=2))
    assert {r["source"] for r in run.records} == {"blocks"}
    for a, b in zip(run.records, eager.records, strict=True):
        ends = [0, *range(2, 2 * BLOCKS + 1, 2)]
        assert a["state_block"] == [-1, 0, 1, 2]
        assert a["stream_rms"] == pytest.approx([b["stream_rms"][i] for i in ends], rel=1e-2)
        if name != "attention_residuals":  # of two sublayers' writes together there
            assert a["gradient_norm"] == pytest.approx([b["gradient_norm"][i] for i in ends], rel=1e-2)
        assert None not in a["gradient_norm"]
        assert a["update_ratio"] == pytest.approx(b["update_ratio"], rel=1e-2)


def test_a_model_compiled_as_a_whole_says_so(tmp_path: Path) -> None:
    model = llama()
    model.compile(backend="eager")
    with pytest.warns(UserWarning, match="records updates only: the whole model is compiled"):
        run = train(model, tmp_path, StreamMonitor(every=2), max_steps=2)
    assert [r["stream_rms"] for r in run.records] == [[], []]
    assert all(ratio > 0 for r in run.records for ratio in r["update_ratio"])


# ---- what is not as usual ----


def test_a_model_without_a_stream_says_so(tmp_path: Path) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(VOCAB, VOCAB) for _ in range(2))

        def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
            counts = nn.functional.one_hot(input_ids, VOCAB).float().mean(1)
            return {"loss": (self.layers[0](counts) + self.layers[1](counts)).pow(2).mean()}

    with pytest.warns(UserWarning, match="Bag has no stream"):
        run = train(Bag(), tmp_path, StreamMonitor(every=2), max_steps=2)
    assert {r["source"] for r in run.records} == {"none"}
    assert all(ratio > 0 for r in run.records for ratio in r["update_ratio"])


def test_what_is_frozen_has_no_gradient_and_no_update(tmp_path: Path) -> None:
    model = llama()
    for module in (model.model.embed_tokens, model.model.layers[0]):
        module.requires_grad_(False)
    (record,) = train(model, tmp_path, StreamMonitor(), max_steps=1).records
    assert record["gradient_norm"][:3] == [None] * 3
    assert None not in record["gradient_norm"][3:]
    assert record["update_ratio"][0] is None
    assert all(ratio > 0 for ratio in record["update_ratio"][1:])


def test_a_pass_off_the_map_goes_on(tmp_path: Path) -> None:
    """A model that skips its last block now and then (LayerDrop) is trained, with what was seen so far."""
    model = llama()
    inner = model.model.layers[2]

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = inner, 0
            self.attention_type = getattr(inner, "attention_type", "full_attention")

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.calls += 1
            return x * 1.0 if self.calls == 2 else self.inner(x, *args, **kwargs)

    model.model.layers[2] = Sometimes()
    run = train(model, tmp_path, StreamMonitor(every=1), max_steps=2)
    assert len(run.losses) == 2
    assert len(run.records[0]["stream_rms"]) == 1 + 2 * 2
    assert len(run.records[1]["stream_rms"]) == 1 + 2 * 3


class Spoil(nn.Module):
    def __init__(self, inner: nn.Module, backward: bool):
        super().__init__()
        self.inner, self.backward = inner, backward

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        if self.backward:
            if out.requires_grad:
                out.register_hook(lambda gradient: gradient * torch.inf)
            return out
        return out * 1e38 * 1e38


@pytest.mark.parametrize("backward", [False, True])
def test_the_first_non_finite_site_is_named(backward: bool, tmp_path: Path) -> None:
    model = llama()
    model.model.layers[1].mlp = Spoil(model.model.layers[1].mlp, backward)
    run = train(model, tmp_path, StreamMonitor(), max_steps=1, logging_nan_inf_filter=False)
    (record,) = run.records
    logged = [entry for entry in run.trainer.state.log_history if "stream/non_finite" in entry]
    assert logged[0]["stream/non_finite"] == 1.0
    if backward:
        # The gradient of the mlp's update is spoilt, so that of the state that it reads is the first.
        assert record["non_finite_block"] == 1
        assert "backward" in record["non_finite"]
        assert "the stream after the attn" in record["non_finite"]
    else:
        assert record["non_finite_block"] == 1
        assert "model.layers.1.mlp: the update of the mlp" in record["non_finite"]
        assert record["stream_rms"][3] is not None
        assert record["stream_rms"][4] is None


# ---- the logger and the file ----


def test_a_few_figures_are_logged_beside_the_loss(tmp_path: Path) -> None:
    run = train(llama(), tmp_path / "summary", StreamMonitor(every=2))
    assert len(run.losses) == 4
    logged = [entry for entry in run.trainer.state.log_history if "stream/rms/last" in entry]
    assert [entry["step"] for entry in logged] == [1, 2, 4]
    assert logged[-1]["stream/rms/last"] == run.records[-1]["stream_rms"][-1]
    assert sum(name.startswith("stream/") for name in logged[0]) == 9
    run = train(llama(), tmp_path / "profile", StreamMonitor(every=2, logs="profile"))
    entry = [e for e in run.trainer.state.log_history if "stream/rms/last" in e][-1]
    record = run.records[-1]
    assert entry["stream/rms/block_1"] == record["stream_rms"][4]
    assert entry["stream/gradient/embedding"] == record["gradient_norm"][0]
    assert entry["stream/write_ratio/block_2_mlp"] == record["write_ratio"][5]
    assert entry["stream/update_ratio/block_0"] == record["update_ratio"][0]
    run = train(llama(), tmp_path / "none", StreamMonitor(every=2, logs="none"))
    assert not any("stream/rms/last" in entry for entry in run.trainer.state.log_history)
    assert len(run.records) == 3


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_resumed_run_has_the_records_of_one_straight_run(suffix: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    straight, broken = tmp_path / f"straight.{suffix}", tmp_path / f"broken.{suffix}"
    train(llama(), tmp_path / "straight", StreamMonitor(straight, every=1), **options)
    assert [r["step"] for r in read_monitor(straight)] == [1, 2, 3, 4, 5, 6]
    train(llama(), tmp_path / "broken", StreamMonitor(broken, every=1), **options)
    if suffix == "jsonl":  # killed while it wrote
        broken.write_bytes(broken.read_bytes()[:-40])
        assert [r["step"] for r in read_monitor(broken)] == [1, 2, 3, 4, 5]
    checkpoint = str(tmp_path / "broken" / "checkpoint-2")
    train(llama(), tmp_path / "broken", StreamMonitor(broken, every=1), resume=checkpoint, **options)
    assert read_monitor(broken) == read_monitor(straight)
    assert [path for path in tmp_path.iterdir() if "tmp" in path.name] == []
    train(llama(), tmp_path / "new", StreamMonitor(broken, every=2), max_steps=2)
    assert [r["step"] for r in read_monitor(broken)] == [1, 2]  # a new run begins the file anew


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    for suffix in ("jsonl", "parquet"):
        train(llama(), tmp_path / suffix, StreamMonitor(tmp_path / f"stream.{suffix}", every=2))
    assert read_monitor(tmp_path / "stream.jsonl") == read_monitor(tmp_path / "stream.parquet")


def test_every_column_is_described_and_typed(tmp_path: Path) -> None:
    from mainstem.training._monitor_file import COLUMNS

    (record,) = train(llama(), tmp_path, StreamMonitor(), max_steps=1).records
    assert list(record) == list(COLUMNS)
    assert StreamMonitor.__doc__ is not None
    assert [name for name in record if name not in StreamMonitor.__doc__] == []


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"every=0 must be at least 1"):
        StreamMonitor(every=0)
    with pytest.raises(ConfigError, match=r"must end in \.jsonl or \.parquet"):
        StreamMonitor(tmp_path / "stream.csv")
    with pytest.raises(ConfigError, match="logs='all' is not known"):
        StreamMonitor(logs="all")  # pyright: ignore
    with pytest.raises(SourceError, match="is no file"):
        read_monitor(tmp_path / "lost.jsonl")
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"loss": 1.0}) + "\n")
    with pytest.raises(SourceError, match="schema None"):
        read_monitor(other)
    other.write_text("step,loss\n")
    with pytest.raises(SourceError, match="not a file of JSON lines"):
        read_monitor(other)
    other = tmp_path / "other.parquet"
    other.write_text("no")
    with pytest.raises(SourceError, match="not a Parquet file"):
        read_monitor(other)


def test_two_monitors_of_one_training_see_the_same(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    run = train(llama(0.0), tmp_path, callbacks=[StreamMonitor(every=2), StreamMonitor(other, every=2)])
    assert [r["step"] for r in run.records] == [1, 2, 4]
    assert {r["tokens"] for r in run.records} == {64}
    assert close(read_monitor(other), run.records, rel=0)


# ---- two processes ----

SCRIPT = """
    import sys
    from pathlib import Path
    sys.path.insert(0, {folder!r})
    import torch
    torch.set_num_threads(1)
    from test_stream_monitor import StreamMonitor, llama, train
    from mainstem.tower import process_group_left
    with process_group_left():
        train(llama(0.0), Path(sys.argv[1]), StreamMonitor(every=2), per_device_train_batch_size=4)
"""


@pytest.mark.slow
def test_two_processes_record_what_one_does(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(textwrap.dedent(SCRIPT.format(folder=str(Path(__file__).parent))))
    done = subprocess.run(
        [*TORCHRUN, str(script), str(tmp_path / "two")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    two = read_monitor(tmp_path / "two" / "stream.jsonl")
    one = train(llama(0.0), tmp_path / "one", StreamMonitor(every=2), per_device_train_batch_size=8).records
    assert {(r["ranks"], r["passes"]) for r in two} == {(2, 2)}
    assert close(two[:1], one[:1])
    assert close(two, one, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "attention_residuals"])
def test_a_sharded_model_is_recorded_as_one(name: str, tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("sharded_loop.py"))
    for command, folder in (([sys.executable], "one"), (TORCHRUN, "two")):
        done = subprocess.run(
            [*command, script, str(tmp_path / folder), name], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (read_monitor(tmp_path / folder / "stream.jsonl") for folder in ("one", "two"))
    assert {(r["ranks"], r["passes"]) for r in two} == {(2, 2)}
    assert close(two, one, rel=1e-3)
