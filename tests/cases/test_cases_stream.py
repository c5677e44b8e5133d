"""Public reports about states and writes that were not what they were called."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from handmade import InPlaceBlock, PreBlock, Stack
from plain_hooks import hooked
from seen import see, tensors
from small_models import base, shake, tokens
from torch import Tensor, nn

from mainstem.errors import ConfigError, StreamNotFoundError
from mainstem.measure import Batch, BlockEvent, BlockInfluence, Reducer
from mainstem.observe import KeepStream, find_stream, ledger, record
from mainstem.tower.pretrained import tower_from_transformers

# fp32 rounds to 6e-8; a sum of three terms rounds twice.
IDENTITY = 1e-6


def blocks_of(name: str) -> list[str]:
    return [block.module for block in see(name).map.blocks]


def relative(given: Tensor, expected: Tensor) -> float:
    error = (given.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    return float(error.max())


# transformers#26142: the last hidden state is normed ------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3", "gpt_neox", "modernbert", "bloom"])
def test_the_last_state_is_before_the_final_norm(name: str) -> None:
    """transformers#26142, ViT#13461: ``hidden_states[-1]`` is past the final norm, and norming it again gave
    wrong lenses and a wrong influence of the last block."""
    seen = see(name)
    plain = hooked(seen.model, seen.inputs, blocks_of(name))
    last = seen.kept["resid_post", -1]
    assert torch.equal(last, plain.after[-1])
    with torch.no_grad():
        theirs = seen.model(**seen.inputs, output_hidden_states=True).hidden_states
    assert relative(theirs[-1], last) > 0.01  # theirs is another tensor
    reducer = BlockInfluence()
    record(seen.model, seen.inputs, seen.map, [reducer])
    given = reducer.result().blocks[-1].influence.all
    cosine = torch.cosine_similarity(plain.before[-1].double(), plain.after[-1].double(), dim=-1)
    assert given == pytest.approx(float((1 - cosine).mean()), rel=1e-4, abs=1e-7)
    wrong = torch.cosine_similarity(theirs[-2].double(), theirs[-1].double(), dim=-1)
    assert abs(given - float((1 - wrong).mean())) > 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_the_last_state_does_not_depend_on_what_transformers_calls_it(tied: bool) -> None:
    """transformers#48087 lets a configuration untie ``hidden_states[-1]`` from the normed output: the same
    name, two tensors."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**base(num_key_value_heads=2), tie_last_hidden_states=tied)
    model, inputs = shake(transformers.LlamaForCausalLM(config)), tokens()
    stream_map, kept = find_stream(model, inputs), KeepStream()
    with torch.no_grad():
        record(model, inputs, stream_map, [kept])
    plain = hooked(model, inputs, [block.module for block in stream_map.blocks])
    assert torch.equal(kept["resid_post", -1], plain.after[-1])


# TransformerLens#1639, #1659, #1648: a hook's output is not the write -------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "bloom",
        "mpt",
        "olmo2",
        "olmo3",
        "granite",
        "gemma2",
        "gemma3_text",
        "glm4",
        "exaone4",
        "falcon",
        "opt",
    ],
)
def test_the_writes_of_a_block_are_what_the_block_adds(name: str) -> None:
    """TransformerLens#1639, #1659 (BLOOM and MPT add the residual inside their sublayers) and #1648 (OLMo 2
    and 3 norm, Granite scales what they add): an output that was hooked was not what was added."""
    seen = see(name)
    plain = hooked(seen.model, seen.inputs, blocks_of(name))
    for block, (before, after) in enumerate(zip(plain.before, plain.after, strict=True)):
        before, after = before.view_as(seen.kept["resid_pre", block]), after.view_as(before)
        writes = seen.kept["attn_out", block].double() + seen.kept["mlp_out", block].double()
        assert relative(before.double() + writes, after) <= IDENTITY
        assert relative(before, after) > 1e-3  # leaving the writes out is no way to pass


# Falcon adds in place after the hook ----------------------------------------------------------------------


class Holding(Reducer):
    """Keeps what it is handed, and a copy of it as it was then."""

    name = "holding"

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def update(self, event: BlockEvent) -> None:
        writes = [w.value for sublayer in event.sublayers for w in sublayer.writes]
        after = [sublayer.after for sublayer in event.sublayers]
        self.seen += [(t, t.clone()) for t in (event.before, *writes, *after, event.after)]

    def merge(self, other: Any) -> None:
        raise NotImplementedError

    def result(self) -> None:
        return None


