from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fake_pass import make_pass, means

from mainstem.measure import LogitLens, lens_divergence


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (np.exp(p) * (p - q)).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_divergence_against_numpy(chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    final, lens = 3 * torch.randn(10, 50, dtype=dtype), 3 * torch.randn(10, 50, dtype=dtype)
    lens[:4] = final[:4] + 0.1 * lens[:4]
    found = lens_divergence(final, lens, chunk_tokens=chunk)
    p, q = log_softmax(final.double().numpy()), log_softmax(lens.double().numpy())
    np.testing.assert_allclose(found.kl, kl(p, q), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found.reverse_kl, kl(q, p), rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(found.agrees, p.argmax(-1) == q.argmax(-1))


def test_closed_form_names_the_direction() -> None:
    """Final (3/4, 1/4) against lens (1/2, 1/2)."""
    found = lens_divergence(torch.tensor([[math.log(3.0), 0.0]]), torch.zeros(1, 2))
    assert found.kl.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-6)
    assert found.reverse_kl.item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2.0), rel=1e-6)


def test_equal_predictions_and_impossible_words() -> None:
    z = torch.randn(4, 30)
    same = lens_divergence(z, z + 5.0)
    assert same.kl.min() >= 0
    assert same.kl.max() < 1e-6
    assert same.agrees.all()
    barred = z.clone()
    barred[:, 7] = -math.inf
    assert lens_divergence(barred, barred).kl.abs().max() < 1e-6
    assert torch.isfinite(lens_divergence(barred, z).kl).all()
    assert torch.isinf(lens_divergence(z, barred).kl).all()
    assert torch.isinf(lens_divergence(barred, z).reverse_kl).all()
    assert torch.isnan(lens_divergence(z, z * math.nan).kl).all()


@pytest.mark.parametrize("streams", [None, 4])
@pytest.mark.parametrize("chunk", [2, 128])
def test_reducer_against_numpy(streams: int | None, chunk: int) -> None:
    head = torch.randn(16, 40, dtype=torch.float64)

    def tail(x: torch.Tensor) -> torch.Tensor:
        x = x if streams is None else x.mean(-2)
        return torch.nn.functional.layer_norm(x, (16,)) @ head

    passes = [
        make_pass((9, 6, 12), dtype=torch.float64, streams=streams, pad="left"),
        make_pass((4, 4), dtype=torch.float64, streams=streams, seed=1),
    ]
    reducer = LogitLens(chunk_tokens=chunk)
    logits = [[tail(x) for x in f.states] for f in passes]
    for fake, outputs in zip(passes, logits, strict=True):
        reducer.begin_pass(outputs[-1], tail)
        fake.feed(reducer)
    states = reducer.result().states
    for state, figures in enumerate(states):
        expected: dict[str, dict[str, np.ndarray]] = {"kl": {}, "reverse_kl": {}, "top1": {}}
        for which in ("rest", "first"):
            p = log_softmax(
                np.concatenate([f.real(o[-1], which) for f, o in zip(passes, logits, strict=True)])
            )
            q = log_softmax(
                np.concatenate([f.real(o[state], which) for f, o in zip(passes, logits, strict=True)])
            )
            expected["kl"][which] = kl(p, q)
            expected["reverse_kl"][which] = kl(q, p)
            expected["top1"][which] = (p.argmax(-1) == q.argmax(-1)).astype(float)
        for name, values in expected.items():
            split = getattr(figures, name)
            assert (split.rest, split.first, split.all) == pytest.approx(means(values), rel=1e-9, abs=1e-9)
    assert states[-1].kl.all < 1e-12
    assert states[-1].top1.all == 1.0


def test_it_asks_for_the_logits_of_each_pass() -> None:
    fake = make_pass()
    reducer = LogitLens()
    reducer.begin_pass(fake.states[-1], lambda x: x)
    fake.feed(reducer)
    with pytest.raises(RuntimeError, match="begin_pass before each pass"):
        fake.feed(reducer)


def test_no_graph_is_kept() -> None:
    fake = make_pass()
    weight = torch.randn(16, 10, requires_grad=True)
    seen = []

    def tail(x: torch.Tensor) -> torch.Tensor:
        seen.append((x @ weight).requires_grad)
        return x @ weight

    reducer = LogitLens()
    reducer.begin_pass(fake.states[-1] @ weight, tail)
    fake.feed(reducer)
    assert not any(seen)
