"""MV-Split: the tokens' mean and what differs from it are written with separate gains, causally."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig, frozen_norm
from mainstem.connections._policy import coefficient_dtype


class MVSplitConnection(Connection):
    """``x' = N(x + centred_weight * (u - mean u) + mean_weight * (mean u - mean x))`` with ``u = F(x)``.

    The mean at a position is over that position and all before it, in fp32 or better.
    Shapes: stream, read and update ``[batch, pos, width]``; both weights ``[width]``, not decayed.
    Parameters: one norm and ``2 width``. FLOPs: some 10 a channel and a norm. Moved by one fused pass along
    the positions: 3 elements a channel.
    At initialisation: ``centred_weight`` 0.03, ``mean_weight`` 0. Not the plain residual.
    Source: Lu 2026 (arXiv 2605.06169). Read: the author's code (``erwold/mv-split``, ``dit.py``), whose
    branches read the stream as the last norm left it and which has no further norm before the head.
    Departures: there the mean is over all tokens of an image, or of a text, which in a language model leaks
    the future (x-transformers 2.31.10 does); here it runs. Padding on the left counts in the mean, since a
    connection is not told of it: pad on the right.
    """

    def __init__(self, norm: nn.Module, width: int, initial: tuple[float, float]):
        super().__init__()
        self.norm = norm
        self.initial = initial
        self.centred_weight = nn.Parameter(torch.full((width,), initial[0]))
        self.mean_weight = nn.Parameter(torch.full((width,), initial[1]))

    def reset_parameters(self) -> None:
        """Norm to gain 1, weights to their initial values."""
        super().reset_parameters()
        nn.init.constant_(self.centred_weight, self.initial[0])
        nn.init.constant_(self.mean_weight, self.initial[1])

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the stream as it is: it was normed when it was written."""
        assert isinstance(stream, Tensor)
        return stream, None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the normed, split sum."""
        assert isinstance(stream, Tensor)
        return self.norm((self._carried(stream) + self._injected(update)).to(stream.dtype))

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze the norm at the split sum."""
        assert isinstance(stream, Tensor)
        linear, offset = frozen_norm(self.norm, self._carried(stream) + self._injected(update))

        def carry(s: Stream) -> Stream:
            assert isinstance(s, Tensor)
            return linear(self._carried(s))

        return AffineStep(carry=carry, inject=lambda u: linear(self._injected(u)), offset=offset)

    def _carried(self, stream: Tensor) -> Tensor:
        mean = _running_mean(stream)
        return stream - self.mean_weight.to(mean.dtype) * mean

    def _injected(self, update: Tensor) -> Tensor:
        mean = _running_mean(update)
        of_centred, of_mean = self.centred_weight.to(mean.dtype), self.mean_weight.to(mean.dtype)
        return of_centred * update + (of_mean - of_centred) * mean


def _running_mean(x: Tensor) -> Tensor:
    """Mean over each position and all before it."""
    dtype = coefficient_dtype(x)
    counts = torch.arange(1, x.shape[-2] + 1, device=x.device, dtype=dtype)
    return x.cumsum(-2, dtype=dtype) / counts.unsqueeze(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MVSplit(Scheme):
    """Mean-variance split with a running mean (``"mv_split"``).

    Attributes:
        centred_weight: gain of what differs from the mean, at the start.
        mean_weight: rate at which the stream's mean is replaced by the update's, at the start.
    """

    name: ClassVar[str] = "mv_split"
    family: ClassVar[str] = "branch scaling"
    year: ClassVar[int] = 2026
    paper: ClassVar[str] = "2605.06169"
    formula: ClassVar[str] = "x' = N(x + b (u - mean u) + a (mean u - mean x)), running means"
    no_exact_start: ClassVar[str | None] = "the stream itself is normed at every sublayer."
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=False, start_distance=1.20)
    refuses: ClassVar[Mapping[str, str]] = {
        "kv_cache": "its running means need every sublayer's earlier writes, which a cache does not hold.",
        "left_padding": "its running means count every earlier position, and padding is not told apart.",
    }

    centred_weight: float = 0.03
    mean_weight: float = 0.0

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return MVSplitConnection(norm.build(width), width, (self.centred_weight, self.mean_weight))

    def build_final_norm(self, *, width: int, norm: NormConfig) -> nn.Module:
        """The stream is already normed."""
        return nn.Identity()

    def output_init_scale(self, num_sublayers: int) -> float:
        """The weights already keep writes small."""
        return 1.0
