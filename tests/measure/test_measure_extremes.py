from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fake_pass import Pass, make_pass

from mainstem.measure import LargestActivations, headroom_bits


def measured(*passes: Pass, **options):
    reducer = LargestActivations(**options)
    for fake in passes:
        fake.feed(reducer)
    return reducer.result()


def found_by_hand(passes: list[Pass], state: int, skip: int) -> tuple[float, int, int, int, int]:
    best = (0.0, 0, 0, 0, 0)
    for fake in passes:
        x = fake.states[state].double()
        for row in range(x.shape[0]):
            columns = [i for i, real in enumerate(fake.batch.mask[row].tolist()) if real]
            for position, column in enumerate(columns):
                if position < skip:
                    continue
                entry = x[row, column].reshape(-1)
                channel = int(entry.abs().argmax())
                if abs(entry[channel]) > abs(best[0]):
                    sequence = fake.batch.first_sequence + row
                    token = int(fake.batch.token_ids[row, column])
                    best = (float(entry[channel]), sequence, position, channel, token)
    return best


@pytest.mark.parametrize("streams", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_against_a_plain_loop(dtype: torch.dtype, streams: int | None) -> None:
    passes = [
        make_pass((9, 6, 12), seed=i, pad=pad, dtype=dtype, streams=streams)
        for i, pad in enumerate(("left", "right", "none"))
    ]
    result = measured(*passes)
    assert result.dtype == str(dtype).removeprefix("torch.")
    for state, figures in enumerate(result.states):
        for activation, skip in ((figures.largest, 0), (figures.largest_rest, 1)):
            value, sequence, position, channel, token = found_by_hand(passes, state, skip)
            assert activation is not None
            assert activation.value == value
            assert (activation.sequence, activation.position) == (sequence, position)
            assert (activation.stream, activation.channel) == divmod(channel, 16)
            assert activation.token_id == token


@pytest.mark.parametrize("streams", [None, 4])
def test_exact_median_and_the_massive_rule(streams: int | None) -> None:
    passes = [make_pass((9, 6, 12), seed=i, streams=streams) for i in range(2)]
    result = measured(*passes, median_samples=None, median_error=1e-3)
    for state, figures in enumerate(result.states):
        entries = np.abs(np.concatenate([f.real(f.states[state]).reshape(-1) for f in passes]))
        assert figures.median == pytest.approx(np.median(entries), rel=1.01e-3)
        assert figures.median_ratio == pytest.approx(entries.max() / np.median(entries), rel=1.01e-3)
        assert figures.massive == (entries.max() > 100 and entries.max() >= 1000 * np.median(entries))
    assert [s.massive for s in result.states][:2] == [False, True]


def test_the_rule_needs_both_size_and_ratio() -> None:
    for spike, body, massive in ((150.0, 0.1, True), (99.0, 0.01, False), (150.0, 0.2, False)):
        fake = make_pass((8,), blocks=1, pad="none")
        fake.states[1] = torch.full_like(fake.states[1], body)
        fake.states[1][0, 3, 2] = -spike
        figures = measured(fake).states[1]
        assert figures.massive is massive
        assert figures.largest is not None
        assert (figures.largest.value, figures.largest.position) == (-spike, 3)


def test_sampled_median_is_as_good_as_stated() -> None:
    """Ten passes of 4,096 samples: a standard error of 0.6 %; allowed: four, and the sketch's 0.2 % twice."""
    passes = [make_pass((100, 80), width=96, blocks=1, seed=i, pad="left") for i in range(10)]
    sampled, exact = measured(*passes), measured(*passes, median_samples=None)
    for one, other in zip(sampled.states, exact.states, strict=True):
        assert one.median == pytest.approx(other.median, rel=4 * 0.006 + 0.004)


def test_headroom() -> None:
    assert headroom_bits(65504 / 8, torch.float16) == pytest.approx(3.0)
    assert headroom_bits(95_232.0, torch.float16) < 0
    assert headroom_bits(1.0, torch.bfloat16) == pytest.approx(128, abs=0.01)
    assert headroom_bits(0.0, torch.float16) == math.inf
    fake = make_pass((4,), blocks=1, pad="none")
    fake.states[1][0, 2, 1] = 2 * 65504.0
    bits = measured(fake).states[1].headroom_bits
    assert bits["float16"] == pytest.approx(-1.0)
    assert set(bits) == {"float16", "bfloat16", "float32"}
