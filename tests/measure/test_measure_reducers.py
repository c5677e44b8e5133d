"""What every reducer promises: padding does not show, ranks merge exactly, nothing is hidden."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from typing import Any

import pytest
import torch
from fake_pass import Pass, make_pass
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.measure import AngularDistances, LogitLens, Reducer, _host, default_reducers

HEAD = torch.randn(16, 11, generator=torch.Generator().manual_seed(1))


def tail(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.float(), (16,)) @ HEAD


def all_reducers() -> list[Reducer]:
    return [*default_reducers(rounding_every=2, median_samples=50), AngularDistances("rest"), LogitLens()]


def run(*passes: Any) -> list[Reducer]:
    reducers = all_reducers()
    for fake in passes:
        lens = reducers[-1]
        assert isinstance(lens, LogitLens)
        lens.begin_pass(tail(fake.states[-1]), tail)
        fake.feed(*reducers)
    return reducers


def assert_close(one: Any, other: Any, rel: float, at: str = "") -> None:
    if dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_close(getattr(one, field.name), getattr(other, field.name), rel, f"{at}.{field.name}")
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other), at
        for i, (x, y) in enumerate(zip(one, other, strict=True)):
            assert_close(x, y, rel, f"{at}[{i}]")
    elif isinstance(one, dict):
        assert_close(list(one.values()), list(other.values()), rel, at)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=rel, abs=rel, nan_ok=True), at
    else:
        assert one == other, at


@pytest.mark.parametrize("streams", [None, 4])
def test_padding_on_either_side_does_not_show(streams: int | None) -> None:
    if streams:
        results = [
            [r.result() for r in _fed(default_reducers(), make_pass(pad=pad, extra=extra, streams=streams))]
            for pad, extra in (("right", 0), ("right", 5), ("left", 0), ("left", 4))
        ]
    else:
        results = [
            [r.result() for r in run(make_pass(pad=pad, extra=extra))]
            for pad, extra in (("right", 0), ("right", 5), ("left", 0), ("left", 4))
        ]
    for other in results[1:]:
        assert_close(results[0], other, 1e-6)


def _fed(reducers: list[Reducer], fake: Any) -> list[Reducer]:
    fake.feed(*reducers)
    return reducers


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4),
    st.integers(0, 4),
)
def test_merge_equals_one_process(shapes: list[list[int]], cut: int) -> None:
    passes = [make_pass(lengths, seed=i, pad=("left", "right")[i % 2]) for i, lengths in enumerate(shapes)]
    whole, left, right = run(*passes), run(*passes[:cut]), run(*passes[cut:])
    for one, a, b in zip(whole, left, right, strict=True):
        # As a rank would send it.
        a.merge(pickle.loads(pickle.dumps(b)))
        assert_close(one.result(), a.result(), 1e-12)


@pytest.mark.parametrize("seed", [0, 1])
def test_order_of_merging_does_not_show(seed: int) -> None:
    one, other = run(make_pass(seed=seed)), run(make_pass(seed=seed + 5))
    reverse = run(make_pass(seed=seed + 5))
    for a, b, c, d in zip(one, other, reverse, run(make_pass(seed=seed)), strict=True):
        a.merge(b)
        c.merge(d)
        assert_close(a.result(), c.result(), 1e-12)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["attn", "states"])
def test_what_is_not_finite_is_named_and_not_averaged_away(poison: float, place: str) -> None:
    fake = make_pass(pad="left", blocks=3)
    sequence, column = 1, fake.batch.mask.shape[1] - 2
    position = int(fake.batch.position[sequence, column])
    if place == "attn":
        fake.attn[1][sequence, column, 3] = poison
        fake.mids[1][sequence, column, 3] = poison
        fake.states[2][sequence, column, 3] = poison
        site = "attn[0]"
    else:
        fake.states[2][sequence, column, 3] = poison
        site = "after"
    reducers = default_reducers()
    fake.feed(*reducers)
    result = {r.name: r.result() for r in reducers}
    found = result["first_nonfinite"].first
    assert (found.block, found.site, found.sequence, found.position) == (1, site, 1, position)
    assert found.token_id == fake.batch.token_ids[sequence, column]
    norms = result["stream_norms"].states
    assert [s.num_nonfinite for s in norms] == [0, 0, 1, 0]
    assert not math.isfinite(norms[2].mean.rest)
    assert math.isfinite(norms[2].mean.first)
    assert math.isfinite(norms[2].median)
    influence = result["block_influence"].blocks
    assert [math.isfinite(b.influence.rest) for b in influence] == [True, False, False]
    assert math.isfinite(result["largest_activations"].states[2].largest.value)
    if place == "attn":
        ratio = result["write_sizes"].blocks[1].of_kind("attn").ratio
        assert not math.isfinite(ratio.rest)
        assert math.isfinite(ratio.first)
    json.dumps([r.to_dict() for r in result.values()], allow_nan=False)


@pytest.mark.parametrize("together", [2, 16])
@pytest.mark.parametrize("median_samples", [None, 50])
def test_a_pass_that_breaks_off_leaves_no_trace(
    median_samples: int | None, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_host, "BLOCKS_TOGETHER", together)

    def reducers() -> list[Reducer]:
        made = default_reducers(rounding_every=2, median_samples=median_samples)
        return [*made, AngularDistances("rest"), LogitLens()]

    def begin(lens: Reducer, fake: Pass) -> None:
        assert isinstance(lens, LogitLens)
        lens.begin_pass(tail(fake.states[-1]), tail)

    whole, broken, last = (make_pass(seed=i, lengths=(9, 6 + i)) for i in range(3))
    ours, theirs = reducers(), reducers()
    for fake in (whole, broken, last):
        for used in (ours,) if fake is broken else (ours, theirs):
            begin(used[-1], fake)
        if fake is not broken:
            fake.feed(*ours)
            fake.feed(*theirs)
            continue
        for event, _ in zip(fake.events(), range(2), strict=False):
            for reducer in ours:
                reducer.update(event)
        # Neither when it is sent to another rank, nor after the next pass, nor now if nothing was summed yet.
        if together > 2:
            assert str([r.result() for r in ours]) == str([r.result() for r in theirs])
        assert str([r.result() for r in pickle.loads(pickle.dumps(ours))]) == str(
            [r.result() for r in theirs]
        )
    assert str([r.result() for r in ours]) == str([r.result() for r in theirs])


def test_nothing_waits_after_a_pass() -> None:
    reducers = default_reducers(median_samples=None)
    make_pass().feed(*reducers)
    for reducer in reducers:
        for name in ("_waiting", "_rows", "_plan", "_counted", "_held"):
            assert not getattr(reducer, name, None), (reducer.name, name)


def test_a_pass_of_single_tokens_and_one_of_none() -> None:
    alone = run(make_pass((1, 1)))
    norms, writes, influence = (r.result() for r in alone[:3])
    assert math.isnan(norms.states[0].mean.rest)
    assert norms.states[0].mean.first == norms.states[0].mean.all > 0
    assert writes.blocks[0].writes[0].ratio.first > 0
    assert influence.blocks[0].influence.all == influence.blocks[0].influence.first
    nothing = make_pass((2, 2))
    nothing.batch.mask[:] = False
    assert [math.isnan(s.mean.all) for s in run(nothing)[0].result().states] == [True] * 4


def test_results_are_json_and_reducers_have_names() -> None:
    reducers = run(make_pass())
    for reducer in reducers:
        assert (
            json.loads(json.dumps(reducer.result().to_dict(), allow_nan=False)) == reducer.result().to_dict()
        )
    assert len({r.name for r in default_reducers()}) == len(default_reducers()) == 7
    assert all(r.name for r in reducers)


def test_a_reducer_that_has_seen_nothing_has_a_result() -> None:
    for reducer in all_reducers():
        reducer.merge(pickle.loads(pickle.dumps(reducer)))
        json.dumps(reducer.result().to_dict(), allow_nan=False)
