"""Public reports about padding, precision, ranges and memory: figures of a text that were not the text's."""

from __future__ import annotations

import gc
import math
import tracemalloc
from typing import Any

import pytest
import torch
import transformers
from seen import see
from small_models import base, shake
from torch import Tensor, nn

from mainstem.errors import ConfigError
from mainstem.measure import (
    AngularDistances,
    Batch,
    BlockEvent,
    BlockInfluence,
    Reducer,
    SublayerEvent,
    Write,
    angular_distance,
    block_influence,
    default_reducers,
)
from mainstem.observe import KeepStream, find_stream, record
from mainstem.sources import WindowBatch

# TransformerLens#1609: padding on the left ----------------------------------------------------------------

PADS = (0, 1, 3, 8)


def padded(side: str) -> tuple[WindowBatch, list[Tensor]]:
    """One batch of four sequences that are 12, 11, 9 and 4 tokens long, and the sequences alone."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 100, (12 - pads,), generator=generator) for pads in PADS]
    ids, mask = torch.zeros(4, 12, dtype=torch.int64), torch.zeros(4, 12, dtype=torch.int64)
    for i, row in enumerate(rows):
        place = slice(12 - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    batch = WindowBatch(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0) * mask,
        first_sequence=0,
        num_added=0,
    )
    return batch, rows


def roberta() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**base(max_position_embeddings=40, pad_token_id=0))
    return shake(transformers.RobertaForMaskedLM(config))


def numbers(value: Any, path: str = "") -> dict[str, float]:
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in numbers(inner, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for i, inner in enumerate(value) for k, v in numbers(inner, f"{path}[{i}]").items()}
    return {path: value} if isinstance(value, (int, float)) and not isinstance(value, bool) else {}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bloom", "mpt", "bert", "roberta"])
def test_padding_changes_no_figure(name: str, side: str) -> None:
    """TransformerLens#1609, #240, #344, nnsight#672, #673: padded on the left without positions, GPT-2
    counted them from the padding, and its loss rose from 4.5 to 13.6. Every figure of padded sequences is
    that of the same sequences alone."""
    model: Any = roberta() if name == "roberta" else see(name).model
    batch, rows = padded(side)
    together, apart = default_reducers(rounding_every=1), default_reducers(rounding_every=1)
    inputs = batch.inputs_for(model)
    real = Batch(mask=batch.attention_mask.bool(), token_ids=batch.input_ids)
    with torch.no_grad():
        record(model, inputs, find_stream(model, inputs), together, batch=real)
        for i, row in enumerate(rows):
            alone = {"input_ids": row[None], "attention_mask": torch.ones(1, len(row), dtype=torch.int64)}
            one = Batch(mask=torch.ones(1, len(row)).bool(), token_ids=row[None], first_sequence=i)
            record(model, alone, find_stream(model, alone), apart, batch=one)
    for ours, theirs in zip(together, apart, strict=True):
        if ours.name == "rounding_absorption":  # counts entries at a threshold: a last bit may tip one
            continue
        found, expected = numbers(ours.result().to_dict()), numbers(theirs.result().to_dict())
        assert found.keys() == expected.keys()
        wrong = {k: (v, expected[k]) for k, v in found.items() if v != pytest.approx(expected[k], 1e-4, 1e-5)}
        assert not wrong, ours.name


# ShortGPT's and LNS's block_influence: arccos unclamped, N x N --------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_angle_of_parallel_vectors_is_a_number(dtype: torch.dtype) -> None:
    """ShortGPT's and LNS's ``block_influence``: the arccos of a cosine beyond 1 by rounding, NaN for 40 % of
    parallel vectors in fp32 and an influence below zero in bf16."""
    x = torch.randn(2, 500, 64).to(dtype)
    for y in (x, x * 2, x * 0.5):
        assert bool(((block_influence(x, y) >= 0) & (block_influence(x, y) <= 1e-6)).all())
        angles = angular_distance(x, y)
        assert angles.dtype == torch.float32
        assert bool(((angles >= 0) & (angles <= 1e-3)).all())
    assert bool((angular_distance(x, -x) >= 1 - 1e-3).all())
    zero = angular_distance(x, torch.zeros_like(x))
    assert bool((zero == 0.5).all())
    reducer = BlockInfluence()
    mask = torch.ones(2, 500).bool()
    reducer.update(BlockEvent(0, 1, x, (SublayerEvent(0, x, (Write("mlp", x),), x * 2),), x * 2, Batch(mask)))
    reducer.end_pass(Batch(mask))
    figures = reducer.result().blocks[0]
    assert 0 <= figures.influence.all <= 1e-6
    assert 0 <= figures.angle.all <= 1e-3


def test_influence_compares_tokens_with_themselves_only() -> None:
    """The same functions held every token's cosine to every other: here 100,000 tokens, of which a square
    matrix would be 40 GB."""
    x, y = torch.randn(1, 100_000, 2), torch.randn(1, 100_000, 2)
    found = block_influence(x, y)
    assert found.shape == (1, 100_000)
    torch.testing.assert_close(
        found.double(), 1 - torch.cosine_similarity(x.double(), y.double(), dim=-1), rtol=0, atol=1e-6
    )


# mergekit#360, #53, PruneMe#4, LLM-Drop, LNS: off by one --------------------------------------------------


def test_a_run_of_blocks_is_counted_from_zero_and_half_open() -> None:
    """mergekit#360, #53, PruneMe#4, LLM-Drop and LNS: ranges that were inclusive, or counted from one, or
    shifted while blocks were taken out. ``distances[n - 1][l]`` is between the states before block ``l`` and
    ``l + n``, the ends of the run ``l .. l + n - 1``."""
    seen, reducer = see("llama"), AngularDistances("last")
    with torch.no_grad():
        record(seen.model, seen.inputs, seen.map, [reducer])
    result = reducer.result()
    states = [seen.kept["resid_pre", block] for block in range(4)] + [seen.kept["resid_post", 3]]
    last = [state[:, -1].double() for state in states]
    assert [len(row) for row in result.distances] == [4, 3, 2, 1]
    for n, row in enumerate(result.distances, 1):
        for start, distance in enumerate(row):
            cosine = torch.cosine_similarity(last[start], last[start + n], dim=-1)
            assert distance == pytest.approx(float(cosine.arccos().mean() / math.pi), rel=1e-9)
        assert row[result.best_start(n)] == min(row)
    with pytest.raises(ConfigError, match="5 blocks in a model of 4"):
        result.best_start(5)
    blocks = seen.map.blocks
    assert [block.index for block in blocks] == [0, 1, 2, 3]
    assert [block.module for block in blocks] == [f"model.layers.{i}" for i in range(4)]
    assert [(block.first_site, block.end_site) for block in blocks] == [(0, 2), (2, 4), (4, 6), (6, 8)]


# TransformerLens#104, #496: 16 bits -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_figures_of_a_16_bit_stream_are_not_rounded_to_16_bits(name: str) -> None:
    """TransformerLens#104, #496: reductions in the model's 16 bits gave figures of their own. Here the
    figures of a bf16 pass are those of its states in fp64."""
    case = see(name).case
    model, inputs = case.build().to(torch.bfloat16), case.inputs()
    kept, reducers = KeepStream(), default_reducers()
    with torch.no_grad():
        record(model, inputs, find_stream(model, inputs), [kept, *reducers])
    norms, _, influence = (reducer.result() for reducer in reducers[:3])
    for block in range(4):
        before, after = (kept[f"resid_{side}", block].double() for side in ("pre", "post"))
        assert kept["resid_pre", block].dtype == torch.bfloat16
        cosine = torch.cosine_similarity(before, after, dim=-1)
        assert influence.blocks[block].influence.all == pytest.approx(float((1 - cosine).mean()), rel=1e-4)
        assert norms.states[block].mean.all == pytest.approx(float(before.norm(dim=-1).mean()), rel=1e-6)


# nnsight#396, #102, #538, TransformerLens#746, #252: memory -----------------------------------------------


def live_bytes() -> int:
    gc.collect()
    return sum(t.numel() * t.element_size() for t in gc.get_objects() if type(t) is Tensor)


def test_memory_is_flat_over_passes() -> None:
    """nnsight#396, #102, #538 and TransformerLens#746: memory grew from trace to trace. After many passes
    through all reducers, no tensor is alive that was not after a few."""
    seen, reducers = see("llama"), default_reducers()

    def passes(count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                record(seen.model, seen.inputs, seen.map, reducers)

    passes(3)
    tensors_before = live_bytes()
    tracemalloc.start()
    try:
        passes(2)
        python_before = tracemalloc.get_traced_memory()[0]
        passes(20)
        gc.collect()
        python_after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert live_bytes() == tensors_before
    # Kept from every pass, three numbers a token and state alone would be 20 x 2.6 kB, and there are seven
    # reducers; what is measured here is Python's own pools that fill up.
    assert python_after - python_before < 45_000


class Counting(Reducer):
    """How many bytes of tensors are alive while a block is handed over."""

    name = "counting"

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def update(self, event: BlockEvent) -> None:
        self.bytes.append(live_bytes())

    def merge(self, other: Any) -> None:
        raise NotImplementedError

    def result(self) -> list[int]:
        return self.bytes


def test_only_what_was_asked_for_is_held() -> None:
    """TransformerLens#252: a cache of everything filled the memory when one point was wanted. Only the point
    is kept, and no block's states outlive it."""
    seen, counting = see("llama"), Counting()
    kept = KeepStream(lambda name: name == "blocks.2.hook_mlp_out")
    inputs = seen.inputs | {"use_cache": False}
    with torch.no_grad():
        record(seen.model, inputs, seen.map, [counting, kept])
    assert list(kept.points) == ["blocks.2.hook_mlp_out"]
    state = seen.kept["resid_pre", 0]
    assert max(counting.bytes) - min(counting.bytes) <= 2 * state.numel() * state.element_size()
