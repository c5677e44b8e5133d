"""Backout: what the stream held at a lower block is taken out again before the head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream, Trunk
from mainstem.connections._depth import TupleTrunk
from mainstem.connections._norms import NormConfig
from mainstem.connections._policy import weigh
from mainstem.errors import ConfigError


class BackoutConnection(Connection):
    """``x' = x + F(N(x))``; where ``keeps``, the stream after it travels along to the end.

    Shapes: the stream is ``(x,)`` up to there and ``(x, x_mid)`` beyond, each ``[batch, pos, width]``; read
    and update the same. Parameters: one norm. FLOPs: 1 a channel. Moved: 3 elements a channel. Live memory:
    one tensor. Compiled by block: one graph below, one where it is kept, one above.
    """

    def __init__(self, norm: nn.Module, *, keeps: bool):
        super().__init__()
        self.norm = norm
        self.keeps = keeps

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed stream."""
        return self.norm(stream[0]), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Add; where it is kept, twice."""
        return self._with(stream[0] + update, tuple(stream[1:]))

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry and inject are the identity on ``x``."""
        kept = tuple(torch.zeros_like(s) for s in stream[1:])
        return AffineStep(
            carry=lambda s: self._with(s[0], tuple(s[1:])), inject=lambda u: self._with(u, kept)
        )

    def _with(self, x: Tensor, kept: tuple[Tensor, ...]) -> Stream:
        # A view, for Dynamo compiles again where two inputs are the very same tensor.
        return (x, x.view_as(x)) if self.keeps else (x, *kept)

    def extra_repr(self) -> str:
        """Whether the stream is kept after it."""
        return f"keeps={self.keeps}"


class _Difference(nn.Module):
    """``x - backout_weight * x_mid`` with one learned number."""

    def __init__(self, initial_weight: float):
        super().__init__()
        self.initial_weight = initial_weight
        self.backout_weight = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial value."""
        nn.init.constant_(self.backout_weight, self.initial_weight)

    def forward(self, x: Tensor, x_mid: Tensor) -> Tensor:
        return x - weigh(self.backout_weight, x_mid)


class BackoutTrunk(TupleTrunk):
    """The embedding goes in; what comes out is ``x - backout_weight * x_mid``.

    Parameters: one number and the final norm. FLOPs a token: 2 a channel. Value at initialisation:
    ``backout_weight`` 0 is the plain residual, exactly, and gets a gradient from the first step on.
    """

    def __init__(self, connections: Sequence[Connection], final_norm: nn.Module, initial_weight: float):
        super().__init__(connections, final_norm, num_entries=1)
        self.difference = _Difference(initial_weight)

    def collapse(self, stream: Stream) -> Tensor:
        """Take the weighed middle out of the last; below the middle there is nothing to take out. Linear."""
        return stream[0] if len(stream) == 1 else self.difference(stream[0], stream[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backout(Scheme):
    """Backout (``"backout"``): what only later blocks need is kept from the head.

    Source: modded-nanogpt, record of 2025-10-04, no paper. Read: its ``train_gpt.py`` and README of that
    record (12 blocks, the output of block 8, weight 0.5, chosen after a trial with a weight for every block)
    and nanochat's ``gpt.py`` of 2026-07-03 (the output of block L // 2, weight 0.2:
    ``initial_weight=0.2, block=L // 2``).

    Attributes:
        block: 0-based, whose output is taken out; None takes ``2 L // 3`` of L blocks, which is 8 of 12.
        initial_weight: 0.5 as published, 0 with ``exact_start``.
        sublayers_per_block: 2, or 1 for parallel blocks.
    """

    name: ClassVar[str] = "backout"
    family: ClassVar[str] = "depth reads"
    year: ClassVar[int] = 2025
    paper: ClassVar[str] = "modded-nanogpt"
    formula: ClassVar[str] = "x' = x + F(N(x)), out = x_L - w x_(2L/3)"
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=0.34, has_history=True
    )

    block: int | None = None
    initial_weight: float = 0.5
    sublayers_per_block: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sublayers_per_block < 1:
            raise ConfigError(f"sublayers_per_block={self.sublayers_per_block} must be at least 1.")
        if self.block is not None and self.block < 0:
            raise ConfigError(f"block={self.block} must be at least 0: blocks are counted from the bottom.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build the one of sublayer ``index``; the last of the block keeps the stream."""
        num_blocks = -(-num_sublayers // self.sublayers_per_block)
        block = 2 * num_blocks // 3 if self.block is None else self.block
        if block >= num_blocks:
            raise ConfigError(f"block={block} is not one of the stack's {num_blocks}; choose a lower one.")
        last = min((block + 1) * self.sublayers_per_block, num_sublayers) - 1
        return BackoutConnection(norm.build(width), keeps=index == last)

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """The embedding goes in, a difference comes out."""
        final = self.build_final_norm(width=width, norm=norm)
        return BackoutTrunk(connections, final, 0.0 if self.exact_start else self.initial_weight)
