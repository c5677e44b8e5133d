"""Reversible residual: two halves take turns, so that every state can be had again from the one after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream, Trunk
from mainstem.connections._norms import NormConfig
from mainstem.errors import ConfigError

_NARROW = "what rounding takes from a sum no subtraction brings back."


class ReversibleConnection(Connection):
    """``y1 = x1 + F(N(x2))`` in even sublayers, ``y2 = x2 + G(N(y1))`` in odd ones.

        x1 ──────(+)──────────┬─────► y1          even: read the second, write the first
                  F           G
        x2 ───────┴──────────(+)────► y2          odd:  read the first, write the second

    Shapes: the stream is the pair ``(x1, x2)``, each ``[batch, pos, width]``; read and update likewise.
    Parameters: one norm. FLOPs: 1 a channel and the norm. Moved: 3 elements a channel.
    At initialisation: both halves are the embedding. Not the plain residual: a branch reads only what the
    branches of the other kind have written.
    What a sublayer reads it leaves unchanged, so that ``read`` of the stream after it gives what its branch
    saw, and :meth:`invert` takes the write back. Doing so in the backward pass instead of keeping states is
    not part of this scheme: autograd keeps them as in every other. It would need the random numbers of
    dropout to be replayed, and is exact only up to the rounding of one addition and one subtraction a
    sublayer.
    Source: Gomez et al. 2017 (RevNet, arXiv 1707.04585), equations 6 and 7; Kitaev et al. 2020 (Reformer,
    arXiv 2001.04451), section 3. Read: ``lucidrains/reformer-pytorch`` (``reversible.py``,
    ``reformer_pytorch.py``) and ``transformers``' ``modeling_reformer.py``.
    """

    def __init__(self, norm: nn.Module, written: Literal[0, 1]):
        super().__init__()
        self.norm = norm
        self.written = written

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed half that is not written."""
        return self.norm(stream[1 - self.written]), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the pair with the update added to the other half."""
        return self._with(stream, stream[self.written] + update)

    def invert(self, stream_after: Stream, update: Tensor) -> Stream:
        """Return the stream before the write from the one after it.

        Args:
            stream_after: what :meth:`write` returned.
            update: what was written; the branch gives it again from ``read(stream_after)``.
        """
        return self._with(stream_after, stream_after[self.written] - update)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry is the identity; inject adds to one half."""

        def inject(u: Tensor) -> Stream:
            return self._with((torch.zeros_like(u), torch.zeros_like(u)), u)

        return AffineStep(carry=lambda s: s, inject=inject)

    def _with(self, stream: Stream, half: Tensor) -> Stream:
        return (half, stream[1]) if self.written == 0 else (stream[0], half)

    def extra_repr(self) -> str:
        """The half that is written."""
        return f"written={self.written}"


class ReversibleTrunk(Trunk):
    """Both halves start as the embedding; the head reads their mean or sum.

    Raises:
        ConfigError: the stream is narrower than fp32.
    """

    def __init__(self, connections: Sequence[Connection], final_norm: nn.Module, collapse_scale: float):
        super().__init__(connections, final_norm)
        self.collapse_scale = collapse_scale

    def expand(self, x: Tensor) -> Stream:
        """The embedding twice, as two tensors: a compiled first block would tell one from two."""
        if torch.promote_types(x.dtype, torch.float32) != x.dtype:
            raise ConfigError(
                f"a reversible stream cannot be {x.dtype}: {_NARROW} "
                'Set stream_dtype="float32" (torch.float32 in Scheme.build).'
            )
        return x, x.clone()

    def collapse(self, stream: Stream) -> Tensor:
        """The halves' sum, scaled. Linear."""
        return self.collapse_scale * (stream[0] + stream[1])

    def linearize_collapse(self, stream: Stream) -> Callable[[Stream], Tensor]:
        """It is linear as it is."""
        return self.collapse


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reversible(Scheme):
    """Reversible residual of RevNet and Reformer (``"reversible"``).

    The two references end differently: reformer-pytorch takes the mean of the halves and norms it, as here;
    ``transformers`` norms the concatenation and has a head of twice the width, which a head of the stream's
    width cannot be. The authors' own code (trax) was not read.

    Attributes:
        collapse: what the final norm sees, ``"mean"`` or ``"sum"``; they differ by its epsilon.
    """

    name: ClassVar[str] = "reversible"
    family: ClassVar[str] = "geometry"
    year: ClassVar[int] = 2017
    paper: ClassVar[str] = "1707.04585"
    formula: ClassVar[str] = "y1 = x1 + F(N(x2)), y2 = x2 + G(N(y1))"
    no_exact_start: ClassVar[str | None] = (
        "a branch reads one half, which holds only what branches of the other kind have written."
    )
    refuses: ClassVar[Mapping[str, str]] = {"narrow_stream": _NARROW}
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=0.86, num_streams=2, has_history=True
    )

    collapse: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.collapse not in ("mean", "sum"):
            raise ConfigError(f"collapse={self.collapse!r} is not known; choose 'mean' or 'sum'.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build the one of sublayer ``index``: even ones write the first half."""
        return ReversibleConnection(norm.build(width), 1 if index % 2 else 0)

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """Build the pair's way in and out."""
        final = self.build_final_norm(width=width, norm=norm)
        return ReversibleTrunk(connections, final, 0.5 if self.collapse == "mean" else 1.0)
