from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from fake_pass import make_pass

from mainstem.measure import Batch, SublayerEvent, Write, default_reducers


def test_places_follow_the_mask_on_either_side() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]).bool()
    batch = Batch(mask, torch.arange(20).view(4, 5), first_sequence=7)
    cpu = torch.device("cpu")
    assert batch.places("first", cpu).tolist() == [2, 5, 16]
    assert batch.places("last", cpu).tolist() == [4, 8, 16]
    assert batch.places("rest", cpu).tolist() == [3, 4, 6, 7, 8]
    assert batch.places("all", cpu, 2).tolist() == [2, 4, 5, 7, 16]
    assert batch.host.rest.tolist() == [3, 4, 6, 7, 8]
    assert batch.host.first.tolist() == [2, 5, 16]
    assert (batch.host.sequence[16], batch.host.position[8], batch.host.token_id(8)) == (10, 3, 8)


def test_an_event_is_freed_without_the_garbage_collector() -> None:
    reducers = default_reducers()
    gc.collect()
    gc.disable()
    try:
        seen = []
        for event in make_pass().events():
            for reducer in reducers:
                reducer.update(event)
            seen.append(weakref.ref(event.sublayers[0].writes[0]))
            seen.append(weakref.ref(event.geometry))
        del event
        assert [ref() for ref in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_each_state_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from mainstem.measure import geometry

    asked: list[list[geometry.Figure]] = []
    norms: list[int] = []
    plain, plain_norm = geometry._figures, geometry._norm
    monkeypatch.setattr(geometry, "_figures", lambda w, *a: asked.append(list(w)) or plain(w, *a))
    monkeypatch.setattr(geometry, "_norm", lambda x: norms.append(x.data_ptr()) or plain_norm(x))
    fake = make_pass(blocks=4)
    fake.feed(*default_reducers())
    tensors = [*fake.states, *fake.mids, *fake.attn, *fake.mlp]
    own = [norm for norm in norms if norm in {t.data_ptr() for t in tensors}]
    assert sorted(own) == sorted(t.data_ptr() for t in tensors)
    # The first block answers one question after another; the others all at the first, and none twice.
    assert [len(w) for w in asked[-3:]] == [10, 10, 10]
    assert all(len(w) == 1 for w in asked[:-3])
    assert sum(len(w) for w in asked) == 4 * 10 + 2


def test_what_is_measured_together_by_rows_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from mainstem.measure import geometry

    results = []
    for chunk in (1 << 30, 256):
        monkeypatch.setattr(geometry, "_CHUNK_BYTES", chunk)
        reducers = default_reducers()
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            make_pass(dtype=dtype, streams=2).feed(*reducers)
        results.append([r.result() for r in reducers])
    assert str(results[0]) == str(results[1])


def test_blocks_of_different_make_do_not_mislead_each_other() -> None:
    """A block with two sublayers, one with a single write of another name, one that writes nothing."""
    fake = make_pass(blocks=3, pad="none", lengths=(5, 5))
    first, second, third = fake.events()
    h = second.before
    lone = SublayerEvent(2, None, (Write("mixer", fake.mlp[1]),), second.after)
    second = dataclasses.replace(second, sublayers=(lone,))
    third = dataclasses.replace(third, before=second.after, sublayers=(), after=second.after)
    alone = [
        dataclasses.replace(event, batch=Batch(fake.batch.mask)) for event in (first, second, third, first)
    ]
    for event, by_itself in zip((first, second, third, first), alone, strict=True):
        ours, theirs = event.geometry, by_itself.geometry
        for one, other in zip(ours.writes, theirs.writes, strict=True):
            assert torch.equal(one.norm, other.norm)
            assert (one.dot is None) == (other.dot is None)
        assert (ours.total is None) == (theirs.total is None)
        for one, other in zip(ours.total or (), theirs.total or (), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(ours.before_dot_after, theirs.before_dot_after)
        assert torch.equal(ours.norm(event.before), theirs.norm(event.before))
    assert torch.allclose(second.geometry.total[1], (fake.mlp[1] * h).sum(-1).flatten(), atol=1e-3)


def test_reducers_leave_the_tensors_alone() -> None:
    fake, copy = make_pass(), make_pass()
    fake.feed(*default_reducers())
    for name in ("states", "mids", "attn", "mlp"):
        for x, y in zip(getattr(fake, name), getattr(copy, name), strict=True):
            assert torch.equal(x.nan_to_num(), y.nan_to_num())


def test_tensors_that_need_gradients_are_measured() -> None:
    fake, plain = make_pass(), make_pass()
    fake.states = [x.requires_grad_() for x in fake.states]
    ours, theirs = default_reducers(), default_reducers()
    fake.feed(*ours)
    plain.feed(*theirs)
    assert [r.result() for r in ours] == [r.result() for r in theirs]
