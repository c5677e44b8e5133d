"""Public reports about hooks: that never fired, fired twice, or were left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from handmade import PreBlock, Stack
from seen import see
from small_models import tokens
from torch import nn
from torch.nn.modules import module as torch_module

from mainstem.measure import Batch, BlockEvent, BlockInfluence, Reducer, StreamNorms
from mainstem.observe import find_stream, ledger, record


class Counter(Reducer):
    """Which blocks and sublayers were handed over, in order; does what it is told at each."""

    name = "counter"

    def __init__(self, then: Callable[[BlockEvent], None] = lambda _: None):
        self.blocks: list[int] = []
        self.sublayers: list[int] = []
        self.passes = 0
        self._then = then

    def update(self, event: BlockEvent) -> None:
        self.blocks.append(event.block)
        self.sublayers += [sublayer.index for sublayer in event.sublayers]
        self._then(event)

    def end_pass(self, batch: Batch) -> None:
        self.passes += 1

    def merge(self, other: Any) -> None:
        raise NotImplementedError

    def result(self) -> list[int]:
        return self.blocks


# pytorch#117758: hooks on a compiled model ----------------------------------------------------------------


def whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def in_place(model: nn.Module) -> Any:
    model.compile(backend="eager")
    return model


def by_block(model: nn.Module) -> Any:
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def forward_only(model: nn.Module) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.parametrize("compiled", [whole, in_place, by_block, forward_only])
def test_a_model_that_was_compiled_and_run_is_seen_whole(compiled: Callable[[nn.Module], Any]) -> None:
    """pytorch#117758, #117265, #115750, #173452: hooks registered after a compiled model's first run never
    fire, and statistics stay empty or stale. Here they are those of the model as it was, and of each pass."""
    torch.manual_seed(0)
    plain = Stack(*(PreBlock() for _ in range(2))).eval()
    inputs = tokens()
    expected = figures(plain, inputs)
    model = compiled(plain)
    with torch.no_grad():
        output = model(**inputs).clone()  # compiled before anybody looks
    assert figures(model, inputs) == expected
    with torch.no_grad():
        plain.blocks[0].feed_forward[2].weight.mul_(3.0)
    assert figures(model, inputs) != expected
    with torch.no_grad():
        assert not torch.equal(model(**inputs), output)


def figures(model: nn.Module, inputs: dict[str, Any]) -> list[float]:
    reducers = [StreamNorms(), BlockInfluence()]
    counter = Counter()
    with torch.no_grad():
        record(model, inputs, find_stream(model, inputs), [*reducers, counter])
    assert counter.sublayers == [0, 1, 2, 3]
    return [s.mean.all for s in reducers[0].result().states] + [
        b.influence.all for b in reducers[1].result().blocks
    ]


# pytorch#81296: gradient checkpointing --------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_checkpointed_step_is_recorded_once(name: str, use_reentrant: bool) -> None:
    """pytorch#81296: checkpointing runs a block's forward again in the backward pass, and hooks in it fire
    twice. Here each sublayer is handed over once a step."""
    case = see(name).case
    model, inputs = case.build().train(), case.inputs() | {"use_cache": False}
    if name == "bert":
        del inputs["use_cache"]
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model.get_input_embeddings().weight.requires_grad_(True)
    counter, runs = Counter(), []
    stream_map = find_stream(model, inputs)
    inside = next(
        m for path, m in model.named_modules() if path.endswith((".self_attn", ".attn", ".attention"))
    )
    inside.register_forward_pre_hook(lambda *_: runs.append(1))
    record(model, inputs, stream_map, [counter]).output.logits.square().mean().backward()
    assert len(runs) == 2  # the model did run twice
    assert counter.sublayers == list(range(8))
    assert counter.passes == 1


# TransformerLens#156, #1323, #1636, SAELens#278: hooks left behind ----------------------------------------


def tables(model: nn.Module) -> list[Any]:
    """Every hook there is: the modules' own, and PyTorch's for all modules; by identity."""
    names = [n for n in vars(nn.Module()) if n.endswith("_hooks")]
    own = [(path, n, dict(getattr(m, n))) for path, m in model.named_modules() for n in names]
    shared = {n: getattr(torch_module, n) for n in dir(torch_module) if n.startswith("_global_")}
    return own + [(n, dict(table)) for n, table in shared.items() if isinstance(table, dict)]


def fail(_: Any) -> None:
    raise ZeroDivisionError("somebody's mistake")


@pytest.mark.parametrize("where", ["reducer", "forward hook", "pre-hook", "module"])
@pytest.mark.parametrize("call", ["find", "record", "ledger"])
def test_nothing_is_left_behind_by_a_failure(call: str, where: str) -> None:
    """TransformerLens#156, #1323, #1636, SAELens#278: hooks stayed after an exception, the user's own were
    taken away, backward hooks leaked."""
    torch.manual_seed(0)
    model, inputs = Stack(*(PreBlock() for _ in range(2))).eval(), tokens()
    model.blocks[0].register_forward_hook(lambda *_: None)
    model.blocks[0].first.register_full_backward_hook(lambda *_: None)
    stream_map = find_stream(model, inputs)
    with torch.no_grad():
        output = model(**inputs)
    handle: Any = None
    if where == "forward hook":
        handle = model.blocks[1].register_forward_hook(lambda *_: fail(None))
    elif where == "pre-hook":
        handle = model.blocks[1].register_forward_pre_hook(lambda *_: fail(None))
    elif where == "module":
        model.blocks[1].second.forward = fail
    reducers = [Counter(fail)] if where == "reducer" else []
    before = tables(model)
    calls: dict[str, Callable[[], Any]] = {
        "find": lambda: find_stream(model, inputs),
        "record": lambda: record(model, inputs, stream_map, reducers),
        "ledger": lambda: ledger(model, inputs, stream_map),
    }
    if where == "reducer" and call != "record":
        calls[call]()  # no reducer takes part
    else:
        with pytest.raises(ZeroDivisionError, match="somebody's mistake"):
            calls[call]()
    assert tables(model) == before
    assert torch.overrides._len_torch_function_stack() == 0
    if handle is not None:
        handle.remove()
    model.blocks[1].second.__dict__.pop("forward", None)
    with torch.no_grad():
        assert torch.equal(model(**inputs), output)


def test_a_recording_in_a_recording_leaves_both_whole() -> None:
    """The same reports, for two contexts: one pass recorded from within another's reducer."""
    torch.manual_seed(0)
    model, inputs = Stack(*(PreBlock() for _ in range(2))).eval(), tokens()
    stream_map = find_stream(model, inputs)
    inner = [Counter(), Counter()]
    outer = Counter(lambda event: void(record(model, inputs, stream_map, [inner[event.block]])))
    before = tables(model)
    with torch.no_grad():
        books = record(model, inputs, stream_map, [outer]).books
    assert tables(model) == before
    assert [c.sublayers for c in (outer, *inner)] == [[0, 1, 2, 3]] * 3
    assert books.continuity == 0.0


def void(_: Any) -> None:
    return None
