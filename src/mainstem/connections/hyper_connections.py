"""Hyper-Connections: n streams, read, mixed and written with learned and predicted weights."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mainstem.connections._base import Connection, ParameterGroup, Properties
from mainstem.connections._norms import NormConfig, rms_gain
from mainstem.connections._policy import coefficient_dtype
from mainstem.connections._stream_ops import project_normed
from mainstem.connections._streams import StreamsConnection, StreamsScheme, start_at_


class HyperConnection(StreamsConnection):
    """``X' = A_r^T X + B F(N(A_m^T X))^T`` with n streams ``X_1 .. X_n``.

    ``(A_m, A_r) = static_mix + mix_scale * tanh(N_s(X) dynamic_mix^T)`` and
    ``B = static_write + write_scale * tanh(N_s(X) dynamic_write^T)`` for Dynamic Hyper-Connections; the
    static parts alone for Static ones. Row i of ``(A_m, A_r)`` belongs to stream i: what the branch reads of
    it, then what each new stream keeps of it. Weights are per token.

    Shapes: stream ``[batch, pos, n, width]``; read and update ``[batch, pos, width]``.
    Parameters: ``n (n + 2)`` static ones and the branch's norm; dynamic adds ``width (n + 2)``, two scales
    and the norm ``N_s`` of each stream. FLOPs a token: ``2 n (n + 2) width`` for the weighted sums and as
    many for the dynamic weights. Moved by a fused write: ``2n + 1`` widths.
    At initialisation: ``A_m = e_(index mod n)``, ``A_r = I``, ``B = 1``, dynamic matrices 0, scales 0.01:
    every stream is the plain stream. Summed, as published, it reaches the final norm n times too large, which
    only the norm's epsilon sees; ``exact_start`` takes the mean and is the plain residual.
    Source: Zhu et al. 2024 (arXiv 2409.19606), eqs. 2 to 5 and algorithms 2 and 3 as restated in arXiv
    2512.24880, eqs. 3 and 5, and arXiv 2511.11238, eqs. 8 to 10; read in code in ``hyper-connections`` 0.4.11
    and ``x-transformers`` 2.12.2, which agree with each other but for the norm.
    Departures: ``N_s`` is the norm the config asks for (a LayerNorm in the paper and in x-transformers, an
    RMSNorm in hyper-connections); the stream first read is ``index mod n``, never a random one.
    """

    def __init__(
        self, *, norm: nn.Module, stream_norm: nn.Module | None, width: int, num_streams: int, index: int
    ):
        super().__init__(norm)
        self.stream_norm = stream_norm
        self.first = index % num_streams
        self.static_mix = nn.Parameter(torch.empty(num_streams, num_streams + 1))
        self.static_write = nn.Parameter(torch.empty(num_streams))
        if stream_norm is not None:
            self.dynamic_mix = nn.Parameter(torch.empty(num_streams + 1, width))
            self.dynamic_write = nn.Parameter(torch.empty(1, width))
            self.mix_scale = nn.Parameter(torch.empty(1))
            self.write_scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Read one stream, carry and write each alone, predict nothing."""
        super().reset_parameters()
        read = torch.zeros(len(self.static_write), 1)
        read[self.first] = 1.0
        start_at_(self.static_mix, torch.cat([read, torch.eye(len(read))], dim=1))
        nn.init.ones_(self.static_write)
        if self.stream_norm is not None:
            nn.init.zeros_(self.dynamic_mix)
            nn.init.zeros_(self.dynamic_write)
            nn.init.constant_(self.mix_scale, 0.01)
            nn.init.constant_(self.write_scale, 0.01)

    def coefficients(self, stream: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ``A_m``, ``B`` and ``A_r^T``."""
        dtype = coefficient_dtype(stream)
        mix, write = self.static_mix.to(dtype), self.static_write.to(dtype)
        if self.stream_norm is None:
            mix = mix.expand(*stream.shape[:-2], *mix.shape)
            write = write.expand(*stream.shape[:-2], *write.shape)
        else:
            predicted = torch.tanh(self._logits(self.stream_norm, stream.to(dtype)))
            mix = mix + self.mix_scale.to(dtype) * predicted[..., :-1]
            write = write + self.write_scale.to(dtype) * predicted[..., -1]
        return mix[..., 0], write, mix[..., 1:].transpose(-1, -2)

    def _logits(self, norm: nn.Module, stream: Tensor) -> Tensor:
        """Return ``[batch, pos, n, n + 2]``: of the mix, and last of the write."""
        dynamic = torch.cat([self.dynamic_mix, self.dynamic_write]).to(stream.dtype)
        rms = rms_gain(norm)
        if rms is None:
            return F.linear(norm(stream), dynamic)
        gain, eps = rms
        return project_normed(stream, dynamic * gain.to(dynamic.dtype), eps)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Dynamic matrices are decayed, the rest is not (arXiv 2511.11238, section 3.3)."""
        return dynamic_groups(self)


def dynamic_groups(connection: Connection) -> list[ParameterGroup]:
    """Split a connection's parameters into decayed dynamic matrices and all others."""
    dynamic = {name: p for name, p in connection.named_parameters() if name.startswith("dynamic_")}
    rest = tuple(p for name, p in connection.named_parameters() if name not in dynamic)
    groups = [ParameterGroup(rest)]
    return [*groups, ParameterGroup(tuple(dynamic.values()), weight_decay=True)] if dynamic else groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperConnections(StreamsScheme):
    """Hyper-Connections (``"hyper_connections"``), dynamic by default.

    Attributes:
        dynamic: weights also depend on the token (DHC); False is SHC.
    """

    name: ClassVar[str] = "hyper_connections"
    year: ClassVar[int] = 2024
    paper: ClassVar[str] = "2409.19606"
    formula: ClassVar[str] = "X' = A_r^T X + B F(N(A_m^T X))^T"
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=3.6e-8, num_streams=4, num_norms=2, traffic=9.0
    )

    dynamic: bool = True

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one, which first reads stream ``index mod n``."""
        return HyperConnection(
            norm=norm.build(width),
            stream_norm=norm.build(width) if self.dynamic else None,
            width=width,
            num_streams=self.num_streams,
            index=index,
        )
