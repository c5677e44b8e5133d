"""LayerNorm Scaling (LNS): Pre-LN whose norms speak more quietly the deeper they stand."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig, set_gain
from mainstem.connections._policy import coefficient, coefficient_dtype
from mainstem.errors import ConfigError


class LayerNormScalingConnection(Connection):
    """``x' = x + F(N(x) / sqrt(b))``, ``b`` the number of the block, counted from 1.

    Shapes: stream, read and update ``[batch, pos, width]``; ``depth_root`` is ``sqrt(b)`` as a buffer, the
    same for both sublayers of a block. Parameters: one norm. FLOPs: 1 a channel. Moved: 3 elements a
    channel.
    At initialisation: gain 1, not the plain residual; with a gain of ``sqrt(b)`` it is (the factor is
    divided out again, to the bit in fp32; a bf16 gain holds it to three digits).
    Source: Sun et al. 2025 (arXiv 2502.05795). Read: the authors' repository
    (``lmsdss/LayerNorm-Scaling``, ``modeling_llama.py``, mode LNS), which multiplies the normed stream by
    ``1 / sqrt(layer_index + 1)``.
    """

    depth_root: Tensor

    def __init__(self, norm: nn.Module, depth_root: float, folded: bool):
        super().__init__()
        self.norm = norm
        self.folded = folded
        self.register_buffer("depth_root", coefficient(depth_root))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Norm to gain 1, or to the factor's inverse."""
        super().reset_parameters()
        if self.folded:
            set_gain(self.norm, self.depth_root.item())

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed stream, made smaller."""
        read: Tensor = self.norm(stream)
        return (read.to(coefficient_dtype(read)) / self.depth_root).to(read.dtype), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the sum."""
        assert isinstance(stream, Tensor)
        return stream + update

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry and inject are the identity."""
        return AffineStep(carry=lambda s: s, inject=lambda u: u)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNormScaling(Scheme):
    """LayerNorm Scaling (``"layer_norm_scaling"``).

    With ``exact_start`` the factor is folded into each norm's gain, which is then trained from there.

    Attributes:
        sublayers_per_block: 2, or 1 in a stack of parallel blocks.
    """

    name: ClassVar[str] = "layer_norm_scaling"
    family: ClassVar[str] = "norm placement"
    year: ClassVar[int] = 2025
    paper: ClassVar[str] = "2502.05795"
    formula: ClassVar[str] = "x' = x + F(N(x) / sqrt(block))"
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=False, start_distance=0.60)

    sublayers_per_block: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sublayers_per_block < 1:
            raise ConfigError(f"sublayers_per_block={self.sublayers_per_block!r} must be at least 1.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build the one of sublayer ``index``."""
        block = index // self.sublayers_per_block + 1
        return LayerNormScalingConnection(norm.build(width), block**0.5, self.exact_start)

    def output_init_scale(self, num_sublayers: int) -> float:
        """1: the authors report that a scaled initialisation on top takes the gain away (their README)."""
        return super().output_init_scale(num_sublayers) if self.exact_start else 1.0
