"""Delta attention residuals: the plain stream, and on top of it a softmax read of earlier writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream, Trunk
from mainstem.connections._depth import TupleTrunk, one_hot, weighted_sum
from mainstem.connections._norms import NormConfig
from mainstem.connections.attention_residuals import DepthQuery
from mainstem.errors import ConfigError


class DeltaAttentionResidualsConnection(Connection):
    """``x' = x + F(N(h))`` with ``h = x + sum_i alpha_i v_i`` over the embedding and all earlier writes v_i.

    Shapes: the stream is ``(x, v_0, ..., v_(n-1))``, each ``[batch, pos, width]``: the plain residual and its
    parts, the embedding and sums of ``block_size`` writes each, the newest perhaps unfinished. Parameters:
    one norm and ``2 * width``; none of these in the first sublayer. FLOPs a token: ``6 n width``. Moved: 3
    elements a channel by the write, ``n + 2`` by the read. Compiled by block: one graph for each n.
    Value at initialisation: the query is 0, so ``h = (1 + 1/n) x``: the plain residual up to the norm's
    epsilon, 5e-4 away at 96 blocks with an embedding of 0.02. Divided by ``1 + 1/n``
    (``exact_start``) it is the plain residual, exactly.
    """

    def __init__(self, norm: nn.Module, query: DepthQuery | None, *, starts_source: bool, divides: bool):
        super().__init__()
        self.norm = norm
        self.depth_query = query
        self.starts_source = starts_source
        self.divides = divides

    def reset_parameters(self) -> None:
        """Draw the initial values again."""
        super().reset_parameters()
        if self.depth_query is not None:
            self.depth_query.reset_parameters()

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the norm of the stream plus the mixture."""
        x, *sources = stream
        if self.depth_query is None:
            return self.norm(x), None
        h = x + weighted_sum(self.depth_query(sources), sources)
        return self.norm(h * (len(sources) / (len(sources) + 1)) if self.divides else h), None

    def read_weights(self, stream: Stream) -> Tensor | None:
        """Return the weights of the stream and of its parts."""
        sources = stream[1:]
        if self.depth_query is None:
            return one_hot(0, stream)
        weights = self.depth_query(sources)
        joined = torch.cat([torch.ones_like(weights[..., :1]), weights], -1)
        return joined * (len(sources) / (len(sources) + 1)) if self.divides else joined

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Add to the stream, and append to the parts or add to the newest."""
        return self._step(tuple(stream), update)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry keeps everything; inject adds to the stream and to the parts."""
        zeros = tuple(torch.zeros_like(t) for t in stream)
        return AffineStep(
            carry=lambda s: self._step(tuple(s), torch.zeros_like(s[0])),
            inject=lambda u: self._step(zeros, u),
        )

    def _step(self, stream: tuple[Tensor, ...], update: Tensor) -> Stream:
        x, *parts = stream
        if self.starts_source:
            return x + update, *parts, update
        return x + update, *parts[:-1], parts[-1] + update


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaAttentionResiduals(Scheme):
    """Additive attention over writes (``"delta_attention_residuals"``).

    Source: Luo, Cai and Hu 2026 (arXiv 2605.18855). Read: the authors' code
    (``wdlctc/delta-attention-residuals-code``, mode ``delta``), which reads nothing in the first sublayer and
    has no last read. Departures: in their block mode a source is the state at a block's end less the source
    before it, which for the third block on is no disjoint sum, and the running block is no source; here
    sources are disjoint and the running one is among them, without which no start is exact. Their null
    source, for fine-tuning, is not built: ``exact_start`` serves that end.

    Attributes:
        block_size: sublayers whose writes are summed into one source; 1 as published.
    """

    name: ClassVar[str] = "delta_attention_residuals"
    family: ClassVar[str] = "depth reads"
    year: ClassVar[int] = 2026
    paper: ClassVar[str] = "2605.18855"
    formula: ClassVar[str] = "h_l = x_l + sum_i softmax_i(w_l . RMS(v_i)) v_i; x_(l+1) = x_l + F(N(h_l))"
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=1.1e-7, has_history=True
    )

    block_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 1:
            raise ConfigError(f"block_size={self.block_size} must be at least 1.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; the first has nothing to read but the stream."""
        return DeltaAttentionResidualsConnection(
            norm.build(width),
            DepthQuery(width, norm.eps) if index else None,
            starts_source=index % self.block_size == 0,
            divides=self.exact_start,
        )

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """The embedding is the stream and the first source."""
        return TupleTrunk(connections, self.build_final_norm(width=width, norm=norm), num_entries=2)
