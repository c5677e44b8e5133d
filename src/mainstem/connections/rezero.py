"""ReZero (SkipInit): one learned scalar a branch, which starts at zero."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import nn

from mainstem.connections._base import Connection, Properties, Scheme
from mainstem.connections._norms import NormConfig
from mainstem.connections.layer_scale import LayerScaleConnection


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReZero(Scheme):
    """ReZero, also known as SkipInit (``"rezero"``): LayerScale with one weight, which starts at 0.

    The weight is of shape ``[1]``: sharded training takes no zero-dimensional parameters. It is not decayed
    (the authors' answer to a question about it). With the norm and 1 it is the plain residual.
    Source: Bachlechner et al. 2020 (arXiv 2003.04887); De and Smith 2020 (arXiv 2002.10444) call the same
    scalar SkipInit. Read: the authors' package ``rezero`` 0.1.0 (``rztx.py``), which has no norm and shares
    one scalar between attention and feed-forward. Departure: here every sublayer has its own, as the paper's
    formula for a residual layer.

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
        return LayerScaleConnection(self.build_final_norm(width=width, norm=norm), 1, value)

    def build_final_norm(self, *, width: int, norm: NormConfig) -> nn.Module:
        """A norm only where branches have one too."""
        return norm.build(width) if self.norm_reads or self.exact_start else nn.Identity()

    def output_init_scale(self, num_sublayers: int) -> float:
        """The scalar already keeps writes small, unless it starts as the plain residual."""
        return super().output_init_scale(num_sublayers) if self.exact_start else 1.0