@pytest.mark.parametrize("name", ["falcon", "hand_in_place", "llama"])
def test_writes_are_those_of_the_moment_they_were_made(name: str) -> None:
    """Falcon's parallel block adds the attention's output into the feed-forward's in place, after hooks have
    seen it: a tensor that was captured without a copy holds both."""
    seen = see(name)
    attn, mlp = (seen.kept[f"{kind}_out", 1] for kind in ("attn", "mlp"))
    parts = seen.block_outputs(1)
    assert torch.equal(attn, seen.case.writes["attn"](parts))
    assert torch.equal(mlp, seen.case.writes["mlp"](parts))
    kept = KeepStream()
    with torch.no_grad():
        record(seen.model, seen.inputs, seen.map, [kept])
    pointers = {t.untyped_storage().data_ptr() for t in (*seen.model.parameters(), *seen.model.buffers())}
    storages = [t.untyped_storage().data_ptr() for t in kept.points.values()]
    assert len(set(storages)) == len(storages)
    assert not pointers & set(storages)


@pytest.mark.parametrize("name", ["falcon", "gptj", "hand_three_terms", "llama"])
def test_events_are_not_changed_within_their_block(name: str) -> None:
    """The same fault seen by a reducer: what it is handed must be right when it is handed, whatever the block
    does in place."""
    seen, reducer = see(name), Holding()
    with torch.no_grad():
        record(seen.model, seen.inputs, seen.map, [reducer])
    expected = list(seen.kept.points.values())
    for _, copied in reducer.seen:
        assert any(copied.shape == t.shape and torch.equal(copied, t) for t in expected)


# TransformerLens#1644: parallel or not --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "changes", "parallel"),
    [
        ("GPTNeoXConfig", base(use_parallel_residual=True), True),
        ("GPTNeoXConfig", base(use_parallel_residual=False), False),
        ("FalconConfig", {"parallel_attn": True, "new_decoder_architecture": False}, True),
        ("FalconConfig", {"parallel_attn": True, "new_decoder_architecture": True}, True),
        ("FalconConfig", {"parallel_attn": False, "new_decoder_architecture": False}, False),
        ("StableLmConfig", base(num_key_value_heads=4, use_parallel_residual=True), True),
        ("StableLmConfig", base(num_key_value_heads=4, use_parallel_residual=False), False),
    ],
)
def test_a_state_in_the_middle_exists_where_the_block_has_one(
    config: str, changes: dict[str, Any], parallel: bool
) -> None:
    """TransformerLens#1644: an adapter took GPT-NeoX for parallel always; RedPajama, which is not, lost its
    state between attention and feed-forward."""
    torch.manual_seed(0)
    if config == "FalconConfig":
        sizes = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
        changes = sizes | changes
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**changes)).eval()
    inputs, kept = tokens(), KeepStream()
    stream_map = find_stream(made, inputs)
    with torch.no_grad():
        record(made, inputs, stream_map, [kept])
    mids = [point for point in kept.points if "resid_mid" in point]
    assert len(mids) == (0 if parallel else 4)
    assert [len(site.writes) for site in stream_map.sites] == ([2] * 4 if parallel else [1] * 8)
    for block in range(4):
        before, attn = kept["resid_pre", block], kept["attn_out", block]
        if not parallel:
            assert torch.equal(kept["resid_mid", block], before + attn)
        total = before.double() + attn.double() + kept["mlp_out", block].double()
        assert relative(total, kept["resid_post", block]) <= IDENTITY


# TransformerLens#509: folding a norm that lies on the stream ----------------------------------------------


