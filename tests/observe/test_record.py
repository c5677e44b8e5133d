"""Recording changes nothing, leaves nothing behind, and notices what is done behind its back."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from handmade import PreBlock, Stack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from seen import see, tensors
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from zoo import CASES

from mainstem.errors import ConfigError, StreamNotFoundError
from mainstem.measure.events import Batch, BlockEvent, Reducer
from mainstem.observe import Books, find_stream, record
from mainstem.observe.keep import KeepStream

# Anything made behind the books' back is far above fp32 rounding.
CAUGHT = 1e-3
BOOKS = 1e-6


def llama() -> tuple[nn.Module, dict[str, Any]]:
    case = CASES["llama"]
    return case.build(), case.inputs()


class Nothing(Reducer):
    """Takes events and keeps none."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.batches: list[Batch] = []

    def update(self, event: BlockEvent) -> None:
        self.blocks.append(event.block)

    def end_pass(self, batch: Batch) -> None:
        self.batches.append(batch)

    def merge(self, other: Any) -> None:
        raise NotImplementedError

    def result(self) -> Any:
        return self.blocks


class Failing(Nothing):
    """Raises at the second block."""

    def update(self, event: BlockEvent) -> None:
        if event.block == 1:
            raise RuntimeError("a reducer broke")


def hook_tables(model: nn.Module) -> list[Any]:
    """Copy every table of hooks there is: the model's, and PyTorch's own for all modules."""
    own = [
        (path, name, dict(getattr(m, name) or {}))
        for path, m in model.named_modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    ]
    tables = {name: getattr(torch_module, name) for name in dir(torch_module) if name.startswith("_global_")}
    shared = [("", name, dict(table)) for name, table in tables.items() if isinstance(table, dict)]
    assert {"_global_forward_hooks", "_global_forward_pre_hooks"} <= {name for _, name, _ in shared}
    return own + shared


# what is left behind --------------------------------------------------------------------------------------


def test_events_come_in_order_and_the_pass_ends_once() -> None:
    model, inputs = llama()
    reducer = Nothing()
    record(model, inputs, find_stream(model, inputs), [reducer])
    assert reducer.blocks == [0, 1, 2, 3]
    assert len(reducer.batches) == 1


def test_hook_tables_are_as_before() -> None:
    model, inputs = llama()
    model.model.layers[1].register_forward_hook(lambda *_: None)
    before = hook_tables(model)
    stream_map = find_stream(model, inputs)
    assert hook_tables(model) == before
    record(model, inputs, stream_map, [KeepStream()])
    assert hook_tables(model) == before


def test_hook_tables_are_as_before_after_a_broken_reducer() -> None:
    model, inputs = llama()
    stream_map = find_stream(model, inputs)
    with torch.no_grad():
        output = model(**inputs).logits
    before = hook_tables(model)
    with pytest.raises(RuntimeError, match="a reducer broke"):
        record(model, inputs, stream_map, [Failing()])
    assert hook_tables(model) == before
    assert torch.overrides._len_torch_function_stack() == 0
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, output)
    assert record(model, inputs, stream_map).books.additivity <= BOOKS


@pytest.mark.parametrize("when", ["tracing", "recording"])
def test_hook_tables_are_as_before_after_a_broken_model(when: str) -> None:
    model, inputs = llama()
    stream_map = find_stream(model, inputs)

    def broken(*_: Any) -> None:
        raise RuntimeError("a block broke")

    model.model.layers[2].register_forward_pre_hook(broken)
    before = hook_tables(model)
    with pytest.raises(RuntimeError, match="a block broke"):
        find_stream(model, inputs) if when == "tracing" else record(model, inputs, stream_map)
    assert hook_tables(model) == before
    assert torch.overrides._len_torch_function_stack() == 0


def test_hooks_of_the_user_fire_and_stay() -> None:
    model, inputs = llama()
    stream_map = find_stream(model, inputs)
    fired: list[str] = []
    block = model.model.layers[1]
    block.register_forward_hook(lambda *_: fired.append("after"))
    block.register_forward_pre_hook(lambda *_: fired.append("before"))
    books = record(model, inputs, stream_map).books
    assert fired == ["before", "after"]
    assert books.continuity == 0.0
    model(**inputs)
    assert fired == ["before", "after"] * 2


def test_weights_and_random_state_are_untouched() -> None:
    model, inputs = llama()
    weights = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    record(model, inputs, find_stream(model, inputs), [KeepStream()])
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])


# what is done behind the books' back ----------------------------------------------------------------------


