"""Any stack of blocks, each joined to the stream in another way, is found and its books balance."""

from __future__ import annotations

import torch
from handmade import (
    HandNormBlock,
    InPlaceBlock,
    PostBlock,
    PreBlock,
    ScaledBlock,
    Stack,
    StairBlock,
    ThreeTermBlock,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.observe import find_stream, ledger, record
from mainstem.observe.keep import KeepStream

# carry, what happens after the sum, and the kinds of each sublayer's writes
FACTS = {
    PreBlock: ("identity", "identity", [{"attn"}, {"mlp"}]),
    InPlaceBlock: ("identity", "identity", [{"attn"}, {"mlp"}]),
    PostBlock: ("identity", "norm", [{"attn"}, {"mlp"}]),
    HandNormBlock: ("identity", "norm", [{"attn"}, {"mlp"}]),
    ScaledBlock: ("mix", "identity", [{"attn"}, {"mlp"}]),
    ThreeTermBlock: ("identity", "identity", [{"attn", "mlp"}]),
    StairBlock: ("none", "identity", [{"attn"}, {"mlp"}]),
}
BOOKS = 1e-6  # a sum of three fp32 terms rounds twice, at 6e-8 each
LEDGER = 1e-5  # up to 12 carries through norms


@settings(max_examples=40, deadline=None)
@given(kinds=st.lists(st.sampled_from(list(FACTS)), min_size=1, max_size=6), seed=st.integers(0, 2**16))
def test_any_stack(kinds: list[type], seed: int) -> None:
    torch.manual_seed(seed)
    model = Stack(*(kind() for kind in kinds)).eval()
    inputs = {"input_ids": torch.randint(0, 100, (2, 7))}
    stream_map = find_stream(model, inputs)
    expected = [(block, *FACTS[kind][:2], k) for block, kind in enumerate(kinds) for k in FACTS[kind][2]]
    found = [(s.block, s.carry, s.then, {w.kind for w in s.writes}) for s in stream_map.sites]
    assert found == expected

    kept = KeepStream()
    with torch.no_grad():
        recording = record(model, inputs, stream_map, [kept], keep_tail=True)
        assert torch.equal(recording.output, model(**inputs))
        assert recording.tail is not None
        assert torch.equal(recording.tail(kept["resid_post", -1]), recording.output)
        state = model.embed(inputs["input_ids"]) + model.position[:7]
        for block in range(len(kinds)):
            assert torch.equal(kept["resid_pre", block], state)
            state = model.blocks[block](state.clone())
            assert torch.equal(kept["resid_post", block], state)
    assert recording.books.additivity <= BOOKS
    assert recording.books.continuity <= BOOKS
    book = ledger(model, inputs, stream_map)
    assert book.error <= LEDGER
    if StairBlock in kinds:
        assert not book["embed"].any()
