from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_pass import make_pass, means

from mainstem.measure import Batch, BlockEvent, StreamNorms, SublayerEvent, Write


def measured(fake):
    reducer = StreamNorms()
    fake.feed(reducer)
    return reducer.result().states


@pytest.mark.parametrize("streams", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_against_numpy(dtype: torch.dtype, streams: int | None) -> None:
    fake = make_pass((9, 6, 12), dtype=dtype, streams=streams)
    states = measured(fake)
    assert [s.state for s in states] == [0, 1, 2, 3]
    for figures, x in zip(states, fake.states, strict=True):
        norms = {k: np.linalg.norm(fake.real(x, k), axis=1) for k in ("rest", "first")}
        rel = 1e-13 if dtype == torch.float64 else 1e-6
        assert (figures.mean.rest, figures.mean.first, figures.mean.all) == pytest.approx(
            means(norms), rel=rel
        )
        for q, value in ((0.5, figures.median), (0.05, figures.p5), (0.95, figures.p95)):
            assert value == pytest.approx(np.quantile(norms["rest"], q), rel=2.6e-4)
        assert figures.first_median == pytest.approx(np.median(norms["first"]), rel=2.6e-4)
        assert figures.num_nonfinite == 0


def test_outliers_are_counted_and_kept_apart() -> None:
    fake = make_pass((40, 40), pad="left", blocks=1)
    x = fake.states[1]
    row, column = 1, 3 + 17
    for i in (0, 1):
        x[row, column + i] *= 60.0 * (i + 1) / x[row, column + i].norm() * x[row, 30].norm() / 5
    (_, figures) = measured(fake)
    norms = np.linalg.norm(fake.real(x, "rest"), axis=1)
    far = norms > 5 * np.median(norms)
    assert far.sum() == figures.num_outliers == 2
    assert figures.mean_without_outliers == pytest.approx(norms[~far].mean(), rel=3e-4)
    assert [(t.sequence, t.position) for t in figures.outliers] == [(1, 18), (1, 17)]
    assert figures.outliers[0].norm == pytest.approx(norms.max(), rel=1e-6)
    assert figures.outliers[0].token_id == fake.batch.token_ids[row, column + 1]


def test_more_outliers_than_are_named() -> None:
    fake = make_pass((60,), pad="none", blocks=1)
    fake.states[1][0, 1:21] *= 1000.0
    figures = measured(fake)[1]
    assert figures.num_outliers == 20
    norms = np.linalg.norm(fake.real(fake.states[1], "rest"), axis=1)
    np.testing.assert_allclose([t.norm for t in figures.outliers], np.sort(norms)[::-1][:8], rtol=1e-6)


def test_closed_form() -> None:
    """A stream of ones has norm sqrt(width), and 4 streams of ones twice that."""
    for shape, expected in (((2, 5, 9), 3.0), ((2, 5, 4, 9), 6.0)):
        x = torch.ones(shape)
        join = SublayerEvent(0, x, (Write("mlp", 0 * x),), x)
        reducer = StreamNorms()
        batch = Batch(torch.ones(2, 5, dtype=torch.bool))
        reducer.update(BlockEvent(0, 1, x, (join,), x, batch))
        reducer.end_pass(batch)
        assert reducer.result().states[1].mean.all == pytest.approx(expected, rel=1e-7)
