"""Keel: Post-LN with a norm on the way into the branch and a carry as strong as the stack is deep."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig, frozen_norm
from mainstem.connections._policy import coefficient, weigh
from mainstem.errors import ConfigError


class KeelConnection(Connection):
    """``x' = N2(carry_scale * x + F(N1(x)))``.

    Shapes: stream, read and update ``[batch, pos, width]``; ``carry_scale`` is a buffer. Parameters: two
    norms. FLOPs: 2 a channel and two norms. Moved: 3 elements a channel.
    At initialisation: not the plain residual.
    Source: Chen and Wei 2026 (arXiv 2601.19895). **Read only in secondary sources**: the abstract (a Post-LN
    transformer with a highway-style shortcut and an extra norm on the branch), and a third party's
    implementation of this formula with a carry of L, its square root or a constant (``BrianCLong/summit``,
    ``docs/architecture/keel.md`` and its block). Another digest writes a convex gate ``N(a x + (1 - a)
    F(x))`` instead, which up to the norm is this carry with ``a / (1 - a)``. Not settled by these: whether L
    counts blocks or sublayers (sublayers here), and whether the first sublayer differs.
    """

    carry_scale: Tensor

    def __init__(self, norm: nn.Module, write_norm: nn.Module, carry_scale: float):
        super().__init__()
        self.norm = norm
        self.write_norm = write_norm
        self.register_buffer("carry_scale", coefficient(carry_scale))

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the stream, normed once more."""
        return self.norm(stream), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the normed, weighted sum."""
        assert isinstance(stream, Tensor)
        return self.write_norm(weigh(self.carry_scale, stream) + update)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze the outer norm at the weighted sum."""
        assert isinstance(stream, Tensor)
        linear, offset = frozen_norm(self.write_norm, weigh(self.carry_scale, stream) + update)

        def carry(s: Stream) -> Stream:
            assert isinstance(s, Tensor)
            return linear(weigh(self.carry_scale, s))

        return AffineStep(carry=carry, inject=linear, offset=offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keel(Scheme):
    """Keel (``"keel"``); its formula was read only in secondary sources, see :class:`KeelConnection`.

    Attributes:
        carry_scale: factor on the carried stream; None is the number of sublayers.
    """

    name: ClassVar[str] = "keel"
    family: ClassVar[str] = "norm placement"
    year: ClassVar[int] = 2026
    paper: ClassVar[str] = "2601.19895"
    formula: ClassVar[str] = "x' = N2(a x + F(N1(x))), a = S"
    no_exact_start: ClassVar[str | None] = "the stream itself is normed at every sublayer."
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=1.17, num_norms=2
    )

    carry_scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.carry_scale is not None and not self.carry_scale > 0:
            raise ConfigError(f"carry_scale={self.carry_scale!r} must be greater than 0.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        scale = float(num_sublayers) if self.carry_scale is None else self.carry_scale
        return KeelConnection(norm.build(width), norm.build(width), scale)

    def build_final_norm(self, *, width: int, norm: NormConfig) -> nn.Module:
        """The stream is already normed."""
        return nn.Identity()

    def output_init_scale(self, num_sublayers: int) -> float:
        """The carry already outweighs the writes."""
        return 1.0
