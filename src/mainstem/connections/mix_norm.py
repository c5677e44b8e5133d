"""Mix-LN: Post-LN in the first blocks, Pre-LN in the rest."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mainstem.connections._base import Connection, Properties, Scheme
from mainstem.connections._norms import NormConfig
from mainstem.connections.post_norm import PostNormConnection
from mainstem.connections.pre_norm import PreNormConnection
from mainstem.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixNorm(Scheme):
    """``x' = N(x + F(x))`` in the first ``floor(post_share * L)`` of L blocks, ``x' = x + F(N(x))`` above
    (``"mix_norm"``).

    Its connections are those of Post-LN and Pre-LN: shapes, parameters and cost are theirs, and two compiled
    graphs serve any depth, one for each kind of block. A final norm stands before the head. Not the plain
    residual at the start unless the share is 0.
    Source: Li et al. 2024 (arXiv 2412.13795). Read: the authors' repository (``pixeli99/MixLN``,
    ``modeling_llama.py``, mode ``post_pre``), where ``POST_NUM`` blocks are Post-LN; its example takes 3 of
    12.

    Attributes:
        post_share: share of the blocks that are Post-LN, 0 to 1.
        sublayers_per_block: 2, or 1 in a stack of parallel blocks.
    """

    name: ClassVar[str] = "mix_norm"
    family: ClassVar[str] = "norm placement"
    year: ClassVar[int] = 2024
    paper: ClassVar[str] = "2412.13795"
    formula: ClassVar[str] = "x' = N(x + F(x)) in the first quarter, x + F(N(x)) above"
    no_exact_start: ClassVar[str | None] = "its first blocks norm the stream itself."
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=False, start_distance=0.66)

    post_share: float = 0.25
    sublayers_per_block: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.post_share <= 1:
            raise ConfigError(f"post_share={self.post_share!r} must be between 0 and 1.")
        if self.sublayers_per_block < 1:
            raise ConfigError(f"sublayers_per_block={self.sublayers_per_block!r} must be at least 1.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build the one of sublayer ``index``."""
        num_blocks = -(-num_sublayers // self.sublayers_per_block)
        post = index // self.sublayers_per_block < int(self.post_share * num_blocks)
        return (PostNormConnection if post else PreNormConnection)(norm.build(width))
