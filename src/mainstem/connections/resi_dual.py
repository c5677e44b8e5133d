"""ResiDual: a Post-LN stream to read from and, beside it, the plain sum of all writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream, Trunk
from mainstem.connections._norms import NormConfig, frozen_norm
from mainstem.connections._policy import coefficient, weigh
from mainstem.errors import ConfigError


class ResiDualConnection(Connection):
    """``x' = N(x + F(x))`` and ``d' = d + sum_scale * F(x)``.

        x ──┬──────────────(+)── N ──► x'
            └─► F ─┬────────┘
        d ─────────┴─ sum_scale ─(+)─► d'

    Shapes: the stream is the pair ``(x, d)``, each ``[batch, pos, width]``; read and update likewise.
    Parameters: one norm; ``sum_scale`` is a buffer. FLOPs: 3 a channel and a norm. Moved: 5 elements a
    channel.
    At initialisation: ``x`` and ``d`` start as the embedding. Not the plain residual.
    Source: Xie et al. 2023 (arXiv 2304.14802). Read: the authors' code (``microsoft/ResiDual``),
    which scales ``d`` by ``res_input_norm_scale``, the embedding included (1 by default; less keeps fp16 in
    range).
    """

    sum_scale: Tensor

    def __init__(self, norm: nn.Module, sum_scale: float):
        super().__init__()
        self.norm = norm
        self.register_buffer("sum_scale", coefficient(sum_scale))

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the Post-LN stream as it is."""
        assert isinstance(stream, tuple)
        return stream[0], None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the normed sum and the plain sum."""
        assert isinstance(stream, tuple)
        normed, summed = stream
        return self.norm(normed + update), summed + weigh(self.sum_scale, update)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze the norm at ``x + update``."""
        assert isinstance(stream, tuple)
        linear, offset = frozen_norm(self.norm, stream[0] + update)

        def carry(s: Stream) -> Stream:
            assert isinstance(s, tuple)
            return linear(s[0]), s[1]

        def inject(u: Tensor) -> Stream:
            return linear(u), weigh(self.sum_scale, u)

        start = None if offset is None else (offset.expand_as(update), torch.zeros_like(update))
        return AffineStep(carry=carry, inject=inject, offset=start)


class ResiDualTrunk(Trunk):
    """Starts both streams from the embedding and ends with ``x + N_d(d)``; nothing norms that sum again."""

    sum_scale: Tensor

    def __init__(self, connections: Sequence[Connection], sum_norm: nn.Module, sum_scale: float):
        super().__init__(connections, nn.Identity())
        self.sum_norm = sum_norm
        self.register_buffer("sum_scale", coefficient(sum_scale))

    def expand(self, x: Tensor) -> Stream:
        """The embedding, and the scaled embedding."""
        return x, weigh(self.sum_scale, x)

    def collapse(self, stream: Stream) -> Tensor:
        """The Post-LN stream plus the normed sum."""
        assert isinstance(stream, tuple)
        return stream[0] + self.sum_norm(stream[1])

    def linearize_collapse(self, stream: Stream) -> Callable[[Stream], Tensor]:
        """Freeze the norm of the sum."""
        assert isinstance(stream, tuple)
        linear, _ = frozen_norm(self.sum_norm, stream[1])

        def collapse(s: Stream) -> Tensor:
            assert isinstance(s, tuple)
            return s[0] + linear(s[1])

        return collapse

    def collapse_offset(self) -> Tensor | None:
        """The bias of the norm of the sum."""
        return self.sum_norm.bias if isinstance(self.sum_norm, nn.LayerNorm) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResiDual(Scheme):
    """ResiDual (``"resi_dual"``).

    Attributes:
        sum_scale: factor on everything that enters the plain sum; its norm takes it out again, up to its
        epsilon.
    """

    name: ClassVar[str] = "resi_dual"
    family: ClassVar[str] = "norm placement"
    year: ClassVar[int] = 2023
    paper: ClassVar[str] = "2304.14802"
    formula: ClassVar[str] = "x' = N(x + F(x)), d' = d + F(x), out = x + N(d)"
    no_exact_start: ClassVar[str | None] = "every branch reads a stream that is normed at every sublayer."
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=1.61, num_streams=2, has_history=True, traffic=5.0
    )

    sum_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sum_scale > 0:
            raise ConfigError(f"sum_scale={self.sum_scale!r} must be greater than 0.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return ResiDualConnection(norm.build(width), self.sum_scale)

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """Build the pair's way in and out."""
        return ResiDualTrunk(connections, norm.build(width), self.sum_scale)

    def output_init_scale(self, num_sublayers: int) -> float:
        """What branches read is normed at every write, and so is the sum at the end."""
        return 1.0
