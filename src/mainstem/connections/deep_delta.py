"""Deep Delta Learning: a branch names a direction, and the stream along it is overwritten."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig
from mainstem.connections._policy import coefficient_dtype
from mainstem.errors import ConfigError


class DeepDeltaConnection(Connection):
    """``x' = x + beta k (v - <k, x>)`` with ``k = F(N(x)) / |F(N(x))|``, one value ``v`` a token.

        beta = 2 sigmoid(gate_weight . N(x) + gate_bias)             0 keeps, 1 overwrites, 2 reflects
        v    = value_scale * sigmoid(value_weight . x + value_bias)

    Shapes: stream, read and update ``[batch, pos, width]``; beta, ``v`` and ``<k, x>`` ``[batch, pos, 1]``;
    both weights ``[width]``, both biases ``[1]``. Parameters: one norm and 2 width + 2; none is decayed.
    FLOPs: 11 a channel and the norm. Moved: 3 elements a channel.
    At initialisation: beta is 1 up to what the drawn weights (``N(0, 0.25 / width)``) make of the read, so
    that a branch replaces what the stream holds in its direction, and the size of what it returns is without
    effect. The coefficients are computed in fp32 at least.
    A zero update leaves the stream as it is: its length is ``sqrt(|F|^2 + eps^2)``.
    Frozen for the ledger: carry erases, ``s - beta k <k, s>``; inject is ``beta v / |F|`` times the update.
    Source: Zhang et al. 2026 (arXiv 2601.00417), the form with ``d_v = 1``. Read: the authors' code
    (``yifanzhang-pro/deep-delta-learning``, ``model/DDL-vdim1-gpt-mha-rope.py`` and ``init_utils.py``) of
    July 2026, whose defaults these are; an earlier file, ``DDL-vdim1.py``, has ``v = 2`` for all tokens.
    Departures: the value's bias starts at 0, where theirs is drawn; the gate with a hidden layer and the form
    with ``d_v > 1`` channels of value, with its convolutions, are left out.
    """

    def __init__(self, norm: nn.Module, width: int, beta_start: float, value_scale: float, eps: float):
        super().__init__()
        self.norm = norm
        self.beta_start = beta_start
        self.value_scale = value_scale
        self.eps = eps
        self.gate_weight = nn.Parameter(torch.empty(width))
        self.gate_bias = nn.Parameter(torch.empty(1))
        self.value_weight = nn.Parameter(torch.empty(width))
        self.value_bias = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Norm to gain 1; weights drawn; the gate's bias so that beta is ``beta_start`` where they give 0."""
        super().reset_parameters()
        std = 0.5 * self.gate_weight.shape[0] ** -0.5
        nn.init.normal_(self.gate_weight, std=std)
        nn.init.normal_(self.value_weight, std=std)
        nn.init.constant_(self.gate_bias, math.log(self.beta_start / (2.0 - self.beta_start)))
        nn.init.zeros_(self.value_bias)

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed stream and beta."""
        read = self.norm(stream)
        wide = torch.promote_types(read.dtype, torch.float32)
        logit = (read.to(wide) * self.gate_weight.to(wide)).sum(-1, keepdim=True) + self.gate_bias.to(wide)
        return read, 2.0 * torch.sigmoid(logit)

    def _value(self, stream: Tensor) -> Tensor:
        wide = coefficient_dtype(stream)
        weighed = (stream.to(wide) * self.value_weight.to(wide)).sum(-1, keepdim=True)
        return self.value_scale * torch.sigmoid(weighed + self.value_bias.to(wide))

    def _inverse_length(self, update: Tensor) -> Tensor:
        return torch.rsqrt(update.square().sum(-1, keepdim=True) + self.eps**2)

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the stream with what it holds along the update replaced."""
        assert isinstance(stream, Tensor)
        assert isinstance(context, Tensor)
        wide = torch.promote_types(stream.dtype, torch.float32)
        x, direction = stream.to(wide), update.to(wide)
        direction = direction * self._inverse_length(direction)
        held = (direction * x).sum(-1, keepdim=True)
        return stream + (context * (self._value(x) - held) * direction).to(stream.dtype)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry erases along the frozen direction; inject weighs."""
        assert isinstance(stream, Tensor)
        assert isinstance(context, Tensor)
        inverse = self._inverse_length(update)
        direction = update * inverse
        weight = context * self._value(stream) * inverse

        def carry(s: Stream) -> Stream:
            assert isinstance(s, Tensor)
            return s - context * direction * (direction * s).sum(-1, keepdim=True)

        return AffineStep(carry=carry, inject=lambda u: weight * u)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepDelta(Scheme):
    """Deep Delta Learning with one value a token (``"deep_delta"``).

    Attributes:
        beta_start: how far a write replaces what it finds, at the start; between 0 and 2, the published 1.
        value_scale: the largest value that can be written.
        eps: the length of an update below which it counts as none.
    """

    name: ClassVar[str] = "deep_delta"
    family: ClassVar[str] = "geometry"
    year: ClassVar[int] = 2026
    paper: ClassVar[str] = "2601.00417"
    formula: ClassVar[str] = "x' = x + beta k (v - <k, x>), k = F / |F|"
    no_exact_start: ClassVar[str | None] = (
        "only the direction of an update is written, and beta scales erasing and writing together: at 0 it "
        "is the identity, and no beta leaves the addition alone."
    )
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=False, start_distance=0.89)

    beta_start: float = 1.0
    value_scale: float = 4.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta_start < 2:
            raise ConfigError(f"beta_start={self.beta_start!r} must be between 0 and 2, both excluded.")
        if not (self.value_scale > 0 and self.eps > 0):
            raise ConfigError(
                f"value_scale={self.value_scale!r} and eps={self.eps!r} must both be greater than 0."
            )

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return DeepDeltaConnection(norm.build(width), width, self.beta_start, self.value_scale, self.eps)

    def output_init_scale(self, num_sublayers: int) -> float:
        """The published initial values divide by ``sqrt(blocks)``; the direction does not know of it."""
        return 1.0
