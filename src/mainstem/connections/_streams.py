"""What schemes with n parallel streams share: the way in, the way out, and the step itself.

::

     x ──expand──► X [batch, pos, n, width] ──┬────── mix over streams ──────(+)──► X' ──collapse──► y
                                              │                               ▲
                                              └─ weigh ─► norm ─► branch ─ spread over streams
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import functools
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from mainstem.connections._base import (
    AffineStep,
    Connection,
    Context,
    MixingMatrix,
    ParameterGroup,
    Promise,
    Scheme,
    Stream,
    Trunk,
)
from mainstem.connections._norms import NormConfig
from mainstem.connections._policy import coefficient_dtype
from mainstem.connections._stream_ops import (
    mix_streams,
    project_normed,
    read_streams,
    spread_update,
    weigh_streams,
    write_streams,
)
from mainstem.errors import ConfigError

Collapse = Literal["sum", "mean", "head"]


def carried_matrix(carry: Callable[[Tensor], Tensor], stream: Tensor) -> Tensor:
    """Read off the matrix by which ``carry`` mixes the streams of ``stream``: ``[batch, pos, out, in]``.

    Asks it for what it makes of a unit in each stream, in the dtype of coefficients.
    """
    nothing = torch.zeros_like(stream, dtype=coefficient_dtype(stream))
    columns: list[Tensor] = []
    for i in range(stream.shape[-2]):
        unit = nothing.clone()
        unit[..., i, :] = 1.0
        columns.append(carry(unit)[..., 0])
    return torch.stack(columns, dim=-1)


class StreamsConnection(Connection):
    """``X' = mix X + write_weight u^T``, ``u = F(N(read_weight^T X))``; subclasses give the coefficients.

    The context is ``(write_weight,)``, or ``(write_weight, mix)`` where the streams are mixed.

    Attributes:
        promises: what holds of the mix for any weights; nothing, unless a subclass says so.
    """

    promises: frozenset[Promise] = frozenset()

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    @abc.abstractmethod
    def coefficients(self, stream: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return read weights and write weights ``[batch, pos, n]`` and the mix ``[batch, pos, out, in]``.

        All in the dtype of coefficients. No mix means the identity.
        """

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed weighted sum of the streams."""
        assert isinstance(stream, Tensor)
        read_weight, write_weight, mix = self.coefficients(stream)
        context = (write_weight,) if mix is None else (write_weight, mix)
        return self.norm(read_streams(read_weight, stream)), context

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the mixed streams plus each one's share of the update."""
        assert isinstance(stream, Tensor)
        assert isinstance(context, tuple)
        return write_streams(stream, update, context[0], context[1] if len(context) > 1 else None)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze the weights at those of this pass."""
        assert isinstance(context, tuple)
        write_weight, *mix = context

        def carry(s: Stream) -> Stream:
            assert isinstance(s, Tensor)
            return mix_streams(mix[0], s) if mix else s

        return AffineStep(carry=carry, inject=lambda u: spread_update(write_weight, u))

    def read_weights(self, stream: Stream) -> Tensor | None:
        """Return the read weights of the streams."""
        assert isinstance(stream, Tensor)
        return self.coefficients(stream)[0]

    def mixing_matrices(self, stream: Stream) -> list[MixingMatrix]:
        """Return the mix, read off the carry."""
        return streams_mix(self, stream, self.promises)


def streams_mix(connection: Connection, stream: Stream, promises: frozenset[Promise]) -> list[MixingMatrix]:
    """Return the one matrix by which ``connection`` carries ``[batch, pos, n, width]``, with its promises."""
    assert isinstance(stream, Tensor)
    _, context = connection.read(stream)
    step = connection.linearize(stream, torch.zeros_like(stream[..., 0, :]), context)

    def carry(s: Tensor) -> Tensor:
        carried = step.carry(s)
        assert isinstance(carried, Tensor)
        return carried

    return [MixingMatrix(carried_matrix(carry, stream), promises)]


class SigmoidCoefficients(nn.Module):
    """Read and write weights, and the logits of a mix, from all streams of a token at once.

    ``z = scale * (RMS(vec X) projection^T) + bias``, then ``read = sigmoid(z_read) + read_epsilon`` and
    ``write = multiplier * sigmoid(z_write) + write_epsilon`` (arXiv 2512.24880, eqs. 7 and 8).

    Parameters: ``projection`` ``[2n + num_logits, n * width]`` and ``bias`` ``[2n + num_logits]`` in the
    order read, write, mix; ``scale`` has one number for each of the three (two without a mix).
    """

    def __init__(self, *, width: int, num_streams: int, num_logits: int, eps: float):
        super().__init__()
        size = 2 * num_streams + num_logits
        self.sizes = [num_streams, num_streams] + ([num_logits] if num_logits else [])
        self.eps = eps
        self.projection = nn.Parameter(torch.empty(size, num_streams * width))
        self.bias = nn.Parameter(torch.empty(size))
        self.scale = nn.Parameter(torch.empty(len(self.sizes)))

    def forward(self, stream: Tensor) -> list[Tensor]:
        """Return the logits of reads, writes and mix, ``[batch, pos, ...]``, before any sigmoid."""
        raw = project_normed(stream.flatten(-2), self.projection, self.eps)
        dtype, raw = raw.dtype, raw.split(self.sizes, dim=-1)
        biases = self.bias.to(dtype).split(self.sizes)
        return [z * s + b for z, s, b in zip(raw, self.scale.to(dtype).unbind(0), biases, strict=True)]

    def parameter_groups(self) -> list[ParameterGroup]:
        """The projection is decayed as any matrix; biases and scales are not (arXiv 2511.11238, 3.3)."""
        return [
            ParameterGroup((self.projection,), weight_decay=True),
            ParameterGroup((self.bias, self.scale)),
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadStart:
    """Initial values of a :class:`StreamHead`; by default every stream weighs the same for every token."""

    bias: float
    projection_std: float = 0.0
    scale: float = 1.0


class StreamHead(nn.Module):
    """Weights of a learned way out: ``sigmoid(scale * (RMS(vec X) projection^T) + bias) + epsilon``.

    As in DeepSeek-V4 and HY-V4 (``DeepseekV4HyperHead`` and ``HYV4HyperHead`` of transformers, whose
    ``hc_fn``, ``hc_base`` and ``hc_scale`` are ``projection``, ``bias`` and ``scale`` here).
    """

    def __init__(self, *, width: int, num_streams: int, eps: float, epsilon: float, start: HeadStart):
        super().__init__()
        self.eps = eps
        self.epsilon = epsilon
        self.start = start
        self.projection = nn.Parameter(torch.empty(num_streams, num_streams * width))
        self.bias = nn.Parameter(torch.empty(num_streams))
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projection, set bias and scale."""
        nn.init.normal_(self.projection, std=self.start.projection_std)
        nn.init.constant_(self.bias, self.start.bias)
        nn.init.constant_(self.scale, self.start.scale)

    def forward(self, stream: Tensor) -> Tensor:
        """Return the weights, ``[batch, pos, n]``."""
        raw = project_normed(stream.flatten(-2), self.projection, self.eps)
        return torch.sigmoid(raw * self.scale.to(raw.dtype) + self.bias.to(raw.dtype)) + self.epsilon