@pytest.mark.parametrize("name", ["bert", "distilbert", "electra", "hand_post_norm", "olmo2"])
def test_no_norm_is_folded(name: str) -> None:
    """TransformerLens#509: a LayerNorm was folded into the weights after it in a model whose norm lies on the
    stream, and its outputs changed. Here weights stay as they are, and the ledger takes each row through the
    norm with its statistics frozen."""
    seen = see(name)
    weights = copy.deepcopy(seen.model.state_dict())
    stream_map = find_stream(seen.model, seen.inputs)
    book = ledger(seen.model, seen.inputs, stream_map)
    assert relative(book.rows.double().sum(0), seen.kept["resid_post", -1]) <= 1e-5
    assert all(torch.equal(value, weights[key]) for key, value in seen.model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(tensors(seen.model(**seen.inputs))[0], seen.bare[0])


def test_a_tower_is_not_made_of_a_model_it_cannot_be() -> None:
    """The same fault at conversion: what cannot be carried over as it is must be refused by name."""
    with pytest.raises(ConfigError, match="bert"):
        tower_from_transformers(see("bert").model)  # type: ignore[arg-type]


# nnsight, lightning-pose#449, nnsight#463: tensor or tuple ------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neo", "bloom", "mpt", "falcon", "gpt_oss", "vit"])
def test_states_hold_the_whole_batch(name: str) -> None:
    """Blocks return a tensor or a tuple, by model and by version: ``output[0]`` is the state of one and the
    first sequence of the other (nnsight's notes, lightning-pose#449, nnsight#463)."""
    seen = see(name)
    plain = hooked(seen.model, seen.inputs, blocks_of(name))
    for block, after in enumerate(plain.after):
        state = seen.kept["resid_post", block]
        assert state.shape[0] == 2
        assert torch.equal(state, after)
        assert not torch.equal(state[0], state[1])


# TransformerLens#1618: a stream that is not the model's ---------------------------------------------------


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3", "llama4"])
def test_the_stream_is_the_models_own_and_a_change_shows(name: str) -> None:
    """TransformerLens#1618: a bridged gpt-oss had a cosine of 0.84 to the model's stream at block 0 and of
    0.04 at block 12, without a word. Here the states are the model's to the bit, and the books say where
    something else was put in their place."""
    seen = see(name)
    with torch.no_grad():
        theirs = seen.model(**seen.inputs, output_hidden_states=True).hidden_states
    for block in range(4):
        assert torch.equal(seen.kept["resid_pre", block], theirs[block])
    module = seen.model.get_submodule(seen.map.blocks[1].module)
    handle = module.register_forward_hook(lambda _m, _a, output: output * 1.5)
    try:
        with torch.no_grad():
            books = record(seen.model, seen.inputs, seen.map).books
    finally:
        handle.remove()
    assert math.isclose(books.continuity, 0.5, rel_tol=1e-5)
    assert seen.map.sites[books.continuity_site].block == 2


# tuned-lens#56: a norm by another name --------------------------------------------------------------------


class Odd(nn.Module):
    """A final norm that no list of names has, a head without a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.zork = nn.Embedding(100, 64)
        self.floors = nn.ModuleList(PreBlock() for _ in range(3))
        self.quux = nn.LayerNorm(64)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.zork(input_ids)
        for floor in self.floors:
            x = floor(x)
        return self.quux(x) @ self.zork.weight.T


def test_a_final_norm_is_found_whatever_its_name() -> None:
    """tuned-lens#56: a final norm that was not found by name was left out, and a lens trained without it."""
    model, inputs, kept = shake(Odd()), tokens(), KeepStream()
    with torch.no_grad():
        seen = record(model, inputs, find_stream(model, inputs), [kept], keep_tail=True)
        assert seen.tail is not None
        assert torch.equal(seen.tail(kept["resid_post", -1]), seen.output)
        early = kept["resid_post", 0]
        torch.testing.assert_close(
            seen.tail(early), (model.quux(early) @ model.zork.weight.T), rtol=0, atol=0
        )
        assert (seen.tail(early) - early @ model.zork.weight.T).abs().max() > 0.1


class NoStream(nn.Module):
    def forward(self, input_ids: Tensor) -> Tensor:
        return nn.functional.one_hot(input_ids, 100).float().mean(1)


def test_a_structure_that_is_not_understood_is_refused() -> None:
    """tuned-lens#56, the whole kind: what is not understood must be an error, not a guess."""
    with pytest.raises(StreamNotFoundError, match="NoStream"):
        find_stream(NoStream(), tokens())


def test_in_place_blocks_hand_over_what_they_carried() -> None:
    """The kind of Falcon's fault in a stream that is itself changed in place: ``before`` is not ``after``."""
    torch.manual_seed(0)
    model, inputs, kept = Stack(*(InPlaceBlock() for _ in range(2))).eval(), tokens(), KeepStream()
    twin = Stack(*(PreBlock() for _ in range(2))).eval()
    twin.load_state_dict(model.state_dict())
    expected = KeepStream()
    with torch.no_grad():
        record(model, inputs, find_stream(model, inputs), [kept], batch=Batch(torch.ones(2, 11).bool()))
        record(twin, inputs, find_stream(twin, inputs), [expected])
    assert kept.points.keys() == expected.points.keys()
    assert all(torch.equal(kept.points[name], t) for name, t in expected.points.items())
