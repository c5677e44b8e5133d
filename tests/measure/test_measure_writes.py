from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fake_pass import make_pass, means

from mainstem.measure import (
    Batch,
    BlockEvent,
    SublayerEvent,
    Write,
    WriteSizes,
    growth_per_block,
    write_cosine,
    write_ratio,
)


def norm(x: np.ndarray) -> np.ndarray:
    return np.sqrt((x * x).sum(-1))


def cosine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x * y).sum(-1) / norm(x) / norm(y)


@pytest.mark.parametrize("streams", [None, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_against_numpy(dtype: torch.dtype, tolerance: float, streams: int | None) -> None:
    fake = make_pass(dtype=dtype, streams=streams, pad="left")
    reducer = WriteSizes()
    fake.feed(reducer)
    for block, figures in enumerate(reducer.result().blocks):
        assert (figures.block, [w.kind for w in figures.writes]) == (block, ["attn", "mlp"])
        tensors = (fake.states[block], fake.attn[block], fake.mids[block], fake.mlp[block])
        expected: dict[str, dict[str, np.ndarray]] = {}
        for which in ("rest", "first"):
            h, a, mid, m = (fake.real(x, which) for x in tensors)
            for name, value in (
                ("attn_ratio", norm(a) / norm(h)),
                ("mlp_ratio", norm(m) / norm(mid)),
                ("total_ratio", norm(a + m) / norm(h)),
                ("attn_cosine", cosine(a, h)),
                ("mlp_cosine", cosine(m, mid)),
                ("total_cosine", cosine(a + m, h)),
                ("mlp_norm", norm(m)),
            ):
                expected.setdefault(name, {})[which] = value
        attn, mlp = figures.writes
        for name, split in (
            ("attn_ratio", attn.ratio),
            ("mlp_ratio", mlp.ratio),
            ("total_ratio", figures.total_ratio),
            ("attn_cosine", attn.cosine),
            ("mlp_cosine", mlp.cosine),
            ("total_cosine", figures.total_cosine),
            ("mlp_norm", mlp.norm),
        ):
            wanted = means(expected[name])
            assert (split.rest, split.first, split.all) == pytest.approx(wanted, rel=tolerance, abs=tolerance)


def test_small_writes_on_a_huge_stream() -> None:
    """Norm 24,000 and writes of norm 10: the stream's growth is below fp32, the write's size is not."""
    h = torch.zeros(1, 1, 64)
    h[..., 0] = 24_000.0
    a, m = torch.zeros_like(h), torch.zeros_like(h)
    a[..., 1], m[..., 1], m[..., 2] = 10.0, -10.0, 1e-3
    mid = h + a
    joins = (
        SublayerEvent(0, h, (Write("attn", a),), mid),
        SublayerEvent(1, mid, (Write("mlp", m),), mid + m),
    )
    reducer = WriteSizes()
    batch = Batch(torch.ones(1, 1, dtype=torch.bool))
    reducer.update(BlockEvent(0, 1, h, joins, mid + m, batch))
    reducer.end_pass(batch)
    (figures,) = reducer.result().blocks
    assert figures.total_ratio.first == pytest.approx(1e-3 / 24_000, rel=1e-5)
    assert figures.writes[0].ratio.first == pytest.approx(10 / 24_000, rel=1e-6)
    assert figures.writes[1].cosine.first == pytest.approx(-100 / (24_000 * 10), rel=1e-5)


def test_clamp_of_a_zero_stream_and_parallel_vectors() -> None:
    w = torch.randn(1, 3, 8)
    assert torch.allclose(write_ratio(w, torch.zeros(1, 3, 8)), w.norm(dim=-1) / 1e-6)
    assert write_cosine(w, torch.zeros(1, 3, 8)).abs().max() == 0
    for factor in (1.0, -1.0, 3e-7, 1e10):
        value = write_cosine(w, factor * w)
        assert value.abs().max() <= 1
        assert torch.allclose(value, torch.full((1, 3), math.copysign(1.0, factor)), atol=1e-6)


def test_nothing_carried_and_several_writes_of_a_kind() -> None:
    x, w = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    joins = (
        SublayerEvent(0, None, (Write("attn", w),), w),
        SublayerEvent(1, w, (Write("mlp", x), Write("mlp", 3 * x)), w + 4 * x),
    )
    reducer = WriteSizes()
    batch = Batch(torch.ones(2, 4, dtype=torch.bool))
    reducer.update(BlockEvent(0, 1, x, joins, w + 4 * x, batch))
    reducer.end_pass(batch)
    (figures,) = reducer.result().blocks
    assert [(f.kind, f.sublayer) for f in figures.writes] == [("attn", 0), ("mlp", 1), ("mlp", 1)]
    assert math.isnan(figures.writes[0].ratio.all)
    assert figures.writes[0].norm.all == pytest.approx(w.double().norm(dim=-1).mean().item(), rel=1e-6)
    assert figures.writes[2].ratio.rest == pytest.approx(3 * figures.writes[1].ratio.rest, rel=1e-6)
    assert figures.of_kind("mlp") is figures.writes[1]
    assert figures.of_kind("mixer") is None


def test_growth() -> None:
    assert growth_per_block([3.0 * 1.045**i for i in range(20)]) == pytest.approx(1.045, rel=1e-12)
    assert growth_per_block([1.0, math.nan, 4.0]) == pytest.approx(2.0, rel=1e-12)
    assert math.isnan(growth_per_block([1.0]))
