"""LayerScale: what a branch returns is weighed channel by channel before it is added."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig
from mainstem.connections._policy import weigh


class LayerScaleConnection(Connection):
    """``x' = x + write_weight * F(N(x))`` with one learned weight a channel, or one for all of them.

    Shapes: stream, read and update ``[batch, pos, width]``; ``write_weight`` ``[num_weights]``, ``width`` of
    them or 1, which want fp32: a weight of 1e-5 has three digits in bf16. Parameters: ``num_weights``, and a
    norm if there is one; none is decayed. FLOPs: 2 a channel. Moved: 3 elements a channel.
    At initialisation: ``initial_value``; 1 is the plain residual. Small values are nearly the identity map,
    far from the plain residual; at 0 the matrices of the branches get a gradient from the second step on.
    Source: see :class:`LayerScale` and, for one weight, :class:`ReZero`.
    """

    def __init__(self, norm: nn.Module, num_weights: int, initial_value: float):
        super().__init__()
        self.norm = norm
        self.initial_value = initial_value
        self.write_weight = nn.Parameter(torch.full((num_weights,), initial_value))

    def reset_parameters(self) -> None:
        """Norm to gain 1, weights to the initial value."""
        super().reset_parameters()
        nn.init.constant_(self.write_weight, self.initial_value)

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the stream, normed if there is a norm."""
        return self.norm(stream), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the stream plus the weighed update, in the stream's dtype."""
        assert isinstance(stream, Tensor)
        return stream + weigh(self.write_weight, update.to(stream.dtype))

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry is the identity; inject weighs."""
        return AffineStep(carry=lambda s: s, inject=lambda u: weigh(self.write_weight, u))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerScale(Scheme):
    """LayerScale (``"layer_scale"``).

    Source: Touvron et al. 2021 (arXiv 2103.17239), eq. 4. Read: the authors' ``cait_models.py``
    (``facebookresearch/deit``), from which 1e-5 at 24 blocks and 1e-6 at 36 and 48 are; 0.1 for shallow
    stacks is quoted from memory of the paper.

    Attributes:
        initial_value: every weight at the start. None takes CaiT's rule by depth: 0.1 up to 18 blocks (36
            sublayers), 1e-5 up to 24, 1e-6 beyond; 1 with ``exact_start``. Zero is a value like any other.
    """

    name: ClassVar[str] = "layer_scale"
    family: ClassVar[str] = "branch scaling"
    year: ClassVar[int] = 2021
    paper: ClassVar[str] = "2103.17239"
    formula: ClassVar[str] = "x' = x + w * F(N(x)), w per channel"
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=False, start_distance=1.11)

    initial_value: float | None = None

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return LayerScaleConnection(norm.build(width), width, self._value(num_sublayers))

    def _value(self, num_sublayers: int) -> float:
        if self.exact_start:
            return 1.0
        if self.initial_value is not None:
            return self.initial_value
        return 0.1 if num_sublayers <= 36 else 1e-5 if num_sublayers <= 48 else 1e-6

    def output_init_scale(self, num_sublayers: int) -> float:
        """The weights already keep writes small, unless they start at 1."""
        return super().output_init_scale(num_sublayers) if self._value(num_sublayers) == 1.0 else 1.0
