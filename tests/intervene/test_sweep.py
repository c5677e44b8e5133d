"""Sweeps: restarted against full passes to the bit, and both against figures worked out by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from bare import bare, by_hand, ids
from handmade import VOCAB
from torch import Tensor, nn
from torch.nn import functional

from mainstem.errors import ConfigError
from mainstem.intervene import (
    Noise,
    Scale,
    Skip,
    SweepConfig,
    SweepResult,
    Zero,
    plan_sweep,
    removal_loss,
    sweep,
)
from mainstem.observe import find_stream


@functools.cache
def llama() -> nn.Module:
    torch.manual_seed(4)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCAB, num_hidden_layers=4, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def padded() -> list[dict[str, Tensor]]:
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return [
        {"input_ids": ids(seed=8), "attention_mask": mask},
        {"input_ids": ids(rows=2, seed=9), "attention_mask": torch.ones(2, 9, dtype=torch.long)},
    ]


def both(config: dict[str, Any]) -> tuple[SweepResult, SweepResult]:
    model, batches = llama(), padded()
    found = find_stream(model, batches[0])
    one = sweep(model, batches, found, SweepConfig(**config))
    other = sweep(model, batches, found, SweepConfig(**config, restart=False))
    assert one.restarted
    assert not other.restarted
    return one, other


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"broken": lambda b: Noise(blocks=[b], part="mlp", size=0.7, seed=2)},
        {"broken": lambda b: Scale(blocks=[b], factor=-1.0, rows=range(1, 2))},
        {"broken": lambda b: Skip(blocks=[b], positions=[4]), "future_only": True},
    ],
    ids=["skip", "noise on mlp", "one row against", "one position, the future"],
)
def test_restarted_equals_full_passes_to_the_bit(config: dict[str, Any]) -> None:
    one, other = both(config)
    assert one.to_dict()["floors"] == other.to_dict()["floors"]
    assert all(f.states[-1].change.all > 1e-4 for f in one.floors[:-1])
    assert [len(f.states) for f in one.floors] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("broken", "num_states"),
    [
        (lambda b: Noise(blocks=[b - 1], size=0.5), [4, 3, 2]),
        (lambda b: Skip(blocks=[b - 1, b]), [4, 3, 2]),
        (lambda b: Skip(blocks=[0, b]), [4, 4, 4]),
        (lambda b: Scale(blocks=[b, 0], factor=2.0), [4, 4, 4]),
    ],
    ids=["the block below", "a run of two", "block 0 and another", "two, the higher first"],
)
def test_a_break_acts_where_its_own_blocks_say(broken: Any, num_states: list[int]) -> None:
    one, other = both({"broken": broken, "floors": [1, 2, 3]})
    assert one.to_dict()["floors"] == other.to_dict()["floors"]
    assert [len(f.states) for f in one.floors] == num_states
    shared, _ = both({"broken": broken, "floors": [1, 2, 3], "together": 2})
    for a, b in zip(one.floors, shared.floors, strict=True):
        assert a.kl.all == pytest.approx(b.kl.all, rel=1e-4)


@torch.no_grad()
def test_loss_of_the_shorter_model() -> None:
    model, x = bare(), ids()
    found = find_stream(model, {"input_ids": x})
    sets = [(1, 2), (0, 3), (3, 2), (0, 1, 2, 3)]
    told: list[tuple[int, int]] = []
    removals = removal_loss(model, [{"input_ids": x}], found, sets, lambda *step: told.append(step))
    assert [r.blocks for r in removals] == [(1, 2), (0, 3), (2, 3), (0, 1, 2, 3)]
    assert told == [(i + 1, 5) for i in range(5)]
    targets = x[:, 1:].flatten()
    whole = model(x)
    loss = functional.cross_entropy(whole[:, :-1].flatten(0, 1), targets)
    for removal in removals:
        shorter = bare()
        shorter.blocks = nn.ModuleList(b for i, b in enumerate(shorter.blocks) if i not in removal.blocks)
        logits = shorter(x)
        nll = functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        assert removal.nll == pytest.approx(float(nll), rel=1e-10)
        assert removal.nll_delta == pytest.approx(float(nll - loss), rel=1e-9)
        kl = functional.kl_div(logits.log_softmax(-1), whole.softmax(-1), reduction="none").sum(-1)
        assert removal.kl.all == pytest.approx(float(kl.mean()), rel=1e-9)
        assert removal.top1.all == pytest.approx(
            float((logits.argmax(-1) == whole.argmax(-1)).double().mean())
        )
    with pytest.raises(ConfigError, match="block 4 is not one"):
        removal_loss(model, [{"input_ids": x}], found, [(3, 4)])
    with pytest.raises(ConfigError, match="no blocks to remove"):
        removal_loss(model, [{"input_ids": x}], found, [])


def test_breaks_that_share_a_pass() -> None:
    model, batches = llama(), padded()
    found = find_stream(model, batches[0])
    for broken in (lambda b: Skip(blocks=[b]), lambda b: Noise(blocks=[b], size=0.4)):
        alone = sweep(model, batches, found, SweepConfig(broken=broken))
        shared = sweep(model, batches, found, SweepConfig(broken=broken, together=3))
        assert (alone.num_passes, shared.num_passes) == (10, 6)
        for a, b in zip(alone.floors, shared.floors, strict=True):
            assert a.nll_delta == pytest.approx(b.nll_delta, rel=1e-4, abs=1e-6)
            assert a.kl.rest == pytest.approx(b.kl.rest, rel=1e-4, abs=1e-6)
            for s, t in zip(a.states, b.states, strict=True):
                assert s.change.all == pytest.approx(t.change.all, rel=1e-5)


@torch.no_grad()
def test_figures_by_hand() -> None:
    model, x = bare(), ids()
    found = find_stream(model, {"input_ids": x})
    result = sweep(model, [{"input_ids": x}], found)
    clean, states = by_hand(model, x)
    log_p = clean.log_softmax(-1)
    loss = functional.cross_entropy(clean[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    for floor in result.floors:

        def skip(block: int, part: str, before: Tensor, value: Tensor, at: int = floor.floor) -> Tensor:
            return torch.zeros_like(value) if (block, part) == (at, "block") else value

        logits, broken = by_hand(model, x, skip)
        log_q = logits.log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        assert floor.kl.first == pytest.approx(float(kl[:, 0].mean()), rel=1e-9)
        assert floor.kl.rest == pytest.approx(float(kl[:, 1:].mean()), rel=1e-9)
        nll = functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        assert floor.nll_delta == pytest.approx(float(nll - loss), rel=1e-9)
        assert floor.nll == pytest.approx(float(nll), rel=1e-9)
        assert floor.num_tokens == 3 * 8
        agrees = (logits.argmax(-1) == clean.argmax(-1)).double().mean()
        assert floor.top1.all == pytest.approx(float(agrees), rel=1e-12)
        assert [s.state for s in floor.states] == list(range(floor.floor + 1, 5))
        for s in floor.states:
            h, g = states[s.state], broken[s.state]
            change = ((g - h).norm(dim=-1) / h.norm(dim=-1)).mean()
            assert s.change.all == pytest.approx(float(change), rel=1e-9)
            cosine = functional.cosine_similarity(g, h, dim=-1).mean()
            assert s.cosine.all == pytest.approx(float(cosine), rel=1e-9)


@torch.no_grad()
def test_only_the_future_is_measured() -> None:
    model, x = bare(), ids()
    found = find_stream(model, {"input_ids": x})
    config = SweepConfig(broken=lambda b: Zero(blocks=[b], positions=[2, 4]), floors=[1], future_only=True)
    (floor,) = sweep(model, [{"input_ids": x}], found, config).floors
    clean, states = by_hand(model, x)

    def change(block: int, part: str, before: Tensor, value: Tensor) -> Tensor:
        if (block, part) != (1, "block"):
            return value
        value = value.clone()
        value[:, [2, 4]] = 0
        return value

    logits, broken = by_hand(model, x, change)
    kl = functional.kl_div(logits.log_softmax(-1), clean.softmax(-1), reduction="none").sum(-1)[:, 5:].mean()
    assert floor.kl.all == pytest.approx(float(kl), rel=1e-9)
    assert floor.num_tokens == 3 * 3
    at_once, later = floor.states[0], floor.states[1]
    assert at_once.change.all == pytest.approx(
        0.0, abs=1e-12
    )  # the block that is broken looks at its own input
    expected = ((broken[3] - states[3]).norm(dim=-1) / states[3].norm(dim=-1))[:, 5:].mean()
    assert later.change.all == pytest.approx(float(expected), rel=1e-9)
    with pytest.raises(ConfigError, match="named positions"):
        sweep(model, [{"input_ids": x}], found, SweepConfig(future_only=True))


def test_the_plan_is_what_happens() -> None:
    model, batches = llama(), padded()
    found = find_stream(model, batches[0])
    plan = plan_sweep(model, batches, found)
    told: list[tuple[int, int]] = []
    calls = {"blocks": 0}

    def count(*_: Any) -> None:
        calls["blocks"] += 1

    inner: Any = model
    hooks = [layer.self_attn.register_forward_hook(count) for layer in inner.model.layers]
    find_calls = 4  # of the doors
    result = sweep(model, batches, found, progress=lambda done, total: told.append((done, total)))
    for hook in hooks:
        hook.remove()
    assert plan.num_passes == result.num_passes == 10
    assert told == [(i + 1, 10) for i in range(10)]
    assert plan.block_runs == calls["blocks"] - find_calls == 2 * (4 + 3 + 2 + 1)
    assert plan.naive_block_runs == 2 * 4 * 5
    assert plan.state_bytes == 5 * 3 * 9 * 32 * 4
    assert plan.top_bytes == 3 * 9 * VOCAB * 4
    assert plan.seconds > 0
    assert "10 passes from the broken block: 20 block runs of 40" in plan.describe()


def test_a_cancel_keeps_what_is_done() -> None:
    model, batches = llama(), padded()[:1]
    found = find_stream(model, batches[0])

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    result = sweep(model, batches, found, progress=stop)
    whole = sweep(model, batches, found)
    assert not result.finished
    assert whole.finished
    assert [f.floor for f in result.floors] == [0, 1]
    assert result.floors == whole.floors[:2]
    assert all("forward" not in vars(m) for m in model.modules())


def test_a_pass_that_is_broken_off_counts_nothing() -> None:
    model, batches = llama(), padded()
    found, calls = find_stream(model, batches[0]), [0]
    inner: Any = model

    def stop(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 8:  # doors, whole, skips of 0-2 (not 3), whole, of 0, and amid that of 1
            raise KeyboardInterrupt

    hook = inner.model.layers[3].self_attn.register_forward_pre_hook(stop)
    result = sweep(model, batches, found)
    hook.remove()
    assert not result.finished
    both, first = sweep(model, batches, found).floors, sweep(model, batches[:1], found).floors
    assert [f.floor for f in result.floors] == [0, 1, 2, 3]
    tokens = [f.num_tokens for f in result.floors]
    assert result.floors == tuple(
        (both if n == both[0].num_tokens else first)[i] for i, n in enumerate(tokens)
    )
    assert len(set(tokens)) == 2


class _Chatty(nn.Module):
    """A block that returns a second tensor, as one that hands on its attention weights does."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), x.mean()


class _ChattyStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        model = bare()
        self.embedding, self.norm, self.head = model.embedding, model.norm, model.head
        self.blocks = nn.ModuleList(_Chatty(b) for b in model.blocks)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.norm(x))


def test_where_blocks_cannot_be_passed_over_passes_run_in_full() -> None:
    x = ids()
    chatty, plain = _ChattyStack().eval(), bare()
    inputs = [{"input_ids": x}]
    result = sweep(chatty, inputs, find_stream(chatty, inputs[0]))
    assert not result.restarted
    assert "returns more tensors" in result.why_not
    assert result.floors == sweep(plain, inputs, find_stream(plain, inputs[0])).floors


def test_a_model_in_training_mode_is_refused() -> None:
    model, x = bare(), ids()
    found = find_stream(model, {"input_ids": x})
    with pytest.raises(ConfigError, match=r"call model.eval\(\)"):
        sweep(model.train(), [{"input_ids": x}], found)
    with pytest.raises(ConfigError, match="block 7 is not one"):
        sweep(model.eval(), [{"input_ids": x}], found, SweepConfig(floors=[7]))
