"""Pre-LN: the plain residual, and the reference every other scheme is compared with."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig


class PreNormConnection(Connection):
    """``x' = x + F(N(x))``.

    Shapes: stream, read and update ``[batch, pos, width]``. Parameters: one norm. Cost: one addition, 3
    elements moved per channel. Source: Xiong et al. 2020 (arXiv 2002.04745), figure 1b.
    """

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed stream."""
        return self.norm(stream), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the sum."""
        assert isinstance(stream, Tensor)
        return stream + update

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry and inject are the identity."""
        return AffineStep(carry=lambda s: s, inject=lambda u: u)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreNorm(Scheme):
    """The plain Pre-LN residual (``"pre_norm"``)."""

    name: ClassVar[str] = "pre_norm"
    family: ClassVar[str] = "norm placement"
    year: ClassVar[int] = 2020
    paper: ClassVar[str] = "2002.04745"
    formula: ClassVar[str] = "x' = x + F(N(x))"
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=True, start_distance=0.0)

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return PreNormConnection(norm.build(width))
