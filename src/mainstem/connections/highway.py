"""Highway: a gate that decides, channel by channel, how much of the stream the update replaces."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import (
    AffineStep,
    Connection,
    Context,
    ParameterGroup,
    Properties,
    Scheme,
    Stream,
)
from mainstem.connections._norms import NormConfig
from mainstem.connections._policy import coefficient_dtype


class HighwayConnection(Connection):
    """``x' = (1 - T) * x + T * F(N(x))`` with ``T = sigmoid(gate N(x) + gate_bias)``.

    Shapes: stream, read and update ``[batch, pos, width]``; ``gate`` is ``[width, width]``. Parameters: one
    norm and ``width^2 + width``. FLOPs a token: ``2 * width^2`` for the gate. Moved: 4 elements a channel
    (state, update, gate; one made). The gate is computed in fp32 at least.
    Value at initialisation: ``gate`` N(0, 1/width), ``gate_bias`` negative, so that most is carried. Not the
    plain residual.
    """

    def __init__(self, norm: nn.Module, *, width: int, bias_start: float):
        super().__init__()
        self.norm = norm
        self.bias_start = bias_start
        self.gate = nn.Parameter(torch.empty(width, width))
        self.gate_bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values again."""
        super().reset_parameters()
        nn.init.normal_(self.gate, std=self.gate.shape[0] ** -0.5)
        nn.init.constant_(self.gate_bias, self.bias_start)

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed stream, and the gate for :meth:`write`."""
        read: Tensor = self.norm(stream)
        wide = coefficient_dtype(read)
        opening = nn.functional.linear(read.to(wide), self.gate.to(wide), self.gate_bias.to(wide))
        return read, torch.sigmoid(opening)

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the stream, moved towards the update by the gate."""
        assert isinstance(stream, Tensor)
        assert isinstance(context, Tensor)
        moved = torch.lerp(stream.to(context.dtype), update.to(context.dtype), context)
        return moved.to(stream.dtype)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze the gate."""
        assert isinstance(context, Tensor)

        def carry(s: Stream) -> Stream:
            assert isinstance(s, Tensor)
            return (1.0 - context) * s

        return AffineStep(carry=carry, inject=lambda u: context * u)

    def parameter_groups(self) -> list[ParameterGroup]:
        """The gate's matrix is decayed, as matrices are; norm and bias are not."""
        return [
            ParameterGroup((*self.norm.parameters(), self.gate_bias)),
            ParameterGroup((self.gate,), weight_decay=True),
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Highway(Scheme):
    """Highway network (``"highway"``).

    Source: Srivastava, Greff and Schmidhuber 2015 (arXiv 1505.00387), eqs. 2 and 3. Read: two summaries with
    the equations and the rule that the transform gate's bias starts negative; not read: the values of it that
    the paper searches. Departure: the paper has no norms; here the branch and the gate read the normed
    stream, as in every scheme that can be put around a transformer's branches.

    Attributes:
        bias_start: initial value of the gate's bias; -2 opens it by 12 %.
    """

    name: ClassVar[str] = "highway"
    family: ClassVar[str] = "gates"
    year: ClassVar[int] = 2015
    paper: ClassVar[str] = "1505.00387"
    formula: ClassVar[str] = "x' = (1 - T) x + T F(N(x)), T = sigmoid(W N(x) + b)"
    no_exact_start: ClassVar[str | None] = "what the gate lets in it takes away from what is carried."
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=1.25, traffic=4.0
    )

    bias_start: float = -2.0

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return HighwayConnection(norm.build(width), width=width, bias_start=self.bias_start)

    def output_init_scale(self, num_sublayers: int) -> float:
        """The stream is an average of the writes, which do not add up."""
        return 1.0
