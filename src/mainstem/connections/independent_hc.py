"""Independent Hyper-Connections: the residual of HY-V4, four streams that are never mixed."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from torch import nn

from mainstem.connections._base import Connection, Properties
from mainstem.connections._norms import NormConfig
from mainstem.connections._streams import Collapse, HeadStart, SigmoidCoefficients, StreamHead, logit
from mainstem.connections.identity_hc import GatedStreamsScheme, GateStart, IdentityHCConnection


class IndependentHCConnection(IdentityHCConnection):
    """``X_i' = X_i + (multiplier sigmoid(w_i) + epsilon) F(N(sum_j (sigmoid(r_j) + epsilon) X_j))``.

    :class:`IdentityHCConnection` as HY-V4 has it: an epsilon beside both sigmoids, reads that start at
    ``1/n``, a learned sum at the end (:class:`~mainstem.connections._streams.StreamHead`, started alike).

    Shapes, parameters and cost: those of :class:`IdentityHCConnection`.
    At initialisation: read biases ``-log(n - 1)``, whose sigmoid is ``1/n``; write biases 0, scales 0.01,
    projection N(0, 0.02^2): the plain residual but for what the small projection predicts and the epsilons.
    ``exact_start`` has a projection of 0, and biases that make the sum of reads, and each write, 1.
    Source: ``HYV4HyperConnection`` and ``HYV4HyperHead`` of transformers 5.24 with ``_init_weights`` (read in
    code; no paper was found). Departure: the inverse RMS is taken before the product, not after it, which is
    the same number.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndependentHC(GatedStreamsScheme):
    """Independent Hyper-Connections (``"independent_hc"``).

    Attributes:
        write_epsilon: added to the write's sigmoid.
    """

    name: ClassVar[str] = "independent_hc"
    year: ClassVar[int] = 2026
    paper: ClassVar[str] = "HY-V4 (transformers)"
    formula: ClassVar[str] = "X_i' = X_i + (2 s(w_i) + eps) F(N(sum_j (s(r_j) + eps) X_j))"
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=0.0011, num_streams=4, traffic=9.0
    )
    published_collapse: ClassVar[Collapse] = "head"

    read_epsilon: float = 1e-6
    write_epsilon: float = 1e-6

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one."""
        gates = SigmoidCoefficients(width=width, num_streams=self.num_streams, num_logits=0, eps=norm.eps)
        start = self.gate_start(index, self.write_epsilon)
        return IndependentHCConnection(norm=norm.build(width), gates=gates, start=start)

    def gate_start(self, index: int, write_epsilon: float = 0.0) -> GateStart:
        """Reads start at ``1/n``."""
        start = super().gate_start(index, write_epsilon)
        if self.exact_start:
            return start
        return dataclasses.replace(
            start, read_logits=(-math.log(max(self.num_streams - 1, 1)),) * self.num_streams
        )

    def build_head(self, *, width: int, norm: NormConfig) -> nn.Module:
        """Build the learned sum with the same epsilon."""
        n, epsilon = self.num_streams, self.read_epsilon
        if self.exact_start:
            start = HeadStart(bias=logit(1 / n - epsilon), scale=0.01)
        else:
            start = HeadStart(bias=-math.log(max(n - 1, 1)), projection_std=0.02, scale=0.01)
        return StreamHead(width=width, num_streams=n, eps=norm.eps, epsilon=epsilon, start=start)
