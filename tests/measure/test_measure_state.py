"""What a reducer has seen survives a file, to the bit, and another rank's share adds up."""

from __future__ import annotations

import importlib
import math
import pkgutil
from typing import Any

import numpy as np
import pytest
import torch
from fake_pass import Pass, make_pass
from hypothesis import given, settings
from hypothesis import strategies as st

import mainstem.intervene
import mainstem.measure
from mainstem.errors import ConfigError
from mainstem.intervene import WriteMeans
from mainstem.measure import (
    AngularDistances,
    LinearProbe,
    LogitLens,
    NearestEmbedding,
    QuantileSketch,
    Reducer,
    StreamSpectra,
    default_reducers,
)
from mainstem.measure._state import decode, encode, from_bytes, to_bytes
from mainstem.observe import KeepStream

HEAD = torch.randn(16, 11, generator=torch.Generator().manual_seed(1))


def tail(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.float(), (16,)) @ HEAD


def reducers() -> list[Reducer]:
    vocab = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    made = default_reducers(rounding_every=2, median_samples=50)
    asked = [AngularDistances("rest"), NearestEmbedding(vocab), WriteMeans()]
    return [*made, *asked, LinearProbe(vocab, num_states=2), StreamSpectra(None), LogitLens()]


def feed(to: list[Reducer], *passes: Pass) -> list[Reducer]:
    for fake in passes:
        fake.batch.token_ids.remainder_(64)
        lens = to[-1]
        assert isinstance(lens, LogitLens)
        lens.begin_pass(tail(fake.states[-1]), tail)
        fake.feed(*to)
    return to


def through_bytes(reducer: Reducer) -> dict[str, Any]:
    return from_bytes(to_bytes(reducer.state_dict()))


def passes_of(num: int) -> list[Pass]:
    return [make_pass((9, 3 + i, 8, 8), seed=i, blocks=3) for i in range(num)]


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_what_goes_on_from_a_file_ends_where_it_would_have_ended(cut: int) -> None:
    passes = passes_of(3)
    whole, begun, resumed = feed(reducers(), *passes), feed(reducers(), *passes[:cut]), reducers()
    for old, new in zip(begun, resumed, strict=True):
        new.load_state_dict(through_bytes(old))
    feed(resumed, *passes[cut:])
    for one, other in zip(whole, resumed, strict=True):
        assert str(one.result()) == str(other.result()), one.name  # nan equals nan here


def test_a_state_is_a_copy() -> None:
    one = feed(reducers(), *passes_of(1))
    states = [r.state_dict() for r in one]
    before = [str(r.result()) for r in one]
    feed(one, *passes_of(2))
    for reducer, state, was in zip(one, states, before, strict=True):
        assert (str(reducer.result()) != was) == (reducer.name != "first_nonfinite")
        reducer.load_state_dict(state)
        assert str(reducer.result()) == was
    feed(one, *passes_of(2))  # and what was loaded is not the state that was kept
    for reducer, state, was in zip(one, states, before, strict=True):
        reducer.load_state_dict(state)
        assert str(reducer.result()) == was


def test_a_pass_under_way_is_no_part_of_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainstem.measure._host.BLOCKS_TOGETHER", 2)
    done, broken = passes_of(2)
    one = default_reducers(median_samples=None)
    done.feed(*one)
    before = [str(r.result()) for r in one]
    for event, _ in zip(broken.events(), range(2), strict=False):
        for reducer in one:
            reducer.update(event)
    for reducer, was in zip(one, before, strict=True):
        reducer.load_state_dict(through_bytes(reducer))
        assert str(reducer.result()) == was


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 1e300) | st.sampled_from([math.nan, math.inf]), max_size=20))
def test_a_sketch_is_restored_lane_by_lane(values: list[float]) -> None:
    sketch = QuantileSketch(lanes=3)
    sketch.update(np.array(values), 1)
    sketch.update(np.array([1e-30, 1e30]), 2)
    again = decode(from_bytes(to_bytes(encode(sketch))))
    for lane in range(3):
        assert [again.count(lane), again.num_nan(lane), again.num_zero(lane), again.num_infinite(lane)] == [
            sketch.count(lane), sketch.num_nan(lane), sketch.num_zero(lane), sketch.num_infinite(lane)
        ]  # fmt: skip
        for q in (0.0, 0.3, 1.0):
            a, b = again.quantile(q, lane), sketch.quantile(q, lane)
            assert a == b or (math.isnan(a) and math.isnan(b))


def test_floats_come_back_to_the_bit() -> None:
    values = [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 1 / 3]
    found = from_bytes(to_bytes(encode(values)))
    assert np.array(found).tobytes() == np.array(values).tobytes()


def test_every_reducer_of_the_library_can_be_stored_or_says_why_not() -> None:
    for package in (mainstem.measure, mainstem.intervene):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    waiting, found = [Reducer], []
    while waiting:
        classes = waiting.pop().__subclasses__()
        waiting += classes
        found += [c for c in classes if c.__module__.startswith(("mainstem.measure.", "mainstem.intervene."))]
    without = {c.__name__ for c in found if not c.saved}
    assert without == {"HostReducer"}
    with pytest.raises(ConfigError, match="KeepStream cannot be stored"):
        KeepStream().state_dict()


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="was given to AngularDistances, which keeps _sum, _num_tokens"):
        AngularDistances().load_state_dict({"_hits": 1})
    data = to_bytes(feed(reducers(), *passes_of(1))[0].state_dict())
    for torn in (data[:100], data[:-100], b""):
        with pytest.raises(ValueError, match="no state of reducers"):
            from_bytes(torn)
    with pytest.raises(TypeError, match="holds a object"):
        encode({"a": object()})
