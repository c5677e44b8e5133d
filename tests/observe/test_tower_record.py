"""A tower's stream by its connections: the figures against loops in fp64 over the tower's own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mainstem.connections import Connection, NormConfig
from mainstem.errors import StreamNotFoundError
from mainstem.measure import BlockInfluence, StreamNorms, WriteSizes
from mainstem.measure.events import BlockEvent, Reducer
from mainstem.observe import find_stream, record, record_tower, tower_in, tower_ledger, tower_map
from mainstem.tower import Tower, TowerConfig

IDS = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(4))
REFUSED = {
    "attention_residuals": {"mix"},
    "b2t": {"norm"},
    "backout": {"identity", "mix"},
    "deep_delta": {"mix"},
    "delta_attention_residuals": {"identity"},
    "dense_former": {"identity", "mix"},
    "gru_gate": {"mix"},
    "highway": {"mix"},
    "laurel": {"mix"},
    "mudd": {"identity", "mix"},
    "ngpt": {"norm"},
    "resi_dual": {"norm"},
    "reversible": {"identity"},
    "siamese_norm": {"norm"},
    "unet_skips": {"identity", "mix"},
    "x0_reinjection": {"identity", "mix"},
}
"""What find_stream refuses, or maps in part, and how each carries."""


def _tower(connection: str, noise: float = 0.2, **options: Any) -> Tower:
    torch.manual_seed(3)
    sizes = {"vocab_size": 31, "width": 16, "num_blocks": 4, "num_heads": 2, "ffn_width": 24}
    tower = Tower(TowerConfig(**sizes, connection=connection, **options)).double().eval()
    for parameter in tower.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    return tower


class _Kept(Reducer):
    def __init__(self) -> None:
        self.events: list[BlockEvent] = []

    def update(self, event: BlockEvent) -> None:
        self.events.append(event)

    def merge(self, other: Any) -> None:
        raise NotImplementedError

    def result(self) -> None:
        return None


def _by_hand(tower: Tower) -> tuple[list[Tensor], list[Tensor]]:
    """States before the first and after every sublayer, and every update."""
    embedded = tower.embed(IDS, torch.arange(IDS.shape[1])[None])
    stream = tower.trunk.enter(embedded)
    places = tower.places(torch.arange(IDS.shape[1])[None])
    states, updates = [tower.trunk.collapse(stream)], list[Tensor]()
    for _, connection, branches in tower.sublayers():
        read, context = connection.read(stream)
        ((kind, branch),) = branches.items()
        update = branch(read, places["full"], None, None) if kind == "attn" else branch(read)
        stream = connection.write(stream, update, context)
        states.append(tower.trunk.collapse(stream))
        updates.append(update)
    return states, updates


@pytest.mark.parametrize("connection", REFUSED)
@torch.no_grad()
def test_states_and_writes_are_those_of_a_loop(connection: str) -> None:
    tower = _tower(connection)
    found = tower_map(tower, IDS)
    assert {site.carry for site in found.sites} == REFUSED[connection]
    kept, norms, sizes, influence = _Kept(), StreamNorms(), WriteSizes(), BlockInfluence()
    seen = record_tower(tower, {"token_ids": IDS}, found, [kept, norms, sizes, influence], keep_tail=True)
    states, _ = _by_hand(tower)
    torch.testing.assert_close(seen.output, tower(IDS), rtol=0, atol=0)
    assert seen.books.additivity < 1e-13
    assert seen.books.continuity == 0
    assert seen.tail is not None
    torch.testing.assert_close(seen.tail(states[-1]), seen.output, rtol=1e-12, atol=1e-12)
    for event in kept.events:
        b = event.block
        torch.testing.assert_close(event.before, states[2 * b], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(event.after, states[2 * b + 2], rtol=1e-12, atol=1e-13)
        size = states[2 * b + 2].norm(dim=-1)[:, 1:].mean()
        assert norms.result().states[b + 1].mean.rest == pytest.approx(float(size), rel=1e-10)
        cosine = torch.cosine_similarity(states[2 * b], states[2 * b + 2], dim=-1)[:, 1:].mean()
        assert influence.result().blocks[b].influence.rest == pytest.approx(float(1 - cosine), abs=1e-10)


@torch.no_grad()
def test_a_write_to_depth_attention_is_its_weight_in_the_last_read_times_the_update() -> None:
    tower = _tower("attention_residuals")
    kept, sizes = _Kept(), WriteSizes()
    record_tower(tower, {"token_ids": IDS}, tower_map(tower, IDS), [kept, sizes])
    states, updates = _by_hand(tower)
    sources = [states[0], *updates]
    query = tower.trunk.depth_query
    for i, update in enumerate(updates):
        known = torch.stack(sources[: i + 2])
        keys = known / (known.square().mean(-1, keepdim=True) + query.eps).sqrt()
        weights = ((keys * query.key_gain) @ query.query).softmax(0)
        event = kept.events[i // 2].sublayers[i % 2]
        torch.testing.assert_close(event.writes[0].value, weights[-1, ..., None] * update)
        assert event.carried is not None
        torch.testing.assert_close(event.carried, (weights[:-1, ..., None] * known[:-1]).sum(0))
        ratio = (event.writes[0].value.norm(dim=-1) / event.carried.norm(dim=-1))[:, 1:].mean()
        figure = sizes.result().blocks[i // 2].of_kind(("attn", "mlp")[i % 2])
        assert figure is not None
        assert figure.ratio.rest == pytest.approx(float(ratio), rel=1e-10)


@torch.no_grad()
def test_a_gate_keeps_what_it_lets_through() -> None:
    tower = _tower("highway")
    kept = _Kept()
    record_tower(tower, {"token_ids": IDS}, tower_map(tower, IDS), [kept])
    states, updates = _by_hand(tower)
    for i, update in enumerate(updates):
        event = kept.events[i // 2].sublayers[i % 2]
        gate = event.writes[0].value / update
        assert event.carried is not None
        torch.testing.assert_close(event.carried, (1 - gate) * states[i], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("connection", ["dense_former", "mudd", "delta_attention_residuals"])
@torch.no_grad()
def test_at_the_start_it_is_pre_norm(connection: str) -> None:
    exact = {"connection_options": {"exact_start": True}} if connection.startswith("delta") else {}
    tower, plain = _tower(connection, noise=0.0, **exact), _tower("pre_norm", noise=0.0)
    own = dict(plain.named_parameters())
    for name, parameter in tower.named_parameters():
        if name in own:
            parameter.data.copy_(own[name])
    results: list[Any] = []
    for model in (tower, plain):
        reducers = [StreamNorms(), WriteSizes(), BlockInfluence()]
        if model is plain:
            record(model, {"token_ids": IDS}, find_stream(model, {"token_ids": IDS}), reducers)
        else:
            found = tower_map(model, IDS)
            assert found.adds
            record_tower(model, {"token_ids": IDS}, found, reducers)
        results.append([r.result().to_dict() for r in reducers])
    torch.testing.assert_close(_leaves(results[0]), _leaves(results[1]), rtol=1e-9, atol=1e-12)


def _leaves(found: Any) -> Tensor:
    leaves = torch.utils._pytree.tree_leaves(found)
    return torch.tensor([float(x) for x in leaves if isinstance(x, int | float)], dtype=torch.float64)


@torch.no_grad()
def test_parallel_writes_and_the_bias_of_a_norm_are_apart() -> None:
    tower = _tower("resi_dual", norm=NormConfig(kind="layer"), parallel=True)
    kept = _Kept()
    seen = record_tower(tower, {"token_ids": IDS}, tower_map(tower, IDS), [kept])
    assert [w.kind for w in kept.events[0].sublayers[0].writes] == ["attn", "mlp", "other"]
    assert seen.books.additivity < 1e-13


@pytest.mark.parametrize("parallel", [False, True])
@torch.no_grad()
def test_an_fp32_stream_under_bf16_branches(parallel: bool) -> None:
    tower = _tower("gru_gate", stream_dtype="float32", parallel=parallel).to(torch.bfloat16)
    for module in (tower.trunk, *(connection for _, connection, _ in tower.sublayers())):
        module.float()
    kept = _Kept()
    seen = record_tower(tower, {"token_ids": IDS}, tower_map(tower, IDS), [kept])
    assert kept.events[0].after.dtype == torch.float32
    torch.testing.assert_close(seen.output, tower(IDS), rtol=0, atol=0)
    assert seen.books.additivity < (3e-3 if parallel else 1e-6)  # two bf16 writes are one rounded sum
    books = tower_ledger(tower, IDS)
    assert books.rows.dtype == torch.float32
    assert books.error < (1e-2 if parallel else 1e-5)


def test_hooks_are_gone_after_an_error_and_others_are_refused() -> None:
    tower = _tower("attention_residuals")
    found = tower_map(tower, IDS)

    class Fails(_Kept):
        def update(self, event: BlockEvent) -> None:
            raise ArithmeticError("stop")

    with pytest.raises(ArithmeticError, match="stop"):
        record_tower(tower, {"token_ids": IDS}, found, [Fails()], keep_tail=True)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tower.modules())
    assert tower_in(torch.nn.Linear(2, 2)) is None
    with pytest.raises(StreamNotFoundError, match="holds no mainstem tower"):
        tower_map(torch.nn.Linear(2, 2), IDS)


def test_the_map_names_the_towers_modules() -> None:
    names = tower_map(_tower("mudd"), IDS).names()
    assert names["hook_embed"] == "token_embedding"
    assert names["blocks.3.hook_attn_out"] == "blocks.3.attn"
    assert isinstance(_tower("mudd").get_submodule("blocks.3.connections.0"), Connection)
