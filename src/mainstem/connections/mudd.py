"""MUDD: after every block, weighted sums of all blocks' outputs with weights that each token makes itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mainstem.connections._base import (
    AffineStep,
    Connection,
    Context,
    ParameterGroup,
    Properties,
    Scheme,
    Stream,
    Trunk,
)
from mainstem.connections._depth import TupleTrunk, frozen_weighted_sum, one_hot, weighted_sum
from mainstem.connections._norms import NormConfig
from mainstem.connections._policy import coefficient_dtype
from mainstem.errors import ConfigError


class MUDDConnection(Connection):
    """``x' = x + F(N(read))``; where block b ends, ``y_b = x'``, and what is carried and read next are::

        way_c = sum_j A_cj y_j      A = depth_bias + weight_map gelu(hidden_map RMS(y_b))

    Shapes: between blocks the stream is ``(carried, read, y_0, ..., y_b)``, inside one
    ``(x, y_0, ..., y_b)``, each ``[batch, pos, width]``. ``depth_bias`` is ``[ways, b + 1]``, ``hidden_map``
    ``[hidden, width]``, ``weight_map`` ``[ways (b + 1), hidden]`` with ``hidden = ways (b + 1)``.
    Parameters at the end of block b: ``ways (b + 1) (width + ways (b + 1) + 1)``, and one norm. FLOPs a token
    there: twice that, and ``2 ways (b + 1) width``. Compiled by block: one graph for each length.
    Value at initialisation: ``depth_bias`` 1 for the newest source and 0 for the others, ``weight_map`` 0,
    ``hidden_map`` N(0, 1/width): the plain residual, exactly.
    """

    depth_bias: nn.Parameter | None
    hidden_map: nn.Parameter | None
    weight_map: nn.Parameter | None

    def __init__(self, norm: nn.Module, *, width: int, eps: float, starts: bool, ways: int, num_sources: int):
        """Build one.

        Args:
            norm: of what is read.
            width: of the stream.
            eps: of the norm of what the weights are made from.
            starts: whether it starts a block and reads the way of its own.
            ways: that a block ending here makes; negative for static weights.
            num_sources: outputs that are mixed where a block ends here, else 0.
        """
        super().__init__()
        self.norm = norm
        self.eps = eps
        self.starts = starts
        self.ends = num_sources > 0
        size = abs(ways) * num_sources
        wanted: dict[str, tuple[int, ...] | None] = {
            "depth_bias": (abs(ways), num_sources) if self.ends else None,
            "hidden_map": (size, width) if self.ends and ways > 0 else None,
            "weight_map": (size, size) if self.ends and ways > 0 else None,
        }
        for name, shape in wanted.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values again."""
        super().reset_parameters()
        if self.depth_bias is not None:
            nn.init.zeros_(self.depth_bias)
            nn.init.ones_(self.depth_bias[:, -1])
        if self.hidden_map is not None and self.weight_map is not None:
            nn.init.normal_(self.hidden_map, std=self.hidden_map.shape[1] ** -0.5)
            nn.init.zeros_(self.weight_map)

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the norm of the way that is read."""
        return self.norm(stream[1] if self.starts else stream[0]), None

    def read_weights(self, stream: Stream) -> Tensor | None:
        """Return 1 for the way that is read, 0 for the rest."""
        return one_hot(1 if self.starts else 0, stream)

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Add; where a block ends, remember its output and mix."""
        x = stream[0] + update
        return self._step(x, stream[2:] if self.starts else stream[1:], self._weights(x), weighted_sum)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze the weights that the block's output makes."""
        weights = self._weights(stream[0] + update)
        first = 2 if self.starts else 1

        def total(w: Tensor, sources: Sequence[Tensor]) -> Tensor:
            return frozen_weighted_sum(w)(sources)

        history = tuple(torch.zeros_like(y) for y in stream[first:])
        return AffineStep(
            carry=lambda s: self._step(s[0], s[first:], weights, total),
            inject=lambda u: self._step(u, history, weights, total),
        )

    def parameter_groups(self) -> list[ParameterGroup]:
        """The two matrices of the weights are decayed, as matrices are; norm and static weights are not."""
        maps = tuple(p for p in (self.hidden_map, self.weight_map) if p is not None)
        static = () if self.depth_bias is None else (self.depth_bias,)
        groups = [ParameterGroup((*self.norm.parameters(), *static))]
        return [*groups, ParameterGroup(maps, weight_decay=True)] if maps else groups

    def _weights(self, x: Tensor) -> Sequence[Tensor]:
        """Return the weights of each way, ``[n]`` or ``[batch, pos, n]``."""
        if self.depth_bias is None:
            return ()
        if self.hidden_map is None or self.weight_map is None:
            return self.depth_bias.unbind(0)
        wide = coefficient_dtype(x)
        x = x.to(wide)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        hidden = F.gelu(F.linear(normed, self.hidden_map.to(wide)))
        made = F.linear(hidden, self.weight_map.to(wide))
        return (made.unflatten(-1, self.depth_bias.shape) + self.depth_bias.to(wide)).unbind(-2)

    def _step(
        self,
        x: Tensor,
        history: Stream,
        weights: Sequence[Tensor],
        total: Callable[[Tensor, Sequence[Tensor]], Tensor],
    ) -> Stream:
        if not self.ends:
            return x, *history
        sources = (*history, x)
        return *(total(w, sources) for w in weights), *sources


@dataclasses.dataclass(frozen=True, kw_only=True)
class MUDD(Scheme):
    """Multiway dynamic dense connections (``"mudd"``).

    Source: Xiao et al. 2025 (arXiv 2502.12170), section 2. Read: the authors' JAX training code
    (``Caiyun-AI/MUDDFormer``, ``jax/MaxText/layers/llama2.py`` and ``models.py``), whose initial values these
    are; their PyTorch file draws the static weights at random and is for inference only. Departures: query,
    key and value share one way, because a branch has one input here, so that there are two ways where the
    paper has four; the hidden size is not rounded up to 64; exact GELU instead of its tanh form.

    Attributes:
        dynamic: whether tokens make weights of their own; False leaves the static ones.
        separate_read: a way of its own for what a block's first sublayer reads; False mixes one for both.
        sublayers_per_block: 2, or 1 for parallel blocks.
    """

    name: ClassVar[str] = "mudd"
    family: ClassVar[str] = "depth reads"
    year: ClassVar[int] = 2025
    paper: ClassVar[str] = "2502.12170"
    formula: ClassVar[str] = (
        "x_(b+1),c = sum_(j<=b) A_(c,j)(y_b) y_j for each way c; A = a + W2 gelu(W1 RMS(y_b))"
    )
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=True, start_distance=0.0, has_history=True, traffic=7.21
    )

    dynamic: bool = True
    separate_read: bool = True
    sublayers_per_block: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sublayers_per_block < 1:
            raise ConfigError(f"sublayers_per_block={self.sublayers_per_block} must be at least 1.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; the last of a block mixes, the very last the carried way alone."""
        block, inside = divmod(index + 1, self.sublayers_per_block)
        ways = 2 if self.separate_read and index + 1 < num_sublayers else 1
        return MUDDConnection(
            norm.build(width),
            width=width,
            eps=norm.eps,
            starts=self.separate_read and index % self.sublayers_per_block == 0,
            ways=ways if self.dynamic else -ways,
            num_sources=0 if inside else block + 1,
        )

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """The embedding is on both ways and the first source."""
        entries = 3 if self.separate_read else 2
        return TupleTrunk(connections, self.build_final_norm(width=width, norm=norm), num_entries=entries)
