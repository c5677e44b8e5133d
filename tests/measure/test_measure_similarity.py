from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fake_pass import make_pass, means
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.errors import ConfigError
from mainstem.measure import AngularDistances, BlockInfluence, angular_distance, block_influence


def cosine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))


@pytest.mark.parametrize("streams", [None, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_block_influence_against_numpy(dtype: torch.dtype, tolerance: float, streams: int | None) -> None:
    fake = make_pass(dtype=dtype, streams=streams)
    reducer = BlockInfluence()
    fake.feed(reducer)
    for block, figures in enumerate(reducer.result().blocks):
        cosines = {
            k: cosine(fake.real(fake.states[block], k), fake.real(fake.states[block + 1], k))
            for k in ("rest", "first")
        }
        split = figures.influence
        wanted = means({k: 1 - v for k, v in cosines.items()})
        assert (split.rest, split.first, split.all) == pytest.approx(wanted, abs=tolerance)
        angles = means({k: np.arccos(v) / np.pi for k, v in cosines.items()})
        # arccos near 1 turns a cosine's 1e-7 into 1e-4: the spiked first tokens barely turn.
        assert figures.angle.rest == pytest.approx(angles[0], abs=tolerance)
        assert figures.angle.first == pytest.approx(angles[1], abs=1e3 * tolerance)


@settings(max_examples=100, deadline=None)
@given(
    st.floats(1e-3, 1e4),
    st.floats(-1e4, 1e4).filter(lambda f: abs(f) > 1e-3),
    st.integers(0, 1000),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_parallel_vectors_stay_in_range(scale: float, factor: float, seed: int, dtype: torch.dtype) -> None:
    x = scale * torch.randn(1, 4, 33, generator=torch.Generator().manual_seed(seed))
    influence = block_influence(x.to(dtype), (factor * x).to(dtype))
    angle = angular_distance(x.to(dtype), (factor * x).to(dtype))
    tolerance = 1e-4 if dtype == torch.bfloat16 else 1e-6
    wanted = 0.0 if factor > 0 else 2.0
    assert (influence >= 0).all()
    assert (influence <= 2).all()
    assert (influence - wanted).abs().max() <= tolerance
    assert ((angle - wanted / 2).abs() <= math.sqrt(2 * tolerance)).all()


@pytest.mark.parametrize("factor", [1.1, -0.7])
def test_reducers_clamp_parallel_states(factor: float) -> None:
    """Rounding lifts some of 500 cosines above 1: one arccos of them would be nan."""
    fake = make_pass((500, 500), blocks=1)
    fake.states[1] = factor * fake.states[0]
    influence, last, rest = BlockInfluence(), AngularDistances(), AngularDistances("rest")
    fake.feed(influence, last, rest)
    (figures,) = influence.result().blocks
    wanted = 0.0 if factor > 0 else 1.0
    assert figures.influence.rest == pytest.approx(2 * wanted, abs=1e-6)
    assert 0 <= figures.influence.rest <= 2
    assert figures.angle.rest == pytest.approx(wanted, abs=3e-4)
    assert last.result().distances[0][0] == pytest.approx(wanted, abs=3e-4)
    assert rest.result().distances[0][0] == pytest.approx(wanted, abs=3e-4)


def test_closed_forms() -> None:
    x = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]])
    y = torch.tensor([[[0.0, 2.0], [3.0, 3.0], [-5.0, 0.0], [1.0, 0.0]]])
    assert block_influence(x, y)[0].tolist() == pytest.approx([1.0, 1 - math.sqrt(0.5), 2.0, 1.0])
    assert angular_distance(x, y)[0].tolist() == pytest.approx([0.5, 0.25, 1.0, 0.5])


@pytest.mark.parametrize("tokens", ["last", "rest"])
@pytest.mark.parametrize("streams", [None, 4])
def test_angular_distances_against_numpy(tokens: str, streams: int | None) -> None:
    passes = [make_pass((9, 6, 80), pad="left", streams=streams), make_pass((4,), streams=streams, seed=1)]
    reducer = AngularDistances(tokens)  # type: ignore[arg-type]
    for fake in passes:
        fake.feed(reducer)
    result = reducer.result()
    assert result.num_tokens == (4 if tokens == "last" else 8 + 5 + 79 + 3)
    assert [len(row) for row in result.distances] == [3, 2, 1]
    for n, row in enumerate(result.distances, start=1):
        for start, value in enumerate(row):
            angles = [
                np.arccos(cosine(f.real(f.states[start], tokens), f.real(f.states[start + n], tokens)))
                for f in passes
            ]
            assert value == pytest.approx(np.concatenate(angles).mean() / np.pi, abs=1e-9)
        assert result.best_start(n) == int(np.argmin(row))


def test_distance_over_one_block_agrees_with_the_streaming_one() -> None:
    fake = make_pass(blocks=4)
    held, streaming = AngularDistances("rest"), BlockInfluence()
    fake.feed(held, streaming)
    angles = [b.angle.rest for b in streaming.result().blocks]
    assert list(held.result().distances[0]) == pytest.approx(angles, abs=1e-6)


def test_a_state_that_does_not_move_is_at_distance_zero() -> None:
    fake = make_pass(blocks=1, pad="none")
    fake.states[1] = fake.states[0].clone()
    reducer = AngularDistances()
    fake.feed(reducer)
    assert reducer.result().distances[0][0] == pytest.approx(0.0, abs=1e-8)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match='"last" or "rest"'):
        AngularDistances("first")  # type: ignore[arg-type]
    fake, reducer = make_pass(), AngularDistances()
    fake.feed(reducer)
    with pytest.raises(ConfigError, match="No run of 4 blocks in a model of 3"):
        reducer.result().best_start(4)
