"""SiameseNorm: a Post-LN-like and a Pre-LN-like stream around one branch."""

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


class SiameseNormConnection(Connection):
    """``h = N_post(x)``, ``z = F(N_in(h + N_pre(y)))``; ``x' = h + z / c``, ``y' = y + z``.

        x ─► N_post ─┬───────────────────────(+)─► x'
                     └─(+)─► N_in ─► F ─┬─ /c ┘
        y ──┬─ N_pre ──┘                └─────┐
            └────────────────────────────────(+)─► y'

    Shapes: the stream is the pair ``(x, y)``, each ``[batch, pos, width]``; read and update likewise. The
    context is ``h``. Parameters: three norms; ``inject_scale`` is ``1 / c`` as a buffer, ``c = sqrt(2 b)``
    in block b counted from 1. FLOPs: 4 a channel and three norms. Moved: 5 elements a channel.
    At initialisation: both streams are the embedding. Not the plain residual.
    Source: Li et al. 2026 (arXiv 2602.08064). Read: the authors' DeiT (``Qwen-Applications/SiameseNorm``,
    ``deit-model-siamesenorm.py``); their language model's patch could not be had, so that its ``c`` and the
    norms it leaves out, if any, are not known.
    """

    inject_scale: Tensor

    def __init__(self, norm: nn.Module, post_norm: nn.Module, pre_norm: nn.Module, inject_scale: float):
        super().__init__()
        self.norm = norm
        self.post_norm = post_norm
        self.pre_norm = pre_norm
        self.register_buffer("inject_scale", coefficient(inject_scale))

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed sum of both normed streams, and the normed first one."""
        x, y = stream
        post = self.post_norm(x)
        return self.norm(post + self.pre_norm(y)), post

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return both streams with the update added."""
        assert isinstance(context, Tensor)
        return context + weigh(self.inject_scale, update), stream[1] + update

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze the first stream's norm at the stream."""
        linear, offset = frozen_norm(self.post_norm, stream[0])

        def carry(s: Stream) -> Stream:
            return linear(s[0]), s[1]

        def inject(u: Tensor) -> Stream:
            return weigh(self.inject_scale, u), u

        start = None if offset is None else (offset.expand_as(update), torch.zeros_like(update))
        return AffineStep(carry=carry, inject=inject, offset=start)


class SiameseNormTrunk(Trunk):
    """Both streams start as the embedding; before the final norm stands ``N_x(x) + N_y(y)``."""

    def __init__(
        self,
        connections: Sequence[Connection],
        final_norm: nn.Module,
        post_norm: nn.Module,
        pre_norm: nn.Module,
    ):
        super().__init__(connections, final_norm)
        self.post_norm = post_norm
        self.pre_norm = pre_norm

    def expand(self, x: Tensor) -> Stream:
        """The embedding twice, as two tensors: a compiled first block would tell one from two."""
        return x, x.clone()

    def collapse(self, stream: Stream) -> Tensor:
        """The sum of both normed streams."""
        return self.post_norm(stream[0]) + self.pre_norm(stream[1])

    def linearize_collapse(self, stream: Stream) -> Callable[[Stream], Tensor]:
        """Freeze both norms."""
        post, _ = frozen_norm(self.post_norm, stream[0])
        pre, _ = frozen_norm(self.pre_norm, stream[1])
        return lambda s: post(s[0]) + pre(s[1])

    def collapse_offset(self) -> Tensor | None:
        """The biases of both norms."""
        post, pre = (getattr(norm, "bias", None) for norm in (self.post_norm, self.pre_norm))
        return None if post is None or pre is None else post + pre


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiameseNorm(Scheme):
    """SiameseNorm (``"siamese_norm"``).

    Attributes:
        sublayers_per_block: 2, or 1 in a stack of parallel blocks.
    """

    name: ClassVar[str] = "siamese_norm"
    family: ClassVar[str] = "norm placement"
    year: ClassVar[int] = 2026
    paper: ClassVar[str] = "2602.08064"
    formula: ClassVar[str] = "z = F(N(N(x) + N(y))), x' = N(x) + z / sqrt(2 block), y' = y + z"
    no_exact_start: ClassVar[str | None] = (
        "what a branch reads is normed twice, and the second norm takes out what epsilon did to the first."
    )
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False,
        start_distance=0.25,
        num_streams=2,
        has_history=True,
        num_norms=3,
        traffic=5.0,
    )

    sublayers_per_block: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sublayers_per_block < 1:
            raise ConfigError(f"sublayers_per_block={self.sublayers_per_block!r} must be at least 1.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build the one of sublayer ``index``."""
        block = index // self.sublayers_per_block + 1
        norms = [norm.build(width) for _ in range(3)]
        return SiameseNormConnection(*norms, inject_scale=(2 * block) ** -0.5)

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """Build the pair's way in and out."""
        final = self.build_final_norm(width=width, norm=norm)
        return SiameseNormTrunk(connections, final, norm.build(width), norm.build(width))
