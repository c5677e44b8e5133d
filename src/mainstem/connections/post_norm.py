"""Post-LN: the original transformer, which norms the stream itself after every addition."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig, frozen_norm


class PostNormConnection(Connection):
    """``x' = N(x + F(x))``.

    Shapes: stream, read and update ``[batch, pos, width]``. Parameters: one norm. Cost: one addition and one
    norm of the stream. Carry and inject are the norm with its statistics frozen; a LayerNorm's bias is the
    offset.
    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.1. Not the plain residual at the start.
    """

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the stream as it is: it was normed when it was written."""
        assert isinstance(stream, Tensor)
        return stream, None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the normed sum."""
        assert isinstance(stream, Tensor)
        return self.norm(stream + update)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze the norm at ``stream + update``."""
        assert isinstance(stream, Tensor)
        linear, offset = frozen_norm(self.norm, stream + update)

        def carry(s: Stream) -> Stream:
            assert isinstance(s, Tensor)
            return linear(s)

        return AffineStep(carry=carry, inject=linear, offset=offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostNorm(Scheme):
    """Post-LN (``"post_norm"``). The last sublayer's norm is the final norm."""

    name: ClassVar[str] = "post_norm"
    family: ClassVar[str] = "norm placement"
    year: ClassVar[int] = 2017
    paper: ClassVar[str] = "1706.03762"
    formula: ClassVar[str] = "x' = N(x + F(x))"
    no_exact_start: ClassVar[str | None] = "the stream itself is normed at every sublayer."
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=False, start_distance=1.26)

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return PostNormConnection(norm.build(width))

    def build_final_norm(self, *, width: int, norm: NormConfig) -> nn.Module:
        """The stream is already normed."""
        return nn.Identity()

    def output_init_scale(self, num_sublayers: int) -> float:
        """The stream is normed at every write, so writes do not add up."""
        return 1.0
