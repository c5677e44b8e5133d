from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_pass import make_pass

from mainstem.errors import ConfigError
from mainstem.measure import Batch, BlockEvent, RoundingAbsorption, SublayerEvent, Write, absorption


def rounded(value: float, bits: int, smallest: int) -> float:
    """Nearest number of ``bits`` significant bits, ties to even, exponents from ``smallest``."""
    if value == 0.0:
        return 0.0
    exponent = max(int(np.floor(np.log2(abs(value)))), smallest)
    unit = 2.0 ** (exponent - bits + 1)
    return round(value / unit) * unit


FORMATS = {torch.bfloat16: (8, -126), torch.float16: (11, -14)}


def brute_force(x: np.ndarray, w: np.ndarray, dtype: torch.dtype) -> tuple[int, int, float]:
    """Absorbed and non-zero entries, and the relative error, of one token."""
    absorbed = nonzero = 0
    errors, sizes = [], []
    for a, b in zip(x.tolist(), w.tolist(), strict=True):
        a, b = rounded(a, *FORMATS[dtype]), rounded(b, *FORMATS[dtype])
        total = rounded(a + b, *FORMATS[dtype])
        nonzero += b != 0
        absorbed += b != 0 and total == a
        errors.append(total - a - b)
        sizes.append(b)
    return absorbed, nonzero, float(np.linalg.norm(errors) / np.linalg.norm(sizes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 50.0, 500.0, 2000.0])
def test_against_brute_force(dtype: torch.dtype, scale: float) -> None:
    x, w = scale * torch.randn(6, 40), torch.randn(6, 40)
    w[:, ::7] = 0.0
    found = absorption(x, w, dtype)
    for t in range(6):
        absorbed, nonzero, error = brute_force(x[t].double().numpy(), w[t].double().numpy(), dtype)
        assert (int(found.num_absorbed[t]), int(found.num_nonzero[t])) == (absorbed, nonzero)
        assert float(found.error[t]) == pytest.approx(error, abs=1e-6)


def test_against_native_addition() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, w = 300 * torch.randn(50, 64, dtype=torch.float64), torch.randn(50, 64, dtype=torch.float64)
        total = x.to(dtype) + w.to(dtype)
        found = absorption(x, w, dtype)
        assert torch.equal(found.num_absorbed, ((total == x.to(dtype)) & (w.to(dtype) != 0)).sum(-1))
        exact = total.double() - x.to(dtype).double() - w.to(dtype).double()
        torch.testing.assert_close(
            found.error.double(), exact.norm(dim=-1) / w.to(dtype).double().norm(dim=-1), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize(
    ("step", "absorbed", "error"),
    [
        (2.0**-9, 4, 1.0),
        (2.0**-8, 4, 1.0),
        (2.0**-8 * (1 + 2.0**-7), 0, 2 / (1 + 2.0**-7) - 1),
        (2.0**-7, 0, 0.0),
    ],
)
def test_the_limit_of_bf16(step: float, absorbed: int, error: float) -> None:
    """bf16 numbers above 1 are 2^-7 apart: half of that is a tie and goes to the even one, 1."""
    found = absorption(torch.ones(1, 4), torch.full((1, 4), step), torch.bfloat16)
    assert int(found.num_absorbed[0]) == absorbed
    assert float(found.error[0]) == pytest.approx(error, abs=1e-7)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("streams", [None, 4])
def test_reducer_against_brute_force(every: int, streams: int | None) -> None:
    fake = make_pass((7, 5), streams=streams, width=8, blocks=2, pad="left")
    reducer = RoundingAbsorption(every)
    fake.feed(reducer)
    result = reducer.result()
    assert (result.every, result.num_tokens) == (every, len(range(0, 7, every)) + len(range(0, 5, every)))
    names = [(w.block, w.kind, w.sublayer) for w in result.writes]
    assert names == [(0, "attn", 0), (0, "mlp", 1), (1, "attn", 0), (1, "mlp", 1)]
    for write in result.writes:
        x = (fake.states if write.kind == "attn" else fake.mids)[write.block]
        w = (fake.attn if write.kind == "attn" else fake.mlp)[write.block]
        xs, ws = fake.real(x), fake.real(w)
        positions = fake.batch.position[fake.batch.mask].tolist()
        for dtype, figures in zip(FORMATS, write.figures, strict=True):
            rows = {p: [] for p in ("rest", "first")}
            for a, b, position in zip(xs, ws, positions, strict=True):
                if position % every == 0:
                    rows["rest" if position else "first"].append(brute_force(a, b, dtype))
            for which, found in rows.items():
                share = sum(r[0] for r in found) / sum(r[1] for r in found)
                assert getattr(figures.absorbed, which) == pytest.approx(share, rel=1e-12)
                assert getattr(figures.error, which) == pytest.approx(
                    np.mean([r[2] for r in found]), abs=1e-6
                )
            assert figures.num_left_out == 0


def test_overflow_is_counted_and_not_called_absorption() -> None:
    x = torch.full((1, 3, 4), 65_504.0)
    w = torch.full((1, 3, 4), 1.0)
    x[0, 0] = 1.0
    x[0, 2] = 70_000.0
    w[0, 1] = 32.0
    join = SublayerEvent(0, x, (Write("mlp", w),), x + w)
    reducer = RoundingAbsorption(1)
    batch = Batch(torch.ones(1, 3, dtype=torch.bool))
    reducer.update(BlockEvent(0, 1, x, (join,), x + w, batch))
    reducer.end_pass(batch)
    (write,) = reducer.result().writes
    bf16, fp16 = write.figures
    assert (bf16.num_left_out, fp16.num_left_out) == (0, 2)
    assert np.isnan(fp16.absorbed.rest)
    assert fp16.absorbed.first == 0.0
    assert bf16.absorbed.rest == 1.0


def test_writes_rounded_together_give_the_same_as_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from mainstem.measure import rounding

    results = []
    for entries in (1 << 17, 8 * 16, 1):
        monkeypatch.setattr(rounding, "_CALL_ENTRIES", entries)
        reducer = RoundingAbsorption(2)
        for dtype in (torch.float32, torch.bfloat16):
            make_pass(blocks=5, dtype=dtype).feed(reducer)
        results.append(reducer.result())
    assert results[0] == results[1] == results[2]
    assert len(results[0].writes) == 10


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="every is 0"):
        RoundingAbsorption(0)
    with pytest.raises(ConfigError, match="float64"):
        absorption(torch.ones(1, 2), torch.ones(1, 2), torch.float64)
