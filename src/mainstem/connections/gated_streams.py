"""Gated streams: the residual of Qwen4-Exp, four streams read element by element through a low-rank gate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
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
    Stream,
    Trunk,
)
from mainstem.connections._norms import NormConfig
from mainstem.connections._policy import coefficient_dtype
from mainstem.connections._stream_ops import spread_update, write_streams
from mainstem.connections._streams import (
    Collapse,
    StreamsScheme,
    StreamsTrunk,
    start_at_,
    streams_mix,
)
from mainstem.errors import ConfigError


class StreamGate(nn.Module):
    """``u = mean_i m_i * Z_i`` with ``Z_i = N_i(X_i)`` and ``m = sigmoid(up silu(down vec(Z) / n))``.

    ``N_i`` has a gain of its own for each stream and channel, and never a bias: ``[n * width]``.
    ``down`` is ``[rank, n * width]``, ``up`` ``[n * width, rank]``.
    """

    def __init__(self, *, width: int, num_streams: int, rank: int, norm: NormConfig):
        super().__init__()
        self.norm = norm
        self.gain = nn.Parameter(torch.empty(num_streams * width))
        self.down = nn.Parameter(torch.empty(rank, num_streams * width))
        self.up = nn.Parameter(torch.empty(num_streams * width, rank))

    def start(self, *, gains: Sequence[float], up_std: float) -> None:
        """Start with a gain for each stream, ``down`` N(0, 0.02^2) and ``up`` N(0, up_std^2)."""
        self.gains, self.up_std = tuple(gains), up_std
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values that :meth:`start` was given."""
        start_at_(self.gain, torch.tensor(self.gains).repeat_interleave(len(self.gain) // len(self.gains)))
        nn.init.normal_(self.down, std=0.02)
        nn.init.normal_(self.up, std=self.up_std)

    def scaled(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return the centred stream (as it is for an RMS norm) and what the norm multiplies it by."""
        if self.norm.kind == "layer":
            stream = stream - stream.mean(-1, keepdim=True)
        size = torch.rsqrt(stream.square().mean(-1, keepdim=True) + self.norm.eps)
        return stream, size * self.gain.to(stream.dtype).unflatten(0, stream.shape[-2:])

    def gates(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed streams and their gates, both ``[batch, pos, n, width]``."""
        centred, gain = self.scaled(stream.to(coefficient_dtype(stream)))
        normed = centred * gain
        n = stream.shape[-2]
        hidden = F.silu(F.linear(normed.flatten(-2), self.down.to(normed.dtype)) / n)
        gate = torch.sigmoid(F.linear(hidden, self.up.to(normed.dtype))).unflatten(-1, stream.shape[-2:])
        return normed, gate

    def forward(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is read ``[batch, pos, width]`` and the normed streams."""
        normed, gate = self.gates(stream)
        return (gate * normed).mean(-2).to(stream.dtype), normed

    def linearize(self, stream: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the read as a linear map with norm and gates frozen at ``stream``."""
        dtype = coefficient_dtype(stream)
        _, gain = self.scaled(stream.to(dtype))
        _, gate = self.gates(stream)
        return functools.partial(_read_frozen, gate * gain, self.norm.kind == "layer")


def _read_frozen(weights: Tensor, centre: bool, stream: Tensor) -> Tensor:
    wide = stream.to(weights.dtype)
    wide = wide - wide.mean(-1, keepdim=True) if centre else wide
    return (weights * wide).mean(-2).to(stream.dtype)


class GatedStreamsConnection(Connection):
    """``X_i' = X_i + g_i F(mean_j m_j * Z_j)``: a read by element, a write by stream, no mix.

    ``Z_j = N_j(X_j)``, ``m = sigmoid(up silu(down vec(Z) / n))`` and ``g = 2 sigmoid(inject vec(Z) / n)``,
    per token. The branch reads the gated mean as it is; the norm is inside the read.

    Shapes: stream ``[batch, pos, n, width]``; read and update ``[batch, pos, width]``; ``m`` as the stream.
    Parameters: ``n width (2 rank + n + 1)``. FLOPs a token: ``2 n width (2 rank + n + 2)`` and the norms.
    Moved by a fused write: ``2n + 1`` widths.
    At initialisation: gains 1, matrices N(0, 0.02^2), so ``m`` is about 1/2 and ``g`` about 1: a read of half
    the plain one's size. ``exact_start``: ``up`` and ``inject`` 0, gains that make the mean of the gated
    streams their plain norm and differ by stream and sublayer, so that streams separate.
    Source: ``Qwen4ExpTextGatedResidual`` and its layer and model of transformers 5.24, read in code; no paper
    was found.
    Departures: gains are stored as they are (1 at the start), there as ``1 + weight``; see
    :func:`from_qwen4_exp`. A LayerNorm in the config makes ``N_j`` centre, and adds no bias.
    """

    def __init__(self, *, gate: StreamGate, num_streams: int, width: int, index: int, exact: bool):
        super().__init__()
        self.gate = gate
        self.inject = nn.Parameter(torch.empty(num_streams, num_streams * width))
        self.gains = start_gains(num_streams, index) if exact else (1.0,) * num_streams
        self.std = 0.0 if exact else 0.02
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the gates."""
        super().reset_parameters()
        self.gate.start(gains=self.gains, up_std=self.std)
        nn.init.normal_(self.inject, std=self.std)

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the gated mean of the normed streams."""
        assert isinstance(stream, Tensor)
        read, normed = self.gate(stream)
        logits = F.linear(normed.flatten(-2), self.inject.to(normed.dtype)) / stream.shape[-2]
        return read, (2 * torch.sigmoid(logits),)

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the streams plus each one's share of the update."""
        assert isinstance(stream, Tensor)
        assert isinstance(context, tuple)
        return write_streams(stream, update, context[0], None)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry is the identity; the write's gates are frozen."""
        assert isinstance(context, tuple)
        weights = context[0]
        return AffineStep(carry=lambda s: s, inject=lambda u: spread_update(weights, u))

    def mixing_matrices(self, stream: Stream) -> list[MixingMatrix]:
        """Return the identity, read off the carry."""
        return streams_mix(self, stream, frozenset({"rows", "columns", "orthogonal"}))

    def parameter_groups(self) -> list[ParameterGroup]:
        """Matrices are decayed, gains are not."""
        matrices = (self.gate.down, self.gate.up, self.inject)
        return [ParameterGroup((self.gate.gain,)), ParameterGroup(matrices, weight_decay=True)]


def start_gains(num_streams: int, index: int) -> tuple[float, ...]:
    """Gains whose mean is 2, the inverse of a gate's 1/2, in exact binary fractions that differ by stream.

    The larger ones move on by one stream with every sublayer; an even number of streams pairs them.
    """
    if num_streams % 2:
        return (2.0,) * num_streams
    unit = 2.0 ** -(num_streams.bit_length() + 1)
    raw = [2.0 + (-1) ** i * (i // 2 + 1) * unit for i in range(num_streams)]
    return tuple(raw[(i - index) % num_streams] for i in range(num_streams))


class GatedStreamsTrunk(StreamsTrunk):
    """Copies in; out through a gate like every sublayer's, which is also the final norm."""

    def __init__(
        self, connections: Sequence[Connection], *, gate: StreamGate, gains: Sequence[float], std: float
    ):
        super().__init__(connections, nn.Identity(), num_streams=len(gains), head=None, mean=True)
        self.gate = gate
        gate.start(gains=gains, up_std=std)

    def collapse(self, stream: Stream) -> Tensor:
        """Return the gated mean of the normed streams."""
        assert isinstance(stream, Tensor)
        return self.gate(stream)[0]

    def linearize_collapse(self, stream: Stream) -> Callable[[Stream], Tensor]:
        """Freeze norm and gates at ``stream``."""
        assert isinstance(stream, Tensor)
        linear = self.gate.linearize(stream)

        def collapse(s: Stream) -> Tensor:
            assert isinstance(s, Tensor)
            return linear(s)

        return collapse


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedStreams(StreamsScheme):
    """Gated streams as in Qwen4-Exp (``"gated_streams"``).

    Attributes:
        rank: of the read's gate; 0 means 5/32 of the width, which 320 is of Qwen4-Exp's 2,048.
    """

    name: ClassVar[str] = "gated_streams"
    year: ClassVar[int] = 2026
    paper: ClassVar[str] = "Qwen4-Exp (transformers)"
    formula: ClassVar[str] = "X_i' = X_i + 2 s(w_i) F(mean_j s(m_j) * N_j(X_j))"
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=0.64, num_streams=4, num_norms=0, traffic=9.0
    )
    published_collapse: ClassVar[Collapse] = "head"

    rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 0:
            raise ConfigError(f"rank={self.rank} must be at least 1, or 0 for 5/32 of the width.")
        if self.collapse not in (None, "head"):
            raise ConfigError(
                f"{self.name} ends in its own gate, which is its final norm too; leave out "
                f"collapse={self.collapse!r}."
            )
        if self.exact_start and self.num_streams % 2:
            raise ConfigError(
                f"{self.name} with exact_start=True pairs its streams; num_streams={self.num_streams} is odd."
            )

    def build_gate(self, *, width: int, norm: NormConfig) -> StreamGate:
        """Build the gate of a read."""
        rank = self.rank or max(5 * width // 32, 1)
        return StreamGate(width=width, num_streams=self.num_streams, rank=rank, norm=norm)

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one."""
        return GatedStreamsConnection(
            gate=self.build_gate(width=width, norm=norm),
            num_streams=self.num_streams,
            width=width,
            index=index,
            exact=self.exact_start,
        )

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """Put the connections between the copies and the last gate."""
        return GatedStreamsTrunk(
            connections,
            gate=self.build_gate(width=width, norm=norm),
            gains=(2.0 if self.exact_start else 1.0,) * self.num_streams,
            std=0.0 if self.exact_start else 0.02,
        )


def from_qwen4_exp(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a ``Qwen4ExpTextGatedResidual``'s parameters to those of a :class:`GatedStreamsConnection`.

    Of the model's last mixer, which has no ``block_inject_weight``, the names are those of the trunk.
    """
    names = {"input_mix_weight_down.weight": "gate.down", "input_mix_weight_up.weight": "gate.up"}
    found = {ours: state[theirs] for theirs, ours in names.items()}
    found["gate.gain"] = 1.0 + state["hc_norm.weight"]
    if "block_inject_weight.weight" in state:
        found["inject"] = state["block_inject_weight.weight"]
    return found
