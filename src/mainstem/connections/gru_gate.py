"""GRU gate (GTrXL): the stream is a recurrent state, every sublayer one step of a gated recurrent unit."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

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


class GRUGateConnection(Connection):
    """One step of a gated recurrent unit with state x and input ``y = relu(F(N(x)))``::

        r = sigmoid(W_r y + U_r x)          z = sigmoid(W_z y + U_z x - carry_bias)
        h = tanh(W_g y + U_g (r * x))       x' = (1 - z) * x + z * h

    Shapes: stream, read and update ``[batch, pos, width]``; ``update_maps`` holds W_r, W_z, W_g,
    ``state_maps`` U_r, U_z, U_g, each ``[3 * width, width]``. Parameters: one norm and ``6 width^2 + width``.
    FLOPs a token: ``12 width^2``. Moved by one fused step: 3 elements a channel. Computed in fp32 at
    least.
    Value at initialisation: matrices N(0, 1/width), ``carry_bias`` 2, so that z is about 0.12 and most is
    carried. Not the plain residual.
    Frozen, ``tanh(a)`` is ``a`` times the number ``tanh(a) / a``, and the relu a mask: carry and inject are
    linear and exact.
    """

    def __init__(self, norm: nn.Module, *, width: int, bias_start: float, relu: bool):
        super().__init__()
        self.norm = norm
        self.bias_start = bias_start
        self.relu = relu
        self.update_maps = nn.Parameter(torch.empty(3 * width, width))
        self.state_maps = nn.Parameter(torch.empty(3 * width, width))
        self.carry_bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values again."""
        super().reset_parameters()
        for maps in (self.update_maps, self.state_maps):
            nn.init.normal_(maps, std=maps.shape[1] ** -0.5)
        nn.init.constant_(self.carry_bias, self.bias_start)

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed stream."""
        return self.norm(stream), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the next state."""
        assert isinstance(stream, Tensor)
        wide = coefficient_dtype(stream)
        x, y = stream.to(wide), self._input(update.to(wide))
        reset, let_in, from_update = self._gates(x, y)
        candidate = torch.tanh(from_update + linear(reset * x, self._candidate_map(wide)))
        return torch.lerp(x, candidate, let_in).to(stream.dtype)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze both gates, the mask of the relu, and the slope of the tanh from the origin."""
        assert isinstance(stream, Tensor)
        wide = coefficient_dtype(stream)
        reset, let_in, from_update = self._gates(stream.to(wide), self._input(update.to(wide)))
        candidate_map = self._candidate_map(wide)
        inner = from_update + linear(reset * stream, candidate_map)
        slope = torch.where(inner == 0, torch.ones_like(inner), torch.tanh(inner) / inner)
        open_channels = (update > 0).to(update.dtype) if self.relu else torch.ones_like(update)

        def carry(s: Stream) -> Stream:
            assert isinstance(s, Tensor)
            return (1.0 - let_in) * s + let_in * slope * linear(reset * s, candidate_map)

        def inject(u: Tensor) -> Stream:
            return let_in * slope * linear(open_channels * u, self.update_maps.to(wide).chunk(3)[2])

        return AffineStep(carry=carry, inject=inject)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Matrices are decayed; norm and bias are not."""
        return [
            ParameterGroup((*self.norm.parameters(), self.carry_bias)),
            ParameterGroup((self.update_maps, self.state_maps), weight_decay=True),
        ]

    def _input(self, update: Tensor) -> Tensor:
        return torch.relu(update) if self.relu else update

    def _candidate_map(self, dtype: torch.dtype) -> Tensor:
        return self.state_maps.chunk(3)[2].to(dtype)

    def _gates(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return r, z, and the update's part of what the tanh gets."""
        width = x.shape[-1]
        of_update = linear(y, self.update_maps.to(y.dtype)).chunk(3, dim=-1)
        of_state = linear(x, self.state_maps[: 2 * width].to(x.dtype)).chunk(2, dim=-1)
        let_in = torch.sigmoid(of_update[1] + of_state[1] - self.carry_bias.to(x.dtype))
        return torch.sigmoid(of_update[0] + of_state[0]), let_in, of_update[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRUGate(Scheme):
    """The GRU-type gating layer of GTrXL (``"gru_gate"``).

    Source: Parisotto et al. 2019 (arXiv 1910.06764), section 3.2, "Gated-Recurrent-Unit-type gating". Read:
    DI-engine's implementation of it (``ding/torch_utils/network/gtrxl.py``), with its bias of 2, whose relu
    follows the attention, and the feed-forward as that one's own last activation. Its matrices
    start as ``nn.Linear`` does; ours at N(0, 1/width). x-transformers' ``GRUGating`` is an ``nn.GRUCell``
    without the bias, which resets after the matrix, not before.

    Attributes:
        bias_start: initial value of ``carry_bias``; 2 lets in 12 %.
        relu: whether the update passes a relu before the gate, as in the paper.
    """

    name: ClassVar[str] = "gru_gate"
    family: ClassVar[str] = "gates"
    year: ClassVar[int] = 2019
    paper: ClassVar[str] = "1910.06764"
    formula: ClassVar[str] = "x' = (1 - z) x + z tanh(W y + U (r x)), y = relu(F(N(x)))"
    no_exact_start: ClassVar[str | None] = "what the gate lets in it takes away from what is carried."
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=False, start_distance=1.36)

    bias_start: float = 2.0
    relu: bool = True

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return GRUGateConnection(norm.build(width), width=width, bias_start=self.bias_start, relu=self.relu)

    def output_init_scale(self, num_sublayers: int) -> float:
        """The state is an average of bounded candidates; writes do not add up."""
        return 1.0
