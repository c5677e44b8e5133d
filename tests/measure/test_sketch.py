from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mainstem.errors import ConfigError
from mainstem.measure import QuantileSketch

magnitudes = hnp.arrays(
    np.float64,
    st.integers(1, 60),
    elements=st.one_of(st.just(0.0), st.floats(1e-300, 1e300), st.floats(0.5, 2.0)),
)


def as_sketch(values: np.ndarray, error: float = 1e-2) -> QuantileSketch:
    sketch = QuantileSketch(relative_error=error)
    sketch.update(values)
    return sketch


def same(one: QuantileSketch, other: QuantileSketch) -> bool:
    quantiles = [0.0, 0.05, 0.3, 0.5, 0.95, 1.0]
    return one.count() == other.count() and all(
        one.quantile(q) == other.quantile(q)
        or (math.isnan(one.quantile(q)) and math.isnan(other.quantile(q)))
        for q in quantiles
    )


@settings(max_examples=60, deadline=None)
@given(magnitudes, st.floats(0, 1), st.sampled_from([0.05, 0.01]))
def test_promised_error(values: np.ndarray, q: float, error: float) -> None:
    exact = np.quantile(values, q)
    # 1e-9: fp64 rounding of the logarithm at |log x| = 690 beside a bucket.
    assert abs(as_sketch(values, error).quantile(q) - exact) <= exact * (error + 1e-9)


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_default_error_on_many_values(spread: float) -> None:
    values = np.exp(np.random.default_rng(0).normal(5, spread, 20_000)).astype(np.float32)
    sketch = QuantileSketch()
    for part in np.split(values, 20):
        sketch.update(part)
    for q in (0.0, 0.001, 0.05, 0.5, 0.95, 0.999, 1.0):
        assert sketch.quantile(q) == pytest.approx(np.quantile(values.astype(np.float64), q), rel=2.51e-4)


@settings(max_examples=40, deadline=None)
@given(magnitudes, magnitudes, magnitudes)
def test_merge_equals_one_sketch_in_any_order(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    whole = as_sketch(np.concatenate([a, b, c]))
    left, right = as_sketch(a), as_sketch(c)
    left.merge(as_sketch(b))
    left.merge(as_sketch(c))
    right.merge(as_sketch(a))
    right.merge(as_sketch(b))
    assert same(whole, left)
    assert same(whole, right)


def test_nothing_hidden() -> None:
    sketch = as_sketch(np.array([0.0, 0.0, 1.0, np.inf, np.nan, np.nan, np.nan], dtype=np.float32))
    assert (sketch.num_zero(), sketch.num_infinite(), sketch.num_nan(), sketch.count()) == (2, 1, 3, 4)
    assert sketch.quantile(0.0) == 0.0
    assert sketch.quantile(2 / 3) == pytest.approx(1.0, rel=1e-2)
    assert sketch.quantile(1.0) == math.inf
    assert math.isnan(as_sketch(np.array([np.nan])).quantile(0.5))


@pytest.mark.parametrize("value", [8.8e307, 9.1e307, 1.797e308, np.finfo(np.float64).max])
def test_the_largest_numbers_do_not_overflow(value: float) -> None:
    sketch = as_sketch(np.array([value, 1.0]), 2.5e-4)
    assert sketch.quantile(1.0) == pytest.approx(value, rel=2.5e-4)
    assert sketch.above(2.0)[1] == pytest.approx(value, rel=2.5e-4)


def test_above_counts_and_sums() -> None:
    values = np.random.default_rng(1).uniform(1, 100, 5000)
    count, total = as_sketch(values, 1e-3).above(50.0)
    assert count == pytest.approx((values > 50).sum(), abs=int(((values > 49.9) & (values < 50.1)).sum()))
    assert total == pytest.approx(values[values > 50].sum(), rel=5e-3)


def test_lanes_are_apart() -> None:
    sketch = QuantileSketch(2)
    sketch.update(np.array([1.0]), 0)
    sketch.update(np.array([7.0, 9.0]), 1)
    other = QuantileSketch(3)
    other.update(np.array([100.0]), 2)
    sketch.merge(other)
    assert [sketch.count(i) for i in range(3)] == [1, 2, 1]
    assert sketch.quantile(0.5, 1) == pytest.approx(8.0, rel=2.5e-4)
    assert sketch.quantile(0.5, 2) == pytest.approx(100.0, rel=2.5e-4)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"non-negative values; got -1\.0"):
        QuantileSketch().update(np.array([1.0, -1.0]))
    with pytest.raises(ConfigError, match="do not merge"):
        QuantileSketch(relative_error=0.1).merge(QuantileSketch())
    with pytest.raises(ConfigError, match="lanes"):
        QuantileSketch(0)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        QuantileSketch().quantile(1.5)


def test_lanes_together_count_as_one_by_one() -> None:
    values = np.abs(np.random.default_rng(0).normal(size=(4, 50))).astype(np.float32)
    values[1, 3:6] = (0.0, np.inf, np.nan)
    values[2] = np.nan
    together, single = QuantileSketch(5), QuantileSketch(5)
    for _ in range(2):
        together.update_lanes(values, [0, 3, 4, 1])
        for row, lane in zip(values, [0, 3, 4, 1], strict=True):
            single.update(row, lane)
    for lane in range(5):
        assert together.count(lane) == single.count(lane)
        assert together.num_nan(lane) == single.num_nan(lane)
        assert str(together.quantile(0.3, lane)) == str(single.quantile(0.3, lane))
    with pytest.raises(ValueError, match="non-negative"):
        together.update_lanes(np.array([[1.0], [-2.0]]), [0, 1])
    assert together.count(0) == single.count(0)
