"""Identity Hyper-Connections: n streams that are read and written by the token, and never mixed."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from mainstem.connections._base import Connection, ParameterGroup, Promise, Properties
from mainstem.connections._norms import NormConfig
from mainstem.connections._streams import (
    SigmoidCoefficients,
    StreamsConnection,
    StreamsScheme,
    exact_read_logits,
    logit,
    start_at_,
)
from mainstem.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateStart:
    """Initial values of the gates of reads and writes, and the constants beside their sigmoids.

    Attributes:
        read_logits, write_logit: biases.
        projection_std: of the projection's normal entries; 0 leaves reads and writes alike for all tokens.
        scale: factor on what is predicted.
        read_epsilon, write_epsilon: added to the sigmoids.
        multiplier: of the write's sigmoid.
    """

    read_logits: tuple[float, ...]
    write_logit: float = 0.0
    projection_std: float = 0.02
    scale: float = 0.01
    read_epsilon: float = 0.0
    write_epsilon: float = 0.0
    multiplier: float = 2.0


class IdentityHCConnection(StreamsConnection):
    """``X_i' = X_i + write_i F(N(sum_j read_j X_j))``, the residual matrix of mHC being the identity.

    ``read = sigmoid(z_read) + read_epsilon`` and ``write = multiplier * sigmoid(z_write) + write_epsilon``;
    ``z = scale * (RMS(vec X) projection^T) + bias``, per token.

    Shapes: stream ``[batch, pos, n, width]``; read and update ``[batch, pos, width]``.
    Parameters: ``2 n (n width + 1) + 2`` and the branch's norm. FLOPs a token: ``4 n^2 width`` for the gates,
    ``4 n width`` for reads and writes. Moved by a fused write: ``2n + 1`` widths.
    At initialisation: biases 0, scales 0.01, projection N(0, 0.02^2), so nearly ``read = 1/2`` each and
    ``write = 1``: the plain residual but for what the norm's epsilon sees of the read's size and for what the
    small projection predicts. ``exact_start``: projection 0, ``write = 1``, reads that sum to 1 and differ by
    sublayer; the gradient of reads is then as small as the norm's epsilon until the first step has told the
    streams apart.
    Source: the ablation of mHC without its residual matrix (Xie et al. 2025, arXiv 2512.24880, table 1, which
    fixes it to the identity), also known as iHC; formulas of its eqs. 7 and 8 read there. No reference
    implementation was found; the one of HY-V4 is :class:`IndependentHC`.
    """

    promises: frozenset[Promise] = frozenset({"rows", "columns", "orthogonal"})

    def __init__(self, *, norm: nn.Module, gates: SigmoidCoefficients, start: GateStart):
        super().__init__(norm)
        self.gates = gates
        self.start = start
        self.read_epsilon, self.write_epsilon = start.read_epsilon, start.write_epsilon
        self.multiplier = start.multiplier
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projection, set the gates."""
        super().reset_parameters()
        nn.init.normal_(self.gates.projection, std=self.start.projection_std)
        start_at_(self.gates.bias, self.start_bias())
        nn.init.constant_(self.gates.scale, self.start.scale)

    def start_bias(self) -> list[float]:
        """Return the gates' initial biases: reads, then writes."""
        return [*self.start.read_logits, *[self.start.write_logit] * len(self.start.read_logits)]

    def coefficients(self, stream: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return both gates; no mix."""
        read, write = self.gates(stream)
        return (
            read.sigmoid() + self.read_epsilon,
            self.multiplier * write.sigmoid() + self.write_epsilon,
            None,
        )

    def parameter_groups(self) -> list[ParameterGroup]:
        """The projection is decayed; gates' biases and scales and the norm are not."""
        return [ParameterGroup(tuple(self.norm.parameters())), *self.gates.parameter_groups()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedStreamsScheme(StreamsScheme):
    """A scheme whose reads and writes are sigmoids.

    Attributes:
        multiplier: of the write's sigmoid: 2 in the paper, Liger, Megatron and transformers' DeepSeek-V4, 1
            by default in TileKernels.
        read_epsilon: added to the read's sigmoid (1e-6 in DeepSeek-V4).
    """

    multiplier: float = 2.0
    read_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.multiplier > 0 or self.read_epsilon < 0:
            raise ConfigError(
                f"{self.name} needs multiplier above 0 and read_epsilon of at least 0; given "
                f"{self.multiplier} and {self.read_epsilon}."
            )
        if self.exact_start and (self.multiplier <= 1 or self.num_streams < 2):
            raise ConfigError(
                f"{self.name} with exact_start=True needs multiplier above 1, so that a sigmoid can write 1, "
                f"and at least 2 streams; given multiplier={self.multiplier}, num_streams={self.num_streams}."
            )

    def gate_start(self, index: int, write_epsilon: float = 0.0) -> GateStart:
        """Return the gates' initial values at sublayer ``index``."""
        n = self.num_streams
        start = GateStart(
            read_logits=(0.0,) * n,
            read_epsilon=self.read_epsilon,
            write_epsilon=write_epsilon,
            multiplier=self.multiplier,
        )
        if not self.exact_start:
            return start
        return dataclasses.replace(
            start,
            read_logits=exact_read_logits(n, index % n, self.read_epsilon),
            write_logit=logit((1 - write_epsilon) / self.multiplier),
            projection_std=0.0,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdentityHC(GatedStreamsScheme):
    """Identity Hyper-Connections (``"identity_hc"``)."""

    name: ClassVar[str] = "identity_hc"
    year: ClassVar[int] = 2025
    paper: ClassVar[str] = "2512.24880"
    formula: ClassVar[str] = "X_i' = X_i + 2 s(w_i) F(N(sum_j s(r_j) X_j))"
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=0.0011, num_streams=4, traffic=9.0
    )

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one."""
        gates = SigmoidCoefficients(width=width, num_streams=self.num_streams, num_logits=0, eps=norm.eps)
        return IdentityHCConnection(norm=norm.build(width), gates=gates, start=self.gate_start(index))
