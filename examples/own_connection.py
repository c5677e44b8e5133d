"""A residual connection of one's own, in one file: ``x' = x + scale * tanh(F(N(x)))``.

    python examples/own_connection.py

Registered by one line (a decorator here; an entry point in a package, see docs/extending.md), it is usable by
name from a tower's config, its ledger balances, and it is held against plain Pre-LN.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections import (
    AffineStep,
    Connection,
    Context,
    NormConfig,
    Properties,
    Scheme,
    Stream,
    register,
)
from mainstem.observe import tower_ledger
from mainstem.tower import Tower, TowerConfig


class BoundedWriteConnection(Connection):
    """``x' = x + scale * tanh(F(N(x)))``: no write is larger than ``scale`` in any channel."""

    def __init__(self, norm: nn.Module, scale: float):
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.tensor(scale))

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed stream."""
        return self.norm(stream), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the stream plus the bounded update."""
        assert isinstance(stream, Tensor)
        return stream + self.scale * update.tanh()

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze the bound: ``tanh(u)`` is ``u`` times a factor that belongs to this pass."""
        factor = self.scale * torch.where(update == 0, 1.0, update.tanh() / update)
        return AffineStep(carry=lambda s: s, inject=lambda u: factor * u)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundedWrite(Scheme):
    """Bounded writes (``"bounded_write"``)."""

    name: ClassVar[str] = "bounded_write"
    family: ClassVar[str] = "branch scaling"
    year: ClassVar[int] = 2026
    paper: ClassVar[str] = "docs/extending.md"
    formula: ClassVar[str] = "x' = x + scale tanh(F(N(x)))"
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=0.3, traffic=5.0
    )
    no_exact_start: ClassVar[str | None] = "the hyperbolic tangent bends every write."
    scale: float = 1.0

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return BoundedWriteConnection(norm.build(width), self.scale)


def main() -> None:
    """Build a tower with it, and balance its books."""
    torch.manual_seed(0)
    tower = Tower(
        TowerConfig(vocab_size=100, width=32, num_blocks=12, num_heads=2, connection="bounded_write")
    ).eval()
    ids = torch.randint(0, 100, (2, 9))
    book = tower_ledger(tower, ids).check(1e-5)
    print(f"{len(book.labels)} contributions; their sum differs from the final stream by {book.error:.1e}")
    print(f"carried share of the embedding: {float(book.carried_share().mean()):.3f}")


if __name__ == "__main__":
    main()
