"""B2T: Post-LN with one more skip, from the bottom of each block to its top."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream, Trunk
from mainstem.connections._norms import NormConfig, frozen_norm
from mainstem.errors import ConfigError


class B2TConnection(Connection):
    """``x' = N(x + F(x))``; in the last sublayer of a block ``x' = N(x + F(x) + x_block)``.

        x_block ─┬───────────────────────────────────┐
                 ├──(+)─ N ─► x ─┬──(+)─────────────(+)─ N ─► x_block of the next
                 └ F1 ┘          └ F2┘

    Shapes: the stream is the pair ``(x, x_block)``, each ``[batch, pos, width]``, ``x_block`` being what
    entered the block; between blocks both are one tensor. Parameters: one norm. FLOPs: one addition (two in
    the last sublayer) and a norm. Moved: 3 elements a channel, in the last sublayer 4.
    At initialisation: not the plain residual.
    Source: Takase et al. 2022 (arXiv 2206.00330). Read: the authors' fairseq fork (``takase/b2t_connection``,
    ``transformer_layer.py``): in the encoder over two sublayers, as here, in the decoder over three. That
    code also multiplies all matrices of a layer by ``L ** -0.5`` for L layers at initialisation;
    :meth:`B2T.branch_init_scale` reaches value, output and feed-forward matrices, so queries and keys keep
    theirs.
    """

    def __init__(self, norm: nn.Module, *, opens_block: bool, closes_block: bool):
        super().__init__()
        self.norm = norm
        self.opens_block = opens_block
        self.closes_block = closes_block

    def extra_repr(self) -> str:
        """Its place in the block."""
        return f"opens_block={self.opens_block}, closes_block={self.closes_block}"

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the stream as it is: it was normed when it was written."""
        return stream[0], None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the normed sum, and what entered the block that the next sublayer is in."""
        return self._write(self.norm, stream, update)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze the norm at what it normed."""
        linear, offset = frozen_norm(self.norm, self._add(stream, update))

        def carry(s: Stream) -> Stream:
            return self._write(linear, s, torch.zeros_like(s[0]))

        def inject(u: Tensor) -> Stream:
            none = torch.zeros_like(u)
            return self._write(linear, (none, none), u)

        if offset is None:
            return AffineStep(carry=carry, inject=inject)
        none = torch.zeros_like(update)
        return AffineStep(
            carry=carry, inject=inject, offset=self._write(lambda s: s + offset, (none, none), none)
        )

    def _add(self, stream: Stream, update: Tensor) -> Tensor:
        x, entered = stream
        return x + update + entered if self.closes_block else x + update

    def _write(self, norm: Callable[[Tensor], Tensor], stream: Stream, update: Tensor) -> Stream:
        x, entered = stream
        out = norm(self._add(stream, update))
        return out, out if self.closes_block else x if self.opens_block else entered


class B2TTrunk(Trunk):
    """The embedding enters the first block; the last sublayer's norm is the final norm."""

    def expand(self, x: Tensor) -> Stream:
        """The embedding twice."""
        return x, x

    def collapse(self, stream: Stream) -> Tensor:
        """The stream; what entered its block was added or, in a block cut short, is left out."""
        return stream[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class B2T(Scheme):
    """Bottom-to-top connection (``"b2t"``).

    Attributes:
        sublayers_per_block: sublayers that the skip spans. Where it spans one (parallel blocks) it carries
            what the residual carries, ``N(2x + F(x))``. A last block cut short has no skip.
    """

    name: ClassVar[str] = "b2t"
    family: ClassVar[str] = "norm placement"
    year: ClassVar[int] = 2022
    paper: ClassVar[str] = "2206.00330"
    formula: ClassVar[str] = "x' = N(x + F(x)), in a block's last sublayer N(x + F(x) + x_block)"
    no_exact_start: ClassVar[str | None] = "the stream itself is normed at every sublayer."
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=0.67, has_history=True, traffic=3.5
    )

    sublayers_per_block: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sublayers_per_block < 1:
            raise ConfigError(f"sublayers_per_block={self.sublayers_per_block!r} must be at least 1.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build the one of sublayer ``index``."""
        place = index % self.sublayers_per_block
        return B2TConnection(
            norm.build(width), opens_block=place == 0, closes_block=place == self.sublayers_per_block - 1
        )

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """Build the pair's way in and out; the stream is already normed."""
        return B2TTrunk(connections, nn.Identity())

    def branch_init_scale(self, num_sublayers: int) -> float:
        """``L ** -0.5`` for L blocks, as in the authors' code."""
        return (-(-num_sublayers // self.sublayers_per_block)) ** -0.5

    def output_init_scale(self, num_sublayers: int) -> float:
        """Writes are damped by ``branch_init_scale`` alone."""
        return 1.0
