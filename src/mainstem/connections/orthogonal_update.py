"""Orthogonal residual update: of what a branch returns only the part that is new in direction is added."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream
from mainstem.connections._norms import NormConfig
from mainstem.errors import ConfigError


def _without_parallel(update: Tensor, stream: Tensor, eps: float) -> Tensor:
    """``update - <update, stream> / (<stream, stream> + eps) * stream``, token by token."""
    wide = torch.promote_types(stream.dtype, torch.float32)
    x = stream.to(wide)
    share = (update.to(wide) * x).sum(-1, keepdim=True) / (x.square().sum(-1, keepdim=True) + eps)
    return update - (share * x).to(update.dtype)


class OrthogonalUpdateConnection(Connection):
    """``x' = x + F - (<F, x> / (<x, x> + eps)) x`` with ``F = F(N(x))``, inner products over the channels.

    Shapes: stream, read and update ``[batch, pos, width]``. Parameters: one norm. FLOPs: 7 a channel and the
    norm. Moved: 3 elements a channel.
    ``|x'|^2 = |x|^2 + |F_perp|^2``: the stream never shrinks, and no write can cancel an earlier one that is
    all of the stream. A stream of zeros keeps the whole update. The two inner products are fp32 at least.
    Frozen for the ledger: carry is the identity, inject the projection at the stream.
    Source: Oh et al. 2025 (arXiv 2505.11881), the feature-wise update. Read: the authors' code
    (``BootsofLagrangian/ortho-residual``, ``src/ortho_residual/llama/residual.py``), whose ``feature`` form
    (earlier ``channel``) over the last dimension, with epsilon 1e-6 added to the sum of squares, is this one.
    Its ``global`` form flattens all dimensions from a given one on: from the last it is the same, and from
    the positions on, as x-transformers', it would show a token its future; that is not offered.
    """

    def __init__(self, norm: nn.Module, eps: float):
        super().__init__()
        self.norm = norm
        self.eps = eps

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed stream."""
        return self.norm(stream), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the stream plus what of the update is orthogonal to it."""
        assert isinstance(stream, Tensor)
        return stream + _without_parallel(update, stream, self.eps)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry is the identity; inject projects."""
        assert isinstance(stream, Tensor)
        return AffineStep(carry=lambda s: s, inject=lambda u: _without_parallel(u, stream, self.eps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrthogonalUpdate(Scheme):
    """Orthogonal residual update (``"orthogonal_update"``).

    Attributes:
        eps: added to the stream's sum of squares.
    """

    name: ClassVar[str] = "orthogonal_update"
    family: ClassVar[str] = "geometry"
    year: ClassVar[int] = 2025
    paper: ClassVar[str] = "2505.11881"
    formula: ClassVar[str] = "x' = x + F - (<F, x> / <x, x>) x"
    no_exact_start: ClassVar[str | None] = (
        "it has no coefficient that could start at zero: what an update shares with the stream is left out."
    )
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=False, start_distance=0.12)

    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps > 0:
            raise ConfigError(f"eps={self.eps!r} must be greater than 0, or a stream of zeros gives NaN.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return OrthogonalUpdateConnection(norm.build(width), self.eps)
