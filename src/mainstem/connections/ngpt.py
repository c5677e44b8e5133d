"""nGPT: the stream is a point on the unit sphere, and a write moves it towards what the branch returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import (
    AffineStep,
    Connection,
    Context,
    Properties,
    Scheme,
    Stream,
    Trunk,
)
from mainstem.connections._norms import NormConfig
from mainstem.errors import ConfigError

_SHORTEST = 1e-12


def _inverse_length(x: Tensor) -> Tensor:
    """``1 / |x|`` of every token, and 0 where ``|x|`` is too small to have a direction."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(length > _SHORTEST, 1.0 / length.clamp_min(_SHORTEST), 0.0)


def _unit(x: Tensor) -> Tensor:
    return x * _inverse_length(x)


class NGPTConnection(Connection):
    """``x' = unit(h + alpha (unit(F(sqrt(width) h)) - h))`` with ``h = unit(x)``.

    Shapes: stream, read and update ``[batch, pos, width]``; ``alpha`` is
    ``|stored_alpha| * alpha_start * sqrt(width)``, a number a channel. Parameters: width; not decayed, and no
    norm (the unit length needs no gain). FLOPs: 13 a channel. Moved: 3 elements a channel.
    At initialisation: ``stored_alpha`` is ``width ** -0.5``, so that an optimiser whose steps do not depend
    on the gradient's size moves ``alpha`` at the pace of a matrix whose rows have length 1; ``alpha`` is
    ``alpha_start``. Not the plain residual.
    A zero vector has no direction: where the stream is zero it takes the update's, where the update is zero
    the stream stays, and both keep finite gradients. (The authors divide by the length as it is: NaN.)
    Lengths are fp32 at least. Frozen for the ledger: carry is ``(1 - alpha) r / |x|`` and inject
    ``alpha r / |F|``, ``r`` the last normalisation.
    Source: Loshchilov et al. 2024 (arXiv 2410.01131). Read: the authors' ``NVIDIA/ngpt``
    ``model.py``, which norms the stream before every write as here, so that an embedding of any length will
    do.
    """

    def __init__(self, width: int, alpha_start: float):
        super().__init__()
        self.alpha_start = alpha_start
        self.stored_alpha = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """``stored_alpha`` to ``width ** -0.5``."""
        super().reset_parameters()
        nn.init.constant_(self.stored_alpha, self.stored_alpha.shape[0] ** -0.5)

    def _alpha(self, dtype: torch.dtype) -> Tensor:
        return self.stored_alpha.to(dtype).abs() * (self.alpha_start * self.stored_alpha.shape[0] ** 0.5)

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the stream at length ``sqrt(width)``, which is RMS 1."""
        assert isinstance(stream, Tensor)
        wide = torch.promote_types(stream.dtype, torch.float32)
        return (stream.shape[-1] ** 0.5 * _unit(stream.to(wide))).to(stream.dtype), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the point on the sphere that lies ``alpha`` of the way."""
        assert isinstance(stream, Tensor)
        wide = torch.promote_types(stream.dtype, torch.float32)
        return _unit(self._moved(stream.to(wide), update.to(wide))).to(stream.dtype)

    def _moved(self, x: Tensor, update: Tensor) -> Tensor:
        here, inverse = _unit(x), _inverse_length(update)
        # Without a direction to go to it stays, instead of moving towards the centre.
        step = self._alpha(x.dtype) * (inverse > 0)
        return here + step * (update * inverse - here)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Freeze all three lengths."""
        assert isinstance(stream, Tensor)
        last = _inverse_length(self._moved(stream, update))
        inverse = _inverse_length(update)
        step = self._alpha(stream.dtype) * (inverse > 0)
        keep, add = last * (1.0 - step) * _inverse_length(stream), last * step * inverse

        def carry(s: Stream) -> Stream:
            assert isinstance(s, Tensor)
            return keep * s

        return AffineStep(carry=carry, inject=lambda u: add * u)


class NGPTTrunk(Trunk):
    """The embedding enters as it is, since the first connection norms it; the head reads RMS 1."""

    def collapse(self, stream: Stream) -> Tensor:
        """The stream at length ``sqrt(width)``. Linear."""
        assert isinstance(stream, Tensor)
        return stream.shape[-1] ** 0.5 * stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGPT(Scheme):
    """The normalised transformer's residual (``"ngpt"``).

    nGPT is more than its residual. Of the rest, :func:`normalize_matrices` is to be called once after the
    model is built and after every optimiser step, and no weight is decayed; the norm on queries and keys with
    its gain, and the gain ``s_z`` on the logits, belong to a model. Branches and the head read
    ``sqrt(width)`` times the unit vector: in a gated feed-forward that is the factor ``sqrt(width)`` of the
    published one, normed queries and keys do not feel it, and what it does to an update the unit length takes
    out again. Departure: before the head it is a factor ``sqrt(width)`` on the logits of a published model,
    for a model's ``s_z`` to take out.

    Attributes:
        alpha_start: how much of the way a write goes at the start; the published 0.05 whatever the depth.
    """

    name: ClassVar[str] = "ngpt"
    family: ClassVar[str] = "geometry"
    year: ClassVar[int] = 2024
    paper: ClassVar[str] = "2410.01131"
    formula: ClassVar[str] = "x' = unit(x + alpha (unit(F) - x))"
    no_exact_start: ClassVar[str | None] = (
        "the stream itself is normed at every sublayer, and so is an update."
    )
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=1.13, num_norms=0
    )

    alpha_start: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha_start <= 1:
            raise ConfigError(f"alpha_start={self.alpha_start!r} must be greater than 0 and at most 1.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return NGPTConnection(width, self.alpha_start)

    def build_final_norm(self, *, width: int, norm: NormConfig) -> nn.Module:
        """None: the last stream has its length already."""
        return nn.Identity()

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """Build the sphere's way in and out."""
        return NGPTTrunk(connections, self.build_final_norm(width=width, norm=norm))

    def output_init_scale(self, num_sublayers: int) -> float:
        """The size of an update is taken out of it."""
        return 1.0


@torch.no_grad()
def normalize_matrices(module: nn.Module, writing: Collection[str] = ("out_proj", "down_proj")) -> None:
    """Give every matrix of ``module`` unit length along the dimension it shares with the stream, in place.

    nGPT's step after each optimiser step, so that a product of a matrix and the stream is a cosine: rows of
    embeddings, of the head and of matrices that read the stream; columns of those that write to it.

    Args:
        module: branches or a whole model; its ``nn.Linear`` and ``nn.Embedding`` modules are changed.
        writing: last part of the name of the linear maps that write to the stream; the default names are
            those of :class:`mainstem.tower.Tower`.

    A row or column of zeros stays. Tied matrices are normed once or twice, which is the same. Biases and
    position tables that are no ``nn.Embedding`` are left alone; nGPT has none.
    Source: Loshchilov et al. 2024 (arXiv 2410.01131). Read: OLMo-core's ``normalize_matrices`` of attention,
    with the same dimensions; the authors' training script, which holds theirs, could not be had.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            dim = 0 if name.rpartition(".")[2] in writing else 1
            length = torch.linalg.vector_norm(part.weight, dim=dim, keepdim=True)
            part.weight.div_(torch.where(length > _SHORTEST, length, 1.0))
