from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_pass import make_pass

from mainstem.measure import BlockEvent, SublayerEvent, Write, token_dot, token_largest, token_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 3, 40), (2, 3, 4, 10), (3, 1000, 300)])
def test_against_numpy(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    a, b = (t.double().numpy().reshape(shape[0] * shape[1], -1) for t in (x, y))
    rel = 1e-14 if dtype == torch.float64 else 2e-6
    size = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    np.testing.assert_allclose(token_norm(x).double(), np.sqrt((a**2).sum(1)), rtol=rel)
    assert np.abs(token_dot(x, y).double().numpy() - (a * b).sum(1)).max() <= rel * size.max()
    np.testing.assert_array_equal(token_largest(x).double(), np.abs(a).max(1))


def test_bf16_is_not_summed_in_bf16() -> None:
    x = torch.full((1, 1, 4096), 1.0078125, dtype=torch.bfloat16)
    assert token_norm(x).item() == pytest.approx(1.0078125 * 64, rel=1e-6)
    assert token_dot(x, x).item() == pytest.approx(1.0078125**2 * 4096, rel=1e-6)


def test_parallel_block_sums_both_writes() -> None:
    fake = make_pass(pad="none", lengths=(5, 5), blocks=1)
    h, a, m, after = fake.states[0], fake.attn[0], fake.mlp[0], fake.states[1]
    join = SublayerEvent(0, h, (Write("attn", a), Write("mlp", m)), after)
    geometry = BlockEvent(0, 1, h, (join,), after, fake.batch).geometry
    assert geometry.total is not None
    total, before = fake.real(a) + fake.real(m), fake.real(h)
    np.testing.assert_allclose(geometry.total[0], np.linalg.norm(total, axis=1), rtol=1e-6)
    np.testing.assert_allclose(geometry.total[1], (total * before).sum(1), rtol=1e-3, atol=1e-2)
    assert [w.kind for w in geometry.writes] == ["attn", "mlp"]


def test_a_flat_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got \[3, 4\]"):
        token_norm(torch.zeros(3, 4))
