"""No residual: the staircase, every sublayer replaces what the last one made."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig


class NoResidualConnection(Connection):
    """``x' = F(N(x))``: nothing is carried.

    Shapes: stream, read and update ``[batch, pos, width]``. Parameters: one norm. Cost: no addition; the
    update is the new stream, so nothing is moved.
    Source: the lower control arm of Dong, Cordonnier and Loukas 2021 (arXiv 2103.03404), which shows that
    attention without skips collapses to rank one with depth. Not the plain residual at the start.
    """

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed stream."""
        return self.norm(stream), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the update alone."""
        return update

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry is zero, inject the identity."""
        return AffineStep(carry=_zero, inject=_identity)


def _zero(stream: Stream) -> Stream:
    assert isinstance(stream, Tensor)
    return torch.zeros_like(stream)


def _identity(update: Tensor) -> Stream:
    return update


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoResidual(Scheme):
    """A stack without residual connections (``"no_residual"``)."""

    name: ClassVar[str] = "no_residual"
    family: ClassVar[str] = "none"
    year: ClassVar[int] = 2021
    paper: ClassVar[str] = "2103.03404"
    formula: ClassVar[str] = "x' = F(N(x))"
    no_exact_start: ClassVar[str | None] = "nothing of the stream is carried."
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=1.39, traffic=0.0
    )

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return NoResidualConnection(norm.build(width))

    def output_init_scale(self, num_sublayers: int) -> float:
        """Nothing is carried, so writes do not add up."""
        return 1.0
