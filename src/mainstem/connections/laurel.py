"""LAuReL: a residual with learned weights, a low-rank map or earlier states on the carried side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from mainstem.connections._base import (
    AffineStep,
    Connection,
    Context,
    ParameterGroup,
    Properties,
    Scheme,
    Stream,
    Trunk,
)
from mainstem.connections._depth import TupleTrunk, frozen_weighted_sum, weighted_sum
from mainstem.connections._norms import NormConfig
from mainstem.connections._policy import coefficient_dtype, weigh
from mainstem.errors import ConfigError

Variant = Literal["rw", "lr", "rw+lr", "pa"]


class LaurelConnection(Connection):
    """``x' = update_weight F(N(x)) + carry_weight x + up down x + sum_j past_weights_j x_j``.

    Each variant has some of these terms; a weight that it lacks is 1, a map or sum that it lacks is 0.

    Shapes: stream, read and update ``[batch, pos, width]``; with past states the stream is the tuple of this
    state and of those before it, newest first. ``down`` is ``[rank, width]``, ``up`` ``[width, rank]``,
    ``past_weights`` one number a past state.
    Parameters: one norm and 2 (rw), ``2 * rank * width`` (lr), at most ``num_previous`` (pa). FLOPs a token:
    ``2 * width``, ``4 * rank * width``, ``2 * num_previous * width``. Moved: 3 elements a channel as a plain
    addition, and one more a past state.
    Value at initialisation: weights 1, ``up`` and ``past_weights`` 0: the plain residual, exactly. ``down``
    is N(0, 1/width), so that ``up`` learns from the first step and ``down`` from the second.
    """

    update_weight: nn.Parameter | None
    carry_weight: nn.Parameter | None
    down: nn.Parameter | None
    up: nn.Parameter | None
    past_weights: nn.Parameter | None

    def __init__(self, norm: nn.Module, variant: Variant, *, width: int, rank: int, num_past: int, keep: int):
        """Build one that sees ``num_past`` earlier states and hands on at most ``keep`` of them."""
        super().__init__()
        self.norm = norm
        self.variant = variant
        self.keep = keep
        sizes: dict[str, tuple[bool, tuple[int, ...]]] = {
            "update_weight": ("rw" in variant, (1,)),
            "carry_weight": ("rw" in variant, (1,)),
            "down": ("lr" in variant, (rank, width)),
            "up": ("lr" in variant, (width, rank)),
            "past_weights": (num_past > 0, (num_past,)),
        }
        for name, (wanted, size) in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size)) if wanted else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values again."""
        super().reset_parameters()
        if self.update_weight is not None and self.carry_weight is not None:
            nn.init.ones_(self.update_weight)
            nn.init.ones_(self.carry_weight)
        if self.down is not None and self.up is not None:
            nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)
            nn.init.zeros_(self.up)
        if self.past_weights is not None:
            nn.init.zeros_(self.past_weights)

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed stream."""
        return self.norm(stream if isinstance(stream, Tensor) else stream[0]), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the new state, and with it the past states that are kept."""
        x = stream if isinstance(stream, Tensor) else stream[0]
        new = self._carried(x) + self._injected(update)
        if isinstance(stream, Tensor):
            return new
        if self.past_weights is not None:
            new = new + weighted_sum(self.past_weights, stream[1:])
        return new, *stream[: self.keep]

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Every coefficient is a parameter: the step is linear as it stands."""
        if isinstance(stream, Tensor):

            def carry_one(s: Stream) -> Stream:
                assert isinstance(s, Tensor)
                return self._carried(s)

            return AffineStep(carry=carry_one, inject=self._injected)

        def carry(s: Stream) -> Stream:
            new = self._carried(s[0])
            if self.past_weights is not None:
                new = new + frozen_weighted_sum(self.past_weights)(tuple(s[1:]))
            return new, *s[: self.keep]

        def inject(u: Tensor) -> Stream:
            return self._injected(u), *(torch.zeros_like(u) for _ in range(min(len(stream), self.keep)))

        return AffineStep(carry=carry, inject=inject)

    def parameter_groups(self) -> list[ParameterGroup]:
        """The two matrices are decayed, as matrices are; norms and weights are not."""
        matrices = tuple(p for p in (self.down, self.up) if p is not None)
        others = tuple(p for p in self.parameters() if p.ndim < 2)
        return [ParameterGroup(others), *([ParameterGroup(matrices, weight_decay=True)] if matrices else [])]

    def _carried(self, x: Tensor) -> Tensor:
        kept = x if self.carry_weight is None else weigh(self.carry_weight, x)
        if self.down is None or self.up is None:
            return kept
        wide = coefficient_dtype(x)
        return kept + (x.to(wide) @ self.down.to(wide).T @ self.up.to(wide).T).to(x.dtype)

    def _injected(self, update: Tensor) -> Tensor:
        return update if self.update_weight is None else weigh(self.update_weight, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Laurel(Scheme):
    """Learned Augmented Residual Layer (``"laurel"``).

    Source: Menghani, Kumar and Kumar 2024 (arXiv 2411.07501, ICML 2025), section 2. Read: the abstract, a
    secondary summary of the general form ``x' = alpha f(x) + g(x, ..., x_0)`` and of RW, and transformers'
    Gemma 3n, whose block is LR with a norm on the low-rank term. Not read in the full text: LR's and PA's
    initial values (ours are those under which the start is exact) and how RW keeps its two weights from
    growing (here they are free). PA weighs the past states themselves; the paper may map them first.

    Attributes:
        variant: ``"rw"`` weighs update and state, ``"lr"`` adds a low-rank map of the state, ``"rw+lr"``
            does both, ``"pa"`` adds earlier states.
        rank: of the low-rank map.
        num_previous: earlier states that ``"pa"`` looks back at.
    """

    name: ClassVar[str] = "laurel"
    family: ClassVar[str] = "gates"
    year: ClassVar[int] = 2024
    paper: ClassVar[str] = "2411.07501"
    formula: ClassVar[str] = "rw: x' = a F + b x; lr: x' = F + x + A B x; pa: x' = F + x + sum_j c_j x_j"
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=True, start_distance=0.0)

    variant: Variant = "lr"
    rank: int = 32
    num_previous: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in ("rw", "lr", "rw+lr", "pa"):
            raise ConfigError(f"variant {self.variant!r} is not known; choose 'rw', 'lr', 'rw+lr' or 'pa'.")
        for name in ("rank", "num_previous"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; the first ones have fewer states behind them."""
        looks_back = self.variant == "pa"
        return LaurelConnection(
            norm.build(width),
            self.variant,
            width=width,
            rank=self.rank,
            num_past=min(index, self.num_previous) if looks_back else 0,
            keep=self.num_previous if looks_back else 0,
        )

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """``"pa"`` has a tuple for its stream."""
        if self.variant != "pa":
            return super().build_trunk(connections, width=width, norm=norm)
        return TupleTrunk(connections, self.build_final_norm(width=width, norm=norm), num_entries=1)
