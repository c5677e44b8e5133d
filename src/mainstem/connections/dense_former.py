"""DenseFormer: after every block, a learned weighted sum of all blocks' outputs so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream, Trunk
from mainstem.connections._depth import TupleTrunk, frozen_weighted_sum, one_hot, weighted_sum
from mainstem.connections._norms import NormConfig
from mainstem.errors import ConfigError


class DenseFormerConnection(Connection):
    """``x' = x + F(N(x))``; where block b ends, ``y_b = x'`` and ``x' = sum_j depth_weights_j y_j``.

    Shapes: the stream is ``(x, y_0, ..., y_b)``, each ``[batch, pos, width]``, with ``y_0`` the embedding;
    read and update ``[batch, pos, width]``. Parameters: one norm, and where a block ends a number a source.
    FLOPs a token: ``2 (b + 1) width`` at the end of block b. Moved there: ``b + 4`` elements a channel. Live
    memory grows by one ``y`` a block. Compiled by block: one graph for each length of the history.
    Value at initialisation: 1 for the newest source, 0 for the others: the plain residual, exactly.
    """

    depth_weights: nn.Parameter | None

    def __init__(self, norm: nn.Module, *, block: int, dilation: int, num_sources: int):
        """Build one; ``block``: that which ends here, from 1, or 0; ``num_sources``: 0 for no mixing."""
        super().__init__()
        self.norm = norm
        self.block = block
        self.dilation = dilation
        weights = nn.Parameter(torch.empty(num_sources)) if num_sources else None
        self.register_parameter("depth_weights", weights)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values again."""
        super().reset_parameters()
        if self.depth_weights is not None:
            nn.init.zeros_(self.depth_weights)
            nn.init.ones_(self.depth_weights[-1:])

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed stream."""
        return self.norm(stream[0]), None

    def read_weights(self, stream: Stream) -> Tensor | None:
        """Return 1 for the running stream, 0 for the history."""
        return one_hot(0, stream)

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Add; where a block ends, remember its output and mix."""
        weights = self.depth_weights
        return self._step(
            stream[0] + update, stream[1:], lambda sources: _mix(weights, sources, weighted_sum)
        )

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Every coefficient is a parameter: the step is linear as it stands."""
        weights = self.depth_weights

        def mix(sources: Sequence[Tensor]) -> Tensor:
            return _mix(weights, sources, lambda w, s: frozen_weighted_sum(w)(s))

        history = tuple(torch.zeros_like(y) for y in stream[1:])
        return AffineStep(
            carry=lambda s: self._step(s[0], s[1:], mix), inject=lambda u: self._step(u, history, mix)
        )

    def _step(self, x: Tensor, history: Stream, mix: Callable[[Sequence[Tensor]], Tensor]) -> Stream:
        if not self.block:
            return x, *history
        sources = (*history, x)
        return mix(sources[self.block % self.dilation :: self.dilation]), *sources


def _mix(
    weights: Tensor | None, sources: Sequence[Tensor], total: Callable[[Tensor, Sequence[Tensor]], Tensor]
) -> Tensor:
    return sources[-1].view_as(sources[-1]) if weights is None else total(weights, sources)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseFormer(Scheme):
    """Depth-weighted averaging (``"dense_former"``).

    Source: Pagliardini et al. 2024 (arXiv 2402.02622), section 3. Read: the authors' package
    (``epfml/DenseFormer``, ``denseformer/denseformer.py``) and its README. Departures: weights are plain
    parameters, not linear layers, which a model's own initialisation would overwrite (their README warns of
    it); no tensor is written in place.

    Attributes:
        dilation: block b mixes only blocks ``b, b - dilation, b - 2 dilation, ...``.
        period: mix after every so many blocks.
        sublayers_per_block: 2, or 1 for parallel blocks.
    """

    name: ClassVar[str] = "dense_former"
    family: ClassVar[str] = "depth reads"
    year: ClassVar[int] = 2024
    paper: ClassVar[str] = "2402.02622"
    formula: ClassVar[str] = "x_(b+1) = sum_(j<=b) a_(b,j) y_j, y_b the output of block b, y_0 the embedding"
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=True, start_distance=0.0, has_history=True, traffic=6.75
    )

    dilation: int = 1
    period: int = 1
    sublayers_per_block: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dilation", "period", "sublayers_per_block"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; the last of a block remembers, and mixes once a period."""
        block, inside = divmod(index + 1, self.sublayers_per_block)
        block = 0 if inside else block
        num_sources = block // self.dilation + 1 if block and block % self.period == 0 else 0
        return DenseFormerConnection(
            norm.build(width),
            block=block,
            dilation=self.dilation,
            num_sources=num_sources if num_sources > 1 else 0,  # a source alone is taken as it is
        )

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """The embedding is the stream and the first source."""
        return TupleTrunk(connections, self.build_final_norm(width=width, norm=norm), num_entries=2)