class StreamsTrunk(Trunk):
    """n copies of the embedding go in; their sum, mean or learned weighted sum comes out."""

    def __init__(
        self,
        connections: Sequence[Connection],
        final_norm: nn.Module,
        *,
        num_streams: int,
        head: nn.Module | None,
        mean: bool,
    ):
        super().__init__(connections, final_norm)
        self.num_streams = num_streams
        self.head = head
        self.mean = mean

    def expand(self, x: Tensor) -> Stream:
        """Copy ``x`` into every stream."""
        # Contiguous, as every later stream is: strides are part of what a compiled block is specialised on.
        return x.unsqueeze(-2).expand(*x.shape[:-1], self.num_streams, x.shape[-1]).contiguous()

    def collapse(self, stream: Stream) -> Tensor:
        """Return one stream from n."""
        return self.linearize_collapse(stream)(stream)

    def linearize_collapse(self, stream: Stream) -> Callable[[Stream], Tensor]:
        """Freeze the head's weights, if any, at ``stream``."""
        assert isinstance(stream, Tensor)
        weights = None if self.head is None else self.head(stream)

        def collapse(s: Stream) -> Tensor:
            assert isinstance(s, Tensor)
            if weights is not None:
                return weigh_streams(weights, s)
            return s.mean(-2) if self.mean else s.sum(-2)

        return collapse


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamsScheme(Scheme):
    """A scheme with n streams.

    Attributes:
        num_streams: n.
        collapse: ``"sum"``, ``"mean"``, or ``"head"``, a learned weighted sum (:class:`StreamHead`); None is
            what was published, or under ``exact_start`` the mean: a sum is n times the plain stream, which
            the epsilon of the final norm does not forgive to the last bit.
    """

    family: ClassVar[str] = "wider streams"
    published_collapse: ClassVar[Collapse] = "sum"

    num_streams: int = 4
    collapse: Collapse | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_streams < 1:
            raise ConfigError(f"{self.name} was asked for num_streams={self.num_streams}; give at least 1.")
        if self.collapse not in (None, "sum", "mean", "head"):
            raise ConfigError(f"collapse {self.collapse!r} is not known; choose 'sum', 'mean' or 'head'.")
        if self.exact_start and self.collapse == "sum":
            raise ConfigError(
                f"{self.name} with collapse='sum' hands {self.num_streams} times the plain stream to the "
                "final norm, whose epsilon sees the difference; with exact_start choose 'mean' or 'head'."
            )

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """Put the connections between the copies and the collapse."""
        kind = self.collapse or ("mean" if self.exact_start else self.published_collapse)
        return StreamsTrunk(
            connections,
            self.build_final_norm(width=width, norm=norm),
            num_streams=self.num_streams,
            head=self.build_head(width=width, norm=norm) if kind == "head" else None,
            mean=kind == "mean",
        )

    def build_head(self, *, width: int, norm: NormConfig) -> nn.Module:
        """Build what weighs the streams at the end under ``collapse="head"``: all alike at the start."""
        n = self.num_streams
        start = HeadStart(bias=logit(1 / n) if n > 1 else 40.0)
        return StreamHead(width=width, num_streams=n, eps=norm.eps, epsilon=0.0, start=start)


