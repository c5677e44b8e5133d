"""ReZero (SkipInit): one learned scalar a branch, which starts at zero."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig
from mainstem.connections._policy import weigh


class ReZeroConnection(Connection):
    """``x' = x + write_weight * F(x)``, or ``F(N(x))`` with a norm; ``write_weight`` is one number.

    Shapes: stream, read and update ``[batch, pos, width]``; ``write_weight`` ``[1]`` (sharded training takes
    no zero-dimensional parameters). Parameters: 1, and a norm if there is one; none is decayed (the authors'
    answer to a question about it). FLOPs: 2 a channel. Moved: 3 elements a channel.
    At initialisation: ``write_weight`` 0, the identity map, so that matrices of the branches get a gradient
    from the second step on. With the norm and 1 it is the plain residual.
    Source: Bachlechner et al. 2020 (arXiv 2003.04887); De and Smith 2020 (arXiv 2002.10444) call the same
    scalar SkipInit. Read: the authors' package ``rezero`` 0.1.0 (``rztx.py``), which has no norm and shares
    one scalar between attention and feed-forward. Departure: here every sublayer has its own, as the paper's
    formula for a residual layer.
    """

    def __init__(self, norm: nn.Module, initial_value: float):
        super().__init__()
        self.norm = norm
        self.initial_value = initial_value
        self.write_weight = nn.Parameter(torch.full((1,), initial_value))

    def reset_parameters(self) -> None:
        """Norm to gain 1, weight to the initial value."""
        super().reset_parameters()
        nn.init.constant_(self.write_weight, self.initial_value)

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the stream, normed if there is a norm."""
        return self.norm(stream), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the stream plus the weighed update, in the stream's dtype."""
        assert isinstance(stream, Tensor)
        return stream + weigh(self.write_weight, update.to(stream.dtype))

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry is the identity; inject weighs."""
        return AffineStep(carry=lambda s: s, inject=lambda u: weigh(self.write_weight, u))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReZero(Scheme):
    """ReZero, also known as SkipInit (``"rezero"``).

    Attributes:
        norm_reads: norm what a branch reads, and the stream before the head; the published form has no norm
            anywhere. On with ``exact_start``.
        initial_value: the scalar at the start; 1 with ``exact_start``.
    """

    name: ClassVar[str] = "rezero"
    family: ClassVar[str] = "branch scaling"
    year: ClassVar[int] = 2020
    paper: ClassVar[str] = "2003.04887"
    formula: ClassVar[str] = "x' = x + w F(x), w = 0 at the start"
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=1.22, num_norms=0
    )

    norm_reads: bool = False
    initial_value: float = 0.0

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        value = 1.0 if self.exact_start else self.initial_value
        return ReZeroConnection(self.build_final_norm(width=width, norm=norm), value)

    def build_final_norm(self, *, width: int, norm: NormConfig) -> nn.Module:
        """A norm only where branches have one too."""
        return norm.build(width) if self.norm_reads or self.exact_start else nn.Identity()

    def output_init_scale(self, num_sublayers: int) -> float:
        """The scalar already keeps writes small, unless it starts as the plain residual."""
        return super().output_init_scale(num_sublayers) if self.exact_start else 1.0
