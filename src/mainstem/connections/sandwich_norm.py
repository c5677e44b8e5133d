"""Sandwich norm (Peri-LN): a norm before the branch and another on what it writes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig, frozen_norm


class SandwichNormConnection(Connection):
    """``x' = x + N2(F(N1(x)))``.

    Shapes: stream, read and update ``[batch, pos, width]``; the update is what the branch returns, the write
    is its norm. Parameters: two norms, both with weight 1 at the start. Cost: one addition and two norms.
    Inject is the second norm with its statistics frozen at the update; its bias, if any, is the offset.
    Source: CogView (Ding et al. 2021, arXiv 2105.13290, section 2.4) and Peri-LN (Kim et al. 2025, arXiv
    2502.02732); used by Gemma 2 and 3. Not the plain residual at the start: every write has the norm's own
    size.
    """

    def __init__(self, norm: nn.Module, write_norm: nn.Module):
        super().__init__()
        self.norm = norm
        self.write_norm = write_norm

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed stream."""
        return self.norm(stream), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the stream plus the normed update."""
        assert isinstance(stream, Tensor)
        return stream + self.write_norm(update)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry is the identity; inject is the frozen write norm."""
        linear, offset = frozen_norm(self.write_norm, update)
        return AffineStep(carry=lambda s: s, inject=linear, offset=offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandwichNorm(Scheme):
    """Sandwich norm, also known as Peri-LN (``"sandwich_norm"``)."""

    name: ClassVar[str] = "sandwich_norm"
    family: ClassVar[str] = "norm placement"
    year: ClassVar[int] = 2021
    paper: ClassVar[str] = "2105.13290"
    formula: ClassVar[str] = "x' = x + N2(F(N1(x)))"
    no_exact_start: ClassVar[str | None] = "every write has its norm's own size, whatever the branch returns."
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=0.37, num_norms=2
    )

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return SandwichNormConnection(norm.build(width), norm.build(width))