def add_noise(_module: Any, _args: Any, output: Tensor) -> Tensor:
    return output + 0.01 * torch.ones_like(output)


def add_in_place(_module: Any, _args: Any, output: Tensor) -> None:
    output.add_(0.01)


def replace(_module: Any, _args: Any, output: Tensor) -> Tensor:
    return torch.zeros_like(output)


def perturb_input(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0] + 0.01, *args[1:])


def is_caught(books: Callable[[], Books]) -> bool:
    """Whether a change shows as a continuity error or, as good, as another path."""
    try:
        return books().continuity > CAUGHT
    except StreamNotFoundError:
        return True


@pytest.mark.parametrize("tamper", [add_noise, add_in_place, replace])
@pytest.mark.parametrize("block", [0, 2])
def test_a_hook_that_changes_the_stream_is_caught(tamper: Callable[..., Any], block: int) -> None:
    model, inputs = llama()
    stream_map = find_stream(model, inputs)
    handle = model.model.layers[block].register_forward_hook(tamper)
    books = record(model, inputs, stream_map).books
    assert books.continuity > CAUGHT
    assert books.continuity_site == 2 * (block + 1)
    handle.remove()
    assert record(model, inputs, stream_map).books.continuity == 0.0


def test_a_pre_hook_that_changes_the_stream_is_caught() -> None:
    model, inputs = llama()
    stream_map = find_stream(model, inputs)
    model.model.layers[1].register_forward_pre_hook(perturb_input)
    assert is_caught(lambda: record(model, inputs, stream_map).books)


@pytest.mark.parametrize("where", ["after", "before"])
def test_a_change_at_the_last_block_is_caught(where: str) -> None:
    model, inputs = llama()
    stream_map = find_stream(model, inputs)
    last = model.model.layers[3]
    last.register_forward_hook(add_noise) if where == "after" else last.register_forward_pre_hook(
        perturb_input
    )
    assert is_caught(lambda: record(model, inputs, stream_map).books)


def test_a_block_that_is_skipped_is_another_path() -> None:
    model, inputs = llama()
    stream_map = find_stream(model, inputs)
    model.model.layers[2].forward = lambda hidden_states, *_, **__: hidden_states
    with pytest.raises(StreamNotFoundError, match="another path"):
        record(model, inputs, stream_map)


def test_a_last_block_that_is_skipped_is_another_path() -> None:
    model, inputs = llama()
    stream_map = find_stream(model, inputs)
    model.model.layers[3].forward = lambda hidden_states, *_, **__: hidden_states
    with pytest.raises(StreamNotFoundError, match="6 of the 8"):
        record(model, inputs, stream_map)


def test_the_map_of_another_model_is_refused() -> None:
    model, inputs = llama()
    other = see("gpt2")
    with pytest.raises(StreamNotFoundError):
        record(model, inputs, other.map)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_numbers_do_not_pass(bad: float) -> None:
    model, inputs = llama()
    stream_map = find_stream(model, inputs)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = bad
    books = record(model, inputs, stream_map).books
    assert not books.additivity <= BOOKS


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_books_never_forget_a_bad_pass(bad: float) -> None:
    for first, second in [(bad, 0.0), (0.0, bad)]:
        books = Books(additivity=first, continuity=first, passes=1)
        books.merge(Books(additivity=second, continuity=second, passes=1))
        assert not books.additivity <= BOOKS
        assert not books.continuity <= BOOKS
        assert books.passes == 2


# gradients ------------------------------------------------------------------------------------------------


def gradients(model: nn.Module, run: Callable[[], Any]) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    tensors(run())[0].float().square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "falcon", "deepseek_v4"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_the_same(name: str, checkpointing: bool) -> None:
    case = CASES[name]
    model, inputs = case.build(), case.inputs()
    stream_map = find_stream(model, inputs)
    if checkpointing:
        model.activation_checkpointing_enable()
        model.train()
        stream_map = find_stream(model, inputs)
    bare = gradients(model, lambda: model(**inputs))
    reducer = Nothing()
    recorded = gradients(model, lambda: record(model, inputs, stream_map, [reducer]).output)
    assert bare.keys() == recorded.keys()
    assert len(bare) > 10
    for parameter, gradient in bare.items():
        assert torch.equal(gradient, recorded[parameter]), parameter
    assert reducer.blocks == [0, 1, 2, 3]  # the recomputed pass is not recorded again


# inputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "opt", "bloom", "deepseek_v3"])
def test_padding_on_either_side(name: str, side: str) -> None:
    model, inputs = see(name).model, dict(see(name).inputs)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, slice(0, 4) if side == "left" else slice(-4, None)] = 0
    inputs["attention_mask"] = mask
    reducer, kept = Nothing(), KeepStream()
    with torch.no_grad():
        expected = tensors(model(**inputs))[0]
        recording = record(model, inputs, find_stream(model, inputs), [reducer, kept])
    assert torch.equal(tensors(recording.output)[0], expected)
    assert recording.books.additivity <= BOOKS
    assert recording.books.continuity <= BOOKS
    batch = reducer.batches[0]
    assert torch.equal(batch.mask, mask.bool())
    assert batch.position[1].max() == 6
    assert kept["resid_post", -1].shape[:2] == mask.shape


@pytest.mark.parametrize("name", ["llama", "falcon", "olmo2", "bert", "opt", "hy_v4", "deepseek_v4", "beam"])
def test_bf16(name: str) -> None:
    case = CASES[name]
    model, inputs = case.build().to(torch.bfloat16), case.inputs()
    kept = KeepStream()
    with torch.no_grad():
        expected = tensors(model(**inputs))[0]
        recording = record(model, inputs, find_stream(model, inputs), [kept])
    assert torch.equal(tensors(recording.output)[0], expected)
    assert kept["resid_post", -1].dtype == torch.bfloat16
    # bf16 keeps 8 bits: a sum of three terms in another order is off by at most two roundings of 2^-9.
    assert recording.books.additivity <= 2**-7
    assert recording.books.continuity == 0.0


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(["llama", "falcon", "opt", "mixtral", "deepseek_v4", "hand_no_residual", "mamba"]),
    batch=st.integers(1, 3),
    positions=st.integers(2, 15),
    seed=st.integers(0, 2**16),
)
def test_any_shape_after_one_trace(name: str, batch: int, positions: int, seed: int) -> None:
    seen = see(name)
    ids = torch.randint(3, 100, (batch, positions), generator=torch.Generator().manual_seed(seed))
    kept = KeepStream()
    with torch.no_grad():
        recording = record(seen.model, {"input_ids": ids}, seen.map, [kept])
        assert torch.equal(tensors(recording.output)[0], tensors(seen.model(input_ids=ids))[0])
    assert recording.books.additivity <= BOOKS
    assert recording.books.continuity <= BOOKS
    assert kept["resid_pre", 0].shape[:2] == (batch, positions)


@pytest.mark.parametrize(
    "name",
    [
        "vit",
        "whisper_encoder",
        "whisper_decoder",
    ],
)
def test_the_mask_has_the_shape_of_the_stream(name: str) -> None:
    seen, reducer = see(name), Nothing()
    record(seen.model, seen.inputs, seen.map, [reducer])
    assert reducer.batches[0].mask.shape == seen.kept["resid_pre", 0].shape[:2]


# compiled -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        "wrapped",
        "in place",
    ],
)
def test_a_compiled_model_is_recorded_uncompiled(how: str) -> None:
    model: Any = Stack(*(PreBlock() for _ in range(2))).eval()
    inputs = {"input_ids": torch.randint(0, 100, (2, 5))}
    with torch.no_grad():
        expected = model(**inputs)
    if how == "wrapped":
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    kept = KeepStream()
    with torch.no_grad():
        recording = record(model, inputs, find_stream(model, inputs), [kept])
        assert torch.equal(recording.output, expected)
        assert torch.equal(model(**inputs), expected)
    assert list(kept.points)[-1] == "blocks.1.hook_resid_post"
    assert recording.books.additivity <= BOOKS


# keeping --------------------------------------------------------------------------------------------------


def test_points_by_name_and_negative_block() -> None:
    kept = see("llama").kept
    assert kept["resid_post", -1] is kept["blocks.3.hook_resid_post"]
    assert len(kept.points) == 4 * 5
    with pytest.raises(ConfigError, match=r"blocks\.9\.hook_resid_post"):
        kept["resid_post", 9]
    with pytest.raises(ConfigError, match="cannot be merged"):
        kept.merge(KeepStream())


def test_only_what_is_asked_is_kept() -> None:
    seen = see("llama")
    kept = KeepStream(lambda name: name.endswith("resid_post"))
    record(seen.model, seen.inputs, seen.map, [kept])
    assert list(kept.points) == [f"blocks.{i}.hook_resid_post" for i in range(4)]


def test_what_is_kept_is_a_copy() -> None:
    seen, kept = see("hand_pre_norm"), KeepStream()
    record(seen.model, seen.inputs, seen.map, [kept])
    before = kept["resid_pre", 1].clone()
    kept["resid_post", 0].zero_()
    assert torch.equal(kept["resid_pre", 1], before)
