"""DeepNorm: Post-LN with an amplified carry and damped branches."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig, frozen_norm
from mainstem.connections._policy import coefficient, weigh


class DeepNormConnection(Connection):
    """``x' = N(carry_scale * x + F(x))`` with ``carry_scale = num_sublayers ** (1/4)``.

    Shapes: stream, read and update ``[batch, pos, width]``. Parameters: one norm; ``carry_scale`` is a
    buffer, not a Python number, so that one compiled block serves every depth. Cost: one addition, one
    product, one norm.
    Source: Wang et al. 2022 (arXiv 2203.00555), figure 2, decoder-only row: ``alpha = (2L)^(1/4)`` for L
    blocks of two sublayers, and the value, output and feed-forward matrices times ``beta = (8L)^(-1/4)`` at
    initialisation (:meth:`DeepNorm.branch_init_scale`). Stated here in sublayers, S = 2L. Not the plain
    residual at the start.
    """

    carry_scale: Tensor

    def __init__(self, norm: nn.Module, carry_scale: float):
        super().__init__()
        self.norm = norm
        # Saved, though the config implies it: a model built on the meta device has only what it loads.
        self.register_buffer("carry_scale", coefficient(carry_scale))

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the stream as it is: it was normed when it was written."""
        assert isinstance(stream, Tensor)
        return stream, None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the normed, weighted sum."""
        assert isinstance(stream, Tensor)
        return self.norm(weigh(self.carry_scale, stream) + update)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze the norm at the weighted sum."""
        assert isinstance(stream, Tensor)
        linear, offset = frozen_norm(self.norm, weigh(self.carry_scale, stream) + update)

        def carry(s: Stream) -> Stream:
            assert isinstance(s, Tensor)
            return linear(weigh(self.carry_scale, s))

        return AffineStep(carry=carry, inject=linear, offset=offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepNorm(Scheme):
    """DeepNorm for a decoder-only or encoder-only stack (``"deep_norm"``)."""

    name: ClassVar[str] = "deep_norm"
    family: ClassVar[str] = "norm placement"
    year: ClassVar[int] = 2022
    paper: ClassVar[str] = "2203.00555"
    formula: ClassVar[str] = "x' = N(alpha x + F(x)), alpha = S^(1/4)"
    no_exact_start: ClassVar[str | None] = "the stream itself is normed at every sublayer."
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=False, start_distance=0.58)

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return DeepNormConnection(norm.build(width), carry_scale=num_sublayers**0.25)

    def build_final_norm(self, *, width: int, norm: NormConfig) -> nn.Module:
        """The stream is already normed."""
        return nn.Identity()

    def branch_init_scale(self, num_sublayers: int) -> float:
        """``beta = (4 * num_sublayers) ** (-1/4)``, which is the paper's ``(8L)^(-1/4)``."""
        return (4 * num_sublayers) ** -0.25

    def output_init_scale(self, num_sublayers: int) -> float:
        """Writes are damped by ``branch_init_scale`` alone."""
        return 1.0
