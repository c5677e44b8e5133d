"""A tower that runs its connections again in the backward pass: the same gradients, and less that is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mainstem.tower import Tower, TowerConfig


def randomize(module: torch.nn.Module) -> None:
    """Move every parameter away from its initial value, by the same amounts each time."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("parallel", [False, True])
def test_a_tower_keeps_little_more_than_with_a_plain_residual(parallel: bool) -> None:
    """Gradients are the same; four streams at the width of real heads keep at most 1.2 of plain Pre-LN."""
    ids = torch.randint(0, 16, (2, 32))

    def run(connection: str, recompute: bool) -> tuple[int, list[Tensor]]:
        torch.manual_seed(0)
        config = TowerConfig(
            vocab_size=16,
            width=64,
            num_blocks=4,
            num_heads=1,
            connection=connection,
            recompute_connections=recompute,
            parallel=parallel,
        )
        tower = Tower(config)
        randomize(tower)
        known = {p.untyped_storage().data_ptr() for p in tower.parameters()}
        kept: dict[int, Tensor] = {}

        def pack(t: Tensor) -> Tensor:
            if t.untyped_storage().data_ptr() not in known:
                kept.setdefault(t.untyped_storage().data_ptr(), t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = tower(ids).square().sum()
        loss.backward()
        bytes_kept = sum(t.untyped_storage().nbytes() for t in kept.values())
        return bytes_kept, [p.grad for p in tower.parameters() if p.grad is not None]

    plain, _ = run("pre_norm", False)
    for connection in ("mhc", "hyper_connections"):
        all_kept, expected = run(connection, False)
        kept, found = run(connection, True)
        assert kept <= 1.2 * plain < all_kept, (kept / plain, all_kept / plain)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))
