"""Effective depth on curves whose answer is plain, and the random walk by drawing one."""

from __future__ import annotations

import math

import pytest
import torch

from mainstem.errors import ConfigError
from mainstem.measure import Crossing, effective_depth, random_walk_angle


def test_a_straight_descent() -> None:
    found = effective_depth([8.0, 6.0, 4.0, 2.0, 0.0], thresholds=(0.1, 0.5, 0.8))
    assert found.area == 0.5
    assert found.crossings == (Crossing(0.1, 4, 4), Crossing(0.5, 3, 3), Crossing(0.8, 1, 1))


def test_an_early_dip_fools_the_first_crossing_alone() -> None:
    found = effective_depth([10.0, 1.0, 10.0, 10.0, 0.0], thresholds=(0.5,))
    assert found.crossings == (Crossing(0.5, 1, 4),)
    assert found.area == pytest.approx(31 / 50)


def test_a_curve_that_never_falls_or_is_not_finite() -> None:
    assert effective_depth([2.0, 2.0], thresholds=(0.5,)).crossings == (Crossing(0.5, None, None),)
    for curve in ([1.0, math.nan], [0.0, 0.0], [math.inf, 0.0]):
        found = effective_depth(curve)
        assert math.isnan(found.area)
        assert all(c.first is None and c.settled is None for c in found.crossings)
    for curve, thresholds in (([], (0.5,)), ([1.0], (1.5,))):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            effective_depth(curve, thresholds)


@pytest.mark.parametrize("size", [0.05, 0.4, 2.0])
def test_the_random_walk_angle_is_that_of_random_writes(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    h, w = torch.randn(2, 400, 4096, dtype=torch.float64, generator=generator)
    w *= size * (h.norm(dim=-1) / w.norm(dim=-1)).unsqueeze(-1)
    angle = torch.nn.functional.cosine_similarity(h, h + w).arccos().mean().item() / math.pi
    assert random_walk_angle(size) == pytest.approx(angle, abs=5e-4)
