"""Spectra against singular values of the whole token matrix; CKA against its U-statistic written out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from fake_pass import Pass, make_pass

from mainstem.errors import ConfigError
from mainstem.measure import StreamSpectra, state_from_bytes, state_to_bytes
from mainstem.measure.spectra import hsic


def with_outliers(seed: int, streams: int | None = None) -> Pass:
    fake = make_pass((20, 31, 26), seed=seed, streams=streams, pad="left")
    for row, column in ((0, -3), (2, -9), (2, -1)):
        fake.states[1][row, column] *= 40.0
    fake.states[2][1, -4] *= 30.0
    return fake


def windows(passes: list[Pass], state: int) -> list[np.ndarray]:
    """Every window's states but the first, in fp64, by a plain loop."""
    found: list[np.ndarray] = []
    for fake in passes:
        for row, mask in zip(fake.states[state], fake.batch.mask, strict=True):
            real = mask.nonzero().flatten().tolist()[1:]
            found.append(np.stack([row[i].double().numpy().reshape(-1) for i in real]))
    return found


def outliers(rows: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1)
    return norms > 5 * np.sort(norms)[(len(norms) - 1) // 2]


def figures(rows: np.ndarray) -> tuple[float, float, float, float]:
    s = np.linalg.svd(rows - rows.mean(0), compute_uv=False)

    def perplexity(w: np.ndarray) -> float:
        p = w[w > 1e-9 * w.max()] / w.sum()
        return float(np.exp(-(p * np.log(p)).sum()))

    lam = s**2
    return lam.sum() ** 2 / (lam**2).sum(), perplexity(s), perplexity(lam), lam.sum() / lam.max()


@pytest.mark.parametrize("streams", [None, 2])
def test_spectra_are_those_of_the_singular_values(streams: int | None) -> None:
    passes = [with_outliers(seed, streams) for seed in (1, 2)]
    reducer = StreamSpectra(None)
    for fake in passes:
        fake.feed(reducer)
    states = reducer.result().states
    assert [s.state for s in states] == [0, 1, 2, 3]
    for found in states:
        rows = windows(passes, found.state)
        typical = [r[~outliers(r)] for r in rows]
        for ours, cloud in ((found.whole, rows), (found.typical, typical)):
            whole = np.concatenate(cloud)
            got = (ours.participation_ratio, ours.effective_rank, ours.eigenvalue_rank, ours.stable_rank)
            assert got == pytest.approx(figures(whole), rel=1e-8)
            assert ours.num_tokens == len(whole)
    assert states[1].whole.num_tokens - states[1].typical.num_tokens == 6
    assert states[1].typical.participation_ratio > 1.5 * states[1].whole.participation_ratio


def test_fewer_tokens_than_entries() -> None:
    fake = make_pass((5, 4), width=32)
    reducer = StreamSpectra(2)
    fake.feed(reducer)
    found = reducer.result().states[0].whole
    rows = np.concatenate(windows([fake], 0))
    assert found.effective_rank == pytest.approx(figures(rows)[1], rel=1e-6)
    assert found.effective_rank < 6


def u_statistic(one: np.ndarray, other: np.ndarray) -> float:
    """HSIC as a mean over all quadruples of distinct tokens (Gretton et al. 2005): without bias."""
    k, m = one @ one.T, other @ other.T
    terms = [
        k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q])
        for i, j, q, r in itertools.permutations(range(len(one)), 4)
    ]
    return float(np.mean(terms))


def test_hsic_is_the_u_statistic() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(7, 5)), generator.normal(size=(7, 3)) + 2.0
    y[:, 0] += x[:, 1]
    kernels = [torch.from_numpy(a @ a.T).fill_diagonal_(0) for a in (x, y)]
    assert hsic(*kernels) == pytest.approx(u_statistic(x, y), rel=1e-10)


def test_cka_is_the_ratio_of_means_over_windows() -> None:
    fake = make_pass((8, 7), width=6, blocks=2)
    fake.states[1][1, 3] *= 50.0
    reducer = StreamSpectra(None)
    fake.feed(reducer)
    states = reducer.result().states
    clouds = [windows([fake], s) for s in range(3)]
    odd = [np.any([outliers(clouds[s][w]) for s in range(3)], axis=0) for w in range(2)]
    assert [o.sum() for o in odd] == [0, 1]

    def cka(s: int, t: int, kept: list[np.ndarray]) -> float:
        def mean(a: int, b: int) -> float:
            return sum(
                len(clouds[a][w][kept[w]]) * u_statistic(clouds[a][w][kept[w]], clouds[b][w][kept[w]])
                for w in range(2)
            )

        return mean(s, t) / math.sqrt(mean(s, s) * mean(t, t))

    everything = [np.ones(len(o), bool) for o in odd]
    for found in states[:2]:
        s = found.state
        assert found.cka_next == pytest.approx(cka(s, s + 1, everything), rel=1e-9)
        assert found.cka_last == pytest.approx(cka(s, 2, everything), rel=1e-9)
        assert found.typical_cka_next == pytest.approx(cka(s, s + 1, [~o for o in odd]), rel=1e-9)
        assert found.typical_cka_last == pytest.approx(cka(s, 2, [~o for o in odd]), rel=1e-9)
    assert math.isnan(states[2].cka_next)
    assert states[2].cka_last == pytest.approx(1.0)


def test_cka_of_what_is_not_related_is_about_zero() -> None:
    x, y = (torch.randn(30, 40, generator=torch.Generator().manual_seed(i)).double() for i in (1, 2))
    x, y = x - x.mean(0), y - y.mean(0)
    assert float((x.T @ y).norm() ** 2 / (x.T @ x).norm() / (y.T @ y).norm()) > 0.4  # what bias alone gives
    reducer = StreamSpectra(2)
    for seed in range(6):
        fake = make_pass((31,) * 8, width=40, seed=seed)
        fake.states[3] = torch.randn(fake.states[3].shape, generator=torch.Generator().manual_seed(seed))
        fake.feed(reducer)
    assert abs(reducer.result().states[0].cka_last) < 0.03


def test_merged_and_stored_parts_are_the_whole() -> None:
    whole, one, other, stored = (StreamSpectra(3, cka_tokens=10) for _ in range(4))
    for seed, part in ((1, one), (2, other), (3, one)):
        with_outliers(seed).feed(whole, part)
    stored.load_state_dict(state_from_bytes(state_to_bytes(other.state_dict())))
    stored.merge(one)
    ours, theirs = stored.result().to_dict(), whole.result().to_dict()
    for a, b in zip(ours["states"], theirs["states"], strict=True):
        for key in a:
            wanted = b[key] if b[key] is None else pytest.approx(b[key], rel=1e-10)
            assert a[key] == wanted, key


def test_one_state_is_too_few() -> None:
    with pytest.raises(ConfigError, match="num_states is 1"):
        StreamSpectra(1)
