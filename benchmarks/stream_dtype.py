"""Write ``docs/stream-dtype.md``: what a 16-bit stream loses of what is added to it.

    python -m benchmarks.stream_dtype

192 writes of unit RMS (96 blocks), or of RMS ``192 ** -0.5``, are added to a stream of a given RMS through
plain Pre-LN connections, with each policy of `mainstem.connections.StreamModule`. The error is that of the
accumulated update: ``|(x_192 - x_0) - sum(u)| / |sum(u)|``, sums in fp64.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from benchmarks._harness import versions
from mainstem.connections import PreNorm

ROOT = Path(__file__).parents[1]
NUM_SUBLAYERS, WIDTH, TOKENS, SEEDS = 192, 256, 64, 5
SIZES = (1.0, 10.0, 100.0, 1000.0)

HEADER = """# What a 16-bit stream loses

Made by `make stream-dtype`; do not edit. On torch {torch}, CPU; {seeds} seeds, mean ± spread.

Error of the accumulated update after {sublayers} writes (96 blocks) in bf16, as a share of it. *follows*:
the stream is kept in the branches' bf16 (`stream_dtype=None`); *fp32*: it is kept wide
(`stream_dtype="float32"`, the default of a tower); the writes themselves are bf16 in both.

| write RMS | stream RMS | follows (bf16) | fp32 |
|---|---|---|---|"""


@torch.no_grad()
def error(stream_rms: float, write_rms: float, stream_dtype: torch.dtype | None, seed: int) -> float:
    """Return the relative error of the accumulated update."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, TOKENS, WIDTH)
    start = (stream_rms * torch.randn(shape, generator=generator)).to(torch.bfloat16)
    trunk = PreNorm().build(width=WIDTH, num_sublayers=NUM_SUBLAYERS, stream_dtype=stream_dtype)
    trunk.to(torch.bfloat16)
    stream = trunk.enter(start)
    total = torch.zeros(shape, dtype=torch.float64)
    for connection in trunk.connections:
        update = (write_rms * torch.randn(shape, generator=generator)).to(torch.bfloat16)
        total += update.double()
        stream = connection(stream, lambda read, update=update: update)
    assert isinstance(stream, Tensor)
    return float((stream.double() - start.double() - total).norm() / total.norm())


def main() -> None:
    """Write the page."""
    lines = [HEADER.format(torch=versions("torch")["torch"], seeds=SEEDS, sublayers=NUM_SUBLAYERS)]
    for write_rms, label in ((1.0, "1"), (NUM_SUBLAYERS**-0.5, "192^-1/2")):
        for stream_rms in SIZES:
            cells: list[str] = []
            for dtype in (None, torch.float32):
                found = torch.tensor([error(stream_rms, write_rms, dtype, seed) for seed in range(SEEDS)])
                mean, spread = float(found.mean()), float(found.std())
                cells.append(f"{100 * mean:.2g} % ± {100 * spread:.1g}")
            lines.append(f"| {label} | {stream_rms:g} | {cells[0]} | {cells[1]} |")
    target = ROOT / "docs" / "stream-dtype.md"
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(target.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
