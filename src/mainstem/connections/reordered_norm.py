"""Reordered norm (OLMo 2, Swin v2): the branch reads the bare stream, its output is normed."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig, frozen_norm


class ReorderedNormConnection(Connection):
    """``x' = x + N(F(x))``.

    Shapes: stream, read and update ``[batch, pos, width]``. Parameters: one norm. Cost: one addition and one
    norm. Inject is the norm with its statistics frozen at the update; its bias, if any, is the offset.
    Source: Swin Transformer V2 (Liu et al. 2021, arXiv 2111.09883, section 3.2) and OLMo 2 (2025, arXiv
    2501.00656, section 3.2). The branch sees an un-normed stream, so attention wants QK-norm. Not the plain
    residual at the start.
    """

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the stream as it is."""
        assert isinstance(stream, Tensor)
        return stream, None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the stream plus the normed update."""
        assert isinstance(stream, Tensor)
        return stream + self.norm(update)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry is the identity; inject is the frozen norm."""
        linear, offset = frozen_norm(self.norm, update)
        return AffineStep(carry=lambda s: s, inject=linear, offset=offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReorderedNorm(Scheme):
    """Reordered norm, as in OLMo 2 (``"reordered_norm"``)."""

    name: ClassVar[str] = "reordered_norm"
    family: ClassVar[str] = "norm placement"
    year: ClassVar[int] = 2021
    paper: ClassVar[str] = "2111.09883"
    formula: ClassVar[str] = "x' = x + N(F(x))"
    no_exact_start: ClassVar[str | None] = (
        "the branch reads the bare stream and every write has its norm's own size."
    )
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=False, start_distance=0.39)

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return ReorderedNormConnection(norm.build(width))
