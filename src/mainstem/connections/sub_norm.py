"""Sub-LN (Magneto): a second norm inside every branch, before the matrix that makes the update."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from torch import nn

from mainstem.connections._base import Connection, Properties, Scheme
from mainstem.connections._norms import NormConfig
from mainstem.connections.pre_norm import PreNormConnection


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubNorm(Scheme):
    """Sub-LN, or Magneto (``"sub_norm"``): ``x' = x + W_out N_inner(G(N(x)))``, where ``F = W_out G``.

    A connection stands around a branch and owns the first norm only; its connections are those of Pre-LN,
    with their shapes and cost. The inner norm stands before the attention's output matrix and the
    feed-forward's second matrix: :meth:`build_inner_norm` builds it, and whoever makes the branches puts it
    there, as our tower does. Around a branch that cannot take it, this scheme is Pre-LN with larger initial
    values, and not Sub-LN.

    Value, output and feed-forward matrices are multiplied by ``sqrt(ln(S))`` at initialisation, S sublayers
    (``sqrt(ln(2L))`` for L blocks, decoder- or encoder-only). Parameters: one norm in the connection,
    another inside the branch. Not the plain residual at the start.
    Source: Wang et al. 2022 (arXiv 2210.06423). Read: the authors' torchscale 0.3.0
    (``decoder.py``, ``multihead_attention.py``, ``feedforward_network.py``). There ``deepnorm=True`` turns
    Sub-LN off without a word, and ``subln=True``, the default, forces Pre-LN.
    """

    name: ClassVar[str] = "sub_norm"
    family: ClassVar[str] = "norm placement"
    year: ClassVar[int] = 2022
    paper: ClassVar[str] = "2210.06423"
    formula: ClassVar[str] = "x' = x + W_out N2(G(N(x))), F = W_out G"
    no_exact_start: ClassVar[str | None] = "the norm inside a branch changes what the branch returns."
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=False, start_distance=0.35)

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        return PreNormConnection(norm.build(width))

    def build_inner_norm(self, *, width: int, norm: NormConfig) -> nn.Module | None:
        """Build the norm of what the update's matrix reads."""
        return norm.build(width)

    def branch_init_scale(self, num_sublayers: int) -> float:
        """``sqrt(ln(num_sublayers))``; 1 below three sublayers, where that is less than 1 or zero."""
        return math.sqrt(math.log(num_sublayers)) if num_sublayers > 2 else 1.0

    def output_init_scale(self, num_sublayers: int) -> float:
        """The initial values are those of ``branch_init_scale`` alone."""
        return 1.0
