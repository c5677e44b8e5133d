"""Frac-Connections: hyper-connections between fractions of a stream that is not widened."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mainstem.connections._base import (
    AffineStep,
    Connection,
    Context,
    MixingMatrix,
    ParameterGroup,
    Properties,
    Scheme,
    Stream,
)
from mainstem.connections._norms import NormConfig
from mainstem.connections._policy import coefficient_dtype
from mainstem.connections._stream_ops import mix_streams
from mainstem.connections._streams import carried_matrix, start_at_
from mainstem.connections.hyper_connections import dynamic_groups
from mainstem.errors import ConfigError


class FracConnection(Connection):
    """``H' = A^T H + diag(B) split(F(N(cat(Y^T H))))`` with ``H`` the stream as m fractions of ``width / m``.

    ``(Y, A) = static_mix + mix_scale * tanh(N_s(H) dynamic_mix^T)`` and
    ``B = static_write + write_scale * tanh(N_s(H) dynamic_write^T)``; row i belongs to fraction i, and the
    i-th fraction of the update is written to the i-th fraction of the stream.

    Shapes: stream, read and update ``[batch, pos, width]``.
    Parameters: ``2 m^2 + m`` and the branch's norm; dynamic adds ``(2 m + 1) width / m`` and two scales.
    FLOPs a token: ``4 m width`` for the weighted sums and ``2 (2 m + 1) width`` for the dynamic weights.
    Moved by a fused write: 3 widths, as a plain addition.
    At initialisation: ``Y = A = I``, ``B = 1``, dynamic matrices 0, scales 0.01: the plain residual.
    Source: Zhu et al. 2025 (arXiv 2503.14125): the opening of the paper's page read there; the equation
    and the shape of the connection matrix in a review, which agrees with arXiv 2511.11238, eqs. 5 to 12 at
    n = m (read; its ``B`` is a full matrix, the identity at the start; the diagonal is this paper's vector).
    Departures: ``N_s`` is an RMS norm of each fraction without a gain, which ``dynamic_mix`` and
    ``dynamic_write`` take in. ``hyper-connections`` 0.4.11 feeds all fractions from one and writes the sum of
    them to each, so it is not the plain residual at the start; it is not followed.
    """

    def __init__(self, *, norm: nn.Module, width: int, num_fractions: int, dynamic: bool, eps: float):
        super().__init__()
        self.norm = norm
        self.num_fractions = num_fractions
        self.dynamic = dynamic
        self.eps = eps
        self.static_mix = nn.Parameter(torch.empty(num_fractions, 2 * num_fractions))
        self.static_write = nn.Parameter(torch.empty(num_fractions))
        if dynamic:
            self.dynamic_mix = nn.Parameter(torch.empty(2 * num_fractions, width // num_fractions))
            self.dynamic_write = nn.Parameter(torch.empty(1, width // num_fractions))
            self.mix_scale = nn.Parameter(torch.empty(1))
            self.write_scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Read, carry and write every fraction by itself, predict nothing."""
        super().reset_parameters()
        identity = torch.eye(self.num_fractions)
        start_at_(self.static_mix, torch.cat([identity, identity], dim=1))
        nn.init.ones_(self.static_write)
        if self.dynamic:
            nn.init.zeros_(self.dynamic_mix)
            nn.init.zeros_(self.dynamic_write)
            nn.init.constant_(self.mix_scale, 0.01)
            nn.init.constant_(self.write_scale, 0.01)

    def coefficients(self, fractions: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(Y, A)^T`` as ``[batch, pos, 2m, m]`` and ``B`` as ``[batch, pos, m]``."""
        dtype = coefficient_dtype(fractions)
        mix, write = self.static_mix.to(dtype), self.static_write.to(dtype)
        if self.dynamic:
            normed = F.rms_norm(fractions.to(dtype), fractions.shape[-1:], eps=self.eps)
            predicted = torch.tanh(F.linear(normed, self.dynamic_mix.to(dtype)))
            mix = mix + self.mix_scale.to(dtype) * predicted
            predicted = torch.tanh(F.linear(normed, self.dynamic_write.to(dtype))).squeeze(-1)
            write = write + self.write_scale.to(dtype) * predicted
        else:
            mix = mix.expand(*fractions.shape[:-2], *mix.shape)
            write = write.expand(*fractions.shape[:-2], *write.shape)
        return mix.transpose(-1, -2), write

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed mix of fractions."""
        assert isinstance(stream, Tensor)
        fractions = self._split(stream)
        mix, write = self.coefficients(fractions)
        read, carry = mix.chunk(2, dim=-2)
        return self.norm(mix_streams(read, fractions).flatten(-2)), (write, carry)

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the mixed fractions plus the scaled fractions of the update."""
        step = self.linearize(stream, update, context)
        carried, injected = step.carry(stream), step.inject(update)
        assert isinstance(carried, Tensor)
        assert isinstance(injected, Tensor)
        return carried + injected

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze the weights at those of this pass."""
        assert isinstance(context, tuple)
        write, mix = context

        def carry(s: Stream) -> Stream:
            assert isinstance(s, Tensor)
            return mix_streams(mix, self._split(s)).flatten(-2)

        def inject(u: Tensor) -> Stream:
            return (write.unsqueeze(-1) * self._split(u)).to(u.dtype).flatten(-2)

        return AffineStep(carry=carry, inject=inject)

    def mixing_matrices(self, stream: Stream) -> list[MixingMatrix]:
        """Return ``A^T`` over the fractions, read off the carry; it promises nothing."""
        assert isinstance(stream, Tensor)
        _, context = self.read(stream)
        step = self.linearize(stream, torch.zeros_like(stream), context)

        def carry(fractions: Tensor) -> Tensor:
            carried = step.carry(fractions.flatten(-2))
            assert isinstance(carried, Tensor)
            return self._split(carried)

        return [MixingMatrix(carried_matrix(carry, self._split(stream)))]

    def parameter_groups(self) -> list[ParameterGroup]:
        """Dynamic matrices are decayed, the rest is not (arXiv 2511.11238, section 3.3)."""
        return dynamic_groups(self)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_fractions, -1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FracConnections(Scheme):
    """Frac-Connections (``"frac_connections"``), dynamic by default.

    Attributes:
        num_fractions: m, a divisor of the width; 4 in the paper's larger runs.
        dynamic: weights also depend on the token.
    """

    name: ClassVar[str] = "frac_connections"
    family: ClassVar[str] = "wider streams"
    year: ClassVar[int] = 2025
    paper: ClassVar[str] = "2503.14125"
    formula: ClassVar[str] = "H' = A^T H + diag(B) split(F(N(cat(Y^T H)))), H = m fractions of x"
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=True, start_distance=0.0)

    num_fractions: int = 4
    dynamic: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_fractions < 1:
            raise ConfigError(
                f"{self.name} was asked for num_fractions={self.num_fractions}; give at least 1."
            )

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike.

        Raises:
            ConfigError: the width cannot be divided into so many fractions.
        """
        if width % self.num_fractions:
            raise ConfigError(
                f"{self.name} cannot divide width {width} into {self.num_fractions} fractions; "
                "choose a divisor as num_fractions."
            )
        return FracConnection(
            norm=norm.build(width),
            width=width,
            num_fractions=self.num_fractions,
            dynamic=self.dynamic,
            eps=norm.eps,
        )
