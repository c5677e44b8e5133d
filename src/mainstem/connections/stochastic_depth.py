"""Stochastic depth (LayerDrop): in training, a branch's update is dropped now and then."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig
from mainstem.connections._policy import coefficient, weigh
from mainstem.errors import ConfigError


class StochasticDepthConnection(Connection):
    """``x' = x + (b / survival) F(N(x))`` in training, ``b`` Bernoulli for each sequence; plain in eval.

    The branch always runs and its update is masked: no parameter is left without a gradient, so that
    data-parallel and sharded training need no search for unused ones, and ranks never take different paths.
    It saves no time.
    Shapes: stream, read and update ``[batch, pos, width]``; the context is the mask ``[batch, 1, 1]``, drawn
    from torch's generator when the connection reads, so that a checkpointed block replays it. Parameters:
    one norm; ``survival`` is a buffer. FLOPs: 1 a channel in training. Moved: 3 elements a channel.
    At initialisation: the plain residual in eval; in training equal to it in expectation.
    Source: Huang et al. 2016 (arXiv 1603.09382); Fan et al. 2019 (arXiv 1909.11556) for
    transformers.
    Departures: the update is divided by the survival in training, not multiplied by it in eval (as timm's
    ``DropPath``; the same expectation, and a trained model needs no survivals); the mask is drawn for each
    sequence, not for each batch. Neither paper was read for this; the rule and both departures are from
    memory of them.
    """

    survival: Tensor

    def __init__(self, norm: nn.Module, survival: float):
        super().__init__()
        self.norm = norm
        self.register_buffer("survival", coefficient(survival))

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed stream, and in training the mask."""
        assert isinstance(stream, Tensor)
        if not self.training:
            return self.norm(stream), None
        drawn = torch.rand(stream.shape[0], 1, 1, device=stream.device, dtype=torch.float32)
        return self.norm(stream), (drawn < self.survival) / self.survival

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the stream plus the masked update."""
        assert isinstance(stream, Tensor)
        return stream + _masked(update, context)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry is the identity; inject masks with the mask that was drawn."""
        return AffineStep(carry=lambda s: s, inject=lambda u: _masked(u, context))


def _masked(update: Tensor, mask: Context) -> Tensor:
    if mask is None:
        return update
    assert isinstance(mask, Tensor)
    return weigh(mask, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StochasticDepth(Scheme):
    """Stochastic depth, survival falling linearly from the first sublayer on (``"stochastic_depth"``).

    Sublayer ``index`` survives with probability ``1 - (index + 1) / num_sublayers * (1 - final_survival)``.

    Attributes:
        final_survival: survival of the last sublayer, above 0 and at most 1; 0.5 as published.
    """

    name: ClassVar[str] = "stochastic_depth"
    family: ClassVar[str] = "branch scaling"
    year: ClassVar[int] = 2016
    paper: ClassVar[str] = "1603.09382"
    formula: ClassVar[str] = "x' = x + (b / p) F(N(x)), b ~ Bernoulli(p)"
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=True, start_distance=0.0)

    final_survival: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.final_survival <= 1:
            raise ConfigError(f"final_survival={self.final_survival!r} must be greater than 0 and at most 1.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build the one of sublayer ``index``."""
        dropped = (index + 1) / num_sublayers * (1.0 - self.final_survival)
        return StochasticDepthConnection(norm.build(width), 1.0 - dropped)
