"""Admin: Post-LN whose carry is amplified so that outputs change by O(log depth) in training."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig, frozen_norm
from mainstem.connections._policy import coefficient, weigh
from mainstem.errors import ConfigError


class AdminConnection(Connection):
    """``x' = N(carry_weight * x + F(x))`` with one weight a channel, trained or fixed.

    Shapes: stream, read and update ``[batch, pos, width]``; ``carry_weight`` ``[width]``, a parameter that
    is not decayed, or a buffer. Parameters: one norm, and ``width`` where it is trained. FLOPs: 2 a channel
    and a norm.
    Moved: 3 elements a channel.
    At initialisation: see :class:`Admin`. Not the plain residual.
    Source: Liu et al. 2020 (arXiv 2004.08249). Read: the authors' package ``admin-torch`` 0.1.0.
    """

    carry_weight: Tensor

    def __init__(self, norm: nn.Module, width: int, initial_value: float, trained: bool):
        super().__init__()
        self.norm = norm
        self.initial_value = initial_value
        if trained:
            self.carry_weight = nn.Parameter(torch.full((width,), initial_value))
        else:
            self.register_buffer("carry_weight", coefficient(initial_value).repeat(width))

    def reset_parameters(self) -> None:
        """Norm to gain 1, weights to the initial value."""
        super().reset_parameters()
        nn.init.constant_(self.carry_weight, self.initial_value)

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the stream as it is: it was normed when it was written."""
        assert isinstance(stream, Tensor)
        return stream, None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the normed, weighted sum."""
        assert isinstance(stream, Tensor)
        return self.norm(weigh(self.carry_weight, stream) + update)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze the norm at the weighted sum."""
        assert isinstance(stream, Tensor)
        linear, offset = frozen_norm(self.norm, weigh(self.carry_weight, stream) + update)

        def carry(s: Stream) -> Stream:
            assert isinstance(s, Tensor)
            return linear(weigh(self.carry_weight, s))

        return AffineStep(carry=carry, inject=linear, offset=offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admin(Scheme):
    """Admin (``"admin"``), with the initial value of the package that needs no profiling pass.

    Departure: the paper sets the weight of sublayer i to the standard deviation of the sum of the branches
    below it, measured on a batch. This sets all of them by depth alone.

    Attributes:
        output_change: how far an update of all branches may move the output at the start, over S sublayers:
            ``"log"`` is ``sqrt((S + 1) / ln(S + 1) - 1)``, ``"constant"`` ``sqrt(S)``, ``"linear"`` 1, which
            is Post-LN.
        trained: learn a weight a channel; otherwise they are fixed, as in the package's default.
    """

    name: ClassVar[str] = "admin"
    family: ClassVar[str] = "norm placement"
    year: ClassVar[int] = 2020
    paper: ClassVar[str] = "2004.08249"
    formula: ClassVar[str] = "x' = N(w * x + F(x)), w = sqrt((S + 1) / ln(S + 1) - 1)"
    no_exact_start: ClassVar[str | None] = "the stream itself is normed at every sublayer."
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=False, start_distance=0.62)

    output_change: Literal["log", "constant", "linear"] = "log"
    trained: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_change not in ("log", "constant", "linear"):
            raise ConfigError(
                f"output_change {self.output_change!r} is not known; choose 'log', 'constant' or 'linear'."
            )

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        squares = {
            "log": (num_sublayers + 1) / math.log(num_sublayers + 1) - 1,
            "constant": num_sublayers,
            "linear": 1.0,
        }
        return AdminConnection(norm.build(width), width, squares[self.output_change] ** 0.5, self.trained)

    def build_final_norm(self, *, width: int, norm: NormConfig) -> nn.Module:
        """The stream is already normed."""
        return nn.Identity()

    def output_init_scale(self, num_sublayers: int) -> float:
        """The stream is normed at every write, so writes do not add up."""
        return 1.0