@torch.no_grad()
def start_at_(parameter: nn.Parameter, values: Sequence[float] | Tensor) -> None:
    """Set initial values that no ``nn.init`` function can draw, unless a checkpoint has set them.

    ``_is_hf_initialized`` is how transformers marks what it has loaded; it guards ``nn.init`` the same way.
    """
    if not getattr(parameter, "_is_hf_initialized", False):
        parameter.copy_(torch.as_tensor(values, dtype=parameter.dtype).reshape(parameter.shape))


def logit(p: float) -> float:
    """Inverse of the sigmoid."""
    return math.log(p) - math.log1p(-p)


@functools.lru_cache
def exact_read_logits(num_streams: int, first: int, epsilon: float = 0.0) -> tuple[float, ...]:
    """Logits of read weights ``sigmoid(z) + epsilon`` that sum to 1 and favour stream ``first``.

    Equal streams read with weights that sum to 1 give the plain stream, whatever each weight is. A sum of 1,
    not any sum, because the norm's epsilon sees the size; weights that differ from sublayer to sublayer,
    because n streams read and written alike would get equal gradients and never separate.

    The logits are fp32 numbers. Each rounded alone, their sigmoids would sum to 1 within 1e-8, which an fp64
    run sees at small streams; so a few last bits are chosen together, and the sum is 1 within 1e-11.
    """
    raw = [1 + 0.5 * math.cos(0.3 + 2 * math.pi * (i - first) / num_streams) for i in range(num_streams)]
    logits = [logit(w / sum(raw) - epsilon) if num_streams > 1 else 40.0 for w in raw]
    half = num_streams // 2
    near = [[_fp32(z * (1 + k * 2.0**-23)) for k in range(-20, 21)] if i < 2 or half <= i < half + 2
            else [_fp32(z)] for i, z in enumerate(logits)]  # fmt: skip
    low = sorted((_sum_of_sigmoids(z), z) for z in itertools.product(*near[:half]))
    best: tuple[float, tuple[float, ...]] = (math.inf, ())
    for z in itertools.product(*near[half:]):
        missing = 1 - num_streams * epsilon - _sum_of_sigmoids(z)
        at = bisect.bisect(low, (missing,))
        for total, other in low[max(at - 1, 0) : at + 1]:
            best = min(best, (abs(total - missing), other + z))
    return best[1]


def _sum_of_sigmoids(logits: Sequence[float]) -> float:
    return sum(1 / (1 + math.exp(-z)) for z in logits)


def _fp32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]
