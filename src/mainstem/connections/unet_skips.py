"""U-net skips: outputs of lower blocks are kept and added again, weighed, before upper ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from mainstem.connections._base import AffineStep, Connection, Context, Properties, Scheme, Stream, Trunk
from mainstem.connections._depth import TupleTrunk
from mainstem.connections._norms import NormConfig
from mainstem.connections._policy import weigh
from mainstem.errors import ConfigError


class UNetSkipConnection(Connection):
    """``x' = z + F(N(z))`` with ``z = x + skip_weight * s`` where a skip ends, and ``z = x`` elsewhere.

        x ──────(+)──┬───────────(+)──┬──► x'
        s ── w ──┘   └── N ── F ──┘   └──► kept, where a skip begins

    Shapes: the stream is ``(x, s_1, ..., s_k)``, each ``[batch, pos, width]``: the running stream and what is
    kept for later, oldest first; what is taken is dropped. Read and update ``[batch, pos, width]``.
    Parameters: one norm, and one number where a skip ends; none is decayed. FLOPs: 1 a channel, and 2 more
    where a skip ends. Moved: 3 elements a channel; a skip's end reads two and makes one more. Live memory:
    one tensor a skip that is open. Compiled by block: one graph for each number of open skips.
    Value at initialisation: ``skip_weight`` 0 is the plain residual, exactly, and gets a gradient from the
    first step on. At 1, as published, it is not.
    """

    skip_weight: nn.Parameter | None

    def __init__(self, norm: nn.Module, *, initial_weight: float, takes: int | None, keeps: bool):
        """Build one.

        Args:
            norm: before the branch.
            initial_weight: of the skip that ends here.
            takes: which of the kept tensors ends here, 0 the oldest; None for none.
            keeps: whether what this writes is kept.
        """
        super().__init__()
        self.norm = norm
        self.initial_weight = initial_weight
        self.takes = takes
        self.keeps = keeps
        self.skip_weight = None if takes is None else nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Norm to gain 1, weight to the initial value."""
        super().reset_parameters()
        if self.skip_weight is not None:
            nn.init.constant_(self.skip_weight, self.initial_weight)

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed sum of stream and skip, and that sum for :meth:`write`."""
        joined = self._join(stream)
        return self.norm(joined), joined

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Add the update; drop what was taken and keep what is to be."""
        assert isinstance(context, Tensor)
        return self._with(context + update, self._left(stream))

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Every coefficient is a parameter: the step is linear as it stands."""
        left = tuple(torch.zeros_like(s) for s in self._left(stream))
        return AffineStep(
            carry=lambda s: self._with(self._join(s), self._left(s)), inject=lambda u: self._with(u, left)
        )

    def _join(self, stream: Stream) -> Tensor:
        x = stream[0]
        if self.skip_weight is None or self.takes is None:
            return x
        return x + weigh(self.skip_weight, stream[1 + self.takes])

    def _left(self, stream: Stream) -> tuple[Tensor, ...]:
        kept = tuple(stream[1:])
        return kept if self.takes is None else (*kept[: self.takes], *kept[self.takes + 1 :])

    def _with(self, x: Tensor, kept: tuple[Tensor, ...]) -> Stream:
        # A view, for Dynamo compiles again where two inputs are the very same tensor.
        return (x, *kept, x.view_as(x)) if self.keeps else (x, *kept)

    def extra_repr(self) -> str:
        """What begins and ends here."""
        return f"takes={self.takes}, keeps={self.keeps}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNetSkips(Scheme):
    """U-net skips (``"unet_skips"``): the output of block b joins the stream before block L - 1 - b.

    Source: modded-nanogpt, record of 2024-11-10, no paper. Read: its ``train_gpt2.py`` of that record (12
    blocks: the outputs of blocks 0 to 5 are popped before blocks 6 to 11, so that the first weight doubles
    the stream it stands in; weights start at 1), ``train_gpt.py`` of 2025-10-04 (weights
    ``sigmoid(-1.5) = 0.18`` at the start, nothing kept of block 0: ``skips=[(5, 6), (4, 7), (3, 8), (2, 9),
    (1, 10)]``), the record of 2025-11-18, which keeps only ``(4, 7)``, and ``train_gpt_medium.py`` of 2026
    (``[(6, 9), (4, 10), (2, 11)]``). Departures: the weight is a plain number as in 2024, without the later
    sigmoid and its gate that reads the embedding; in a stack of an odd number of blocks the one in the middle
    has no skip.

    Attributes:
        skips: pairs ``(lower, upper)`` of blocks, 0-based: the output of the one is added to what the other
            reads. None takes the mirrored pairs. Sublayers beyond the last whole block have no skip.
        initial_weight: of every skip; 1 as published, 0 with ``exact_start``.
        sublayers_per_block: 2, or 1 for parallel blocks.
    """

    name: ClassVar[str] = "unet_skips"
    family: ClassVar[str] = "depth reads"
    year: ClassVar[int] = 2024
    paper: ClassVar[str] = "modded-nanogpt"
    formula: ClassVar[str] = "z = x + w s_(L-1-b); x' = z + F(N(z)), s_b the output of block b"
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=0.70, has_history=True
    )

    skips: tuple[tuple[int, int], ...] | None = None
    initial_weight: float = 1.0
    sublayers_per_block: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sublayers_per_block < 1:
            raise ConfigError(f"sublayers_per_block={self.sublayers_per_block} must be at least 1.")
        if self.skips is None:
            return
        pairs = tuple(tuple(pair) for pair in self.skips)  # a config read from JSON gives lists
        object.__setattr__(self, "skips", pairs)
        if any(len(pair) != 2 or not 0 <= pair[0] < pair[1] for pair in pairs):
            raise ConfigError(f"skips={self.skips} must be pairs of blocks (lower, upper), such as [(1, 4)].")
        if any(len({pair[end] for pair in pairs}) < len(pairs) for end in (0, 1)):
            raise ConfigError(f"skips={self.skips}: a block begins at most one skip and ends at most one.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build the one of sublayer ``index``."""
        block, inside = divmod(index, self.sublayers_per_block)
        pairs = self._pairs(num_sublayers // self.sublayers_per_block)
        taken = {upper: lower for lower, upper in pairs}.get(block) if inside == 0 else None
        still_open = sorted(lower for lower, upper in pairs if lower < block <= upper)
        return UNetSkipConnection(
            norm.build(width),
            initial_weight=0.0 if self.exact_start else self.initial_weight,
            takes=None if taken is None else still_open.index(taken),
            keeps=inside == self.sublayers_per_block - 1 and any(lower == block for lower, _ in pairs),
        )

    def _pairs(self, num_blocks: int) -> tuple[tuple[int, int], ...]:
        if self.skips is None:
            return tuple((lower, num_blocks - 1 - lower) for lower in range(num_blocks // 2))
        if highest := max((upper for _, upper in self.skips if upper >= num_blocks), default=None):
            raise ConfigError(f"skips={self.skips} end at block {highest} of a stack of {num_blocks} blocks.")
        return self.skips

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """The embedding alone goes in; nothing is kept yet."""
        return TupleTrunk(connections, self.build_final_norm(width=width, norm=norm), num_entries=1)
