from __future__ import annotations

import gc
import weakref

import pytest
import torch
from fake_pass import make_pass

from mainstem.measure import Batch, default_reducers


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

    calls = []
    plain = geometry.token_norm
    monkeypatch.setattr(geometry, "token_norm", lambda x: calls.append(x.data_ptr()) or plain(x))
    fake = make_pass(blocks=4)
    fake.feed(*default_reducers())
    tensors = [*fake.states, *fake.mids, *fake.attn, *fake.mlp]
    assert sorted(calls) == sorted(t.data_ptr() for t in tensors)


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
