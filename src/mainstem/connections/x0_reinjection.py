"""Scaled stream with the embedding fed in again: two learned numbers before every block."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

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
from mainstem.connections._depth import TupleTrunk
from mainstem.connections._norms import NormConfig
from mainstem.connections._policy import coefficient_dtype
from mainstem.errors import ConfigError


class X0ReinjectionConnection(Connection):
    """``z = carry_weight * x + embed_weight * x0``, then ``x' = z + F(N(z))``.

    Shapes: stream ``(x, x0)``, both ``[batch, pos, width]``, ``x0`` the embedding; read and update the same.
    Parameters: one norm, and two numbers in the sublayers that mix. Cost: the addition of every residual,
    and where it mixes 3 multiply-adds a channel and 3 elements moved (reads two, makes one).
    Value at initialisation: ``carry_weight`` 1 and ``embed_weight`` 0 make it the plain residual, exactly.
    The carry weight multiplies through the depth and wants a learning rate 100 times smaller than the embed
    weight, which only adds; neither is decayed. A carry weight above 1 compounds: 1.1 at each of 1,000
    sublayers is beyond fp32.
    """

    carry_weight: nn.Parameter | None
    embed_weight: nn.Parameter | None

    def __init__(self, norm: nn.Module, initial: tuple[float, float] | None):
        """Build one; ``initial`` is carry and embed weight, or None for a sublayer that does not mix."""
        super().__init__()
        self.norm = norm
        self.initial = initial
        self.carry_weight = None if initial is None else nn.Parameter(torch.empty(1))
        self.embed_weight = None if initial is None else nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values again."""
        super().reset_parameters()
        if self.initial is not None and self.carry_weight is not None and self.embed_weight is not None:
            nn.init.constant_(self.carry_weight, self.initial[0])
            nn.init.constant_(self.embed_weight, self.initial[1])

    def _mix(self, x: Tensor, x0: Tensor) -> Tensor:
        if self.carry_weight is None or self.embed_weight is None:
            return x
        wide = coefficient_dtype(x)
        carried, embedded = self.carry_weight.to(wide) * x.to(wide), self.embed_weight.to(wide) * x0.to(wide)
        return (carried + embedded).to(x.dtype)

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed mixture, and the mixture for :meth:`write`."""
        x, x0 = stream
        mixed = self._mix(x, x0)
        return self.norm(mixed), mixed

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the mixture plus the update, and the embedding."""
        assert isinstance(context, Tensor)
        return context + update, stream[1]

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry mixes; inject adds to ``x`` and leaves ``x0``."""

        def carry(s: Stream) -> Stream:
            x, x0 = s
            return self._mix(x, x0), x0

        return AffineStep(carry=carry, inject=lambda u: (u, torch.zeros_like(u)))

    def parameter_groups(self) -> list[ParameterGroup]:
        """The carry weight learns 100 times slower."""
        groups = [ParameterGroup(tuple(self.norm.parameters()))]
        if self.carry_weight is not None and self.embed_weight is not None:
            groups.append(ParameterGroup((self.carry_weight,), lr_multiplier=0.01))
            groups.append(ParameterGroup((self.embed_weight,)))
        return groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class X0Reinjection(Scheme):
    """Scaled stream with embedding re-injection (``"x0_reinjection"``).

    Source: modded-nanogpt and nanochat (2024 to 2026), no paper. Read: nanochat's experiment log of
    2026-01-11, which starts at 1 and 0, mixes before every block and finds the rule of 100; its model code
    of later that year starts at 1.15 to 1.05 and 0.20 to 0.05 from the first block to the last
    (``carry_start=(1.15, 1.05), embed_start=(0.2, 0.05)``) and decays the carry weight by 0.05 where we do
    not; modded-nanogpt mixes at every sublayer (``sublayers_per_block=1``). Departure: nanochat norms the
    embedding before it enters the stream and feeds in that; here what enters the stream is fed in as it is.

    Attributes:
        sublayers_per_block: mix before every so many; 2 is once a block of attention and feed-forward.
        carry_start: ``carry_weight`` at the first and at the last sublayer that mixes; linear between.
        embed_start: ``embed_weight``, likewise.
    """

    name: ClassVar[str] = "x0_reinjection"
    family: ClassVar[str] = "gates"
    year: ClassVar[int] = 2024
    paper: ClassVar[str] = "modded-nanogpt, nanochat"
    formula: ClassVar[str] = "z = lambda x + mu x_0; x' = z + F(N(z))"
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=True, start_distance=0.0, has_history=True
    )

    sublayers_per_block: int = 2
    carry_start: tuple[float, float] = (1.0, 1.0)
    embed_start: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sublayers_per_block < 1:
            raise ConfigError(f"sublayers_per_block={self.sublayers_per_block} must be at least 1.")
        for name in ("carry_start", "embed_start"):  # a config read from JSON gives lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if len(getattr(self, name)) != 2:
                raise ConfigError(f"{name}={getattr(self, name)} must be two numbers, bottom and top.")
        if self.exact_start and (self.carry_start, self.embed_start) != ((1.0, 1.0), (0.0, 0.0)):
            raise ConfigError(
                "exact_start=True needs carry_start=(1, 1) and embed_start=(0, 0); leave them out."
            )

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; the first of each block mixes."""
        if index % self.sublayers_per_block:
            return X0ReinjectionConnection(norm.build(width), None)
        last = num_sublayers - 1 - (num_sublayers - 1) % self.sublayers_per_block
        place = index / max(last, 1)
        initial = tuple(a + (b - a) * place for a, b in (self.carry_start, self.embed_start))
        return X0ReinjectionConnection(norm.build(width), (initial[0], initial[1]))

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """The embedding goes in twice, to be worked on and to be kept."""
        return TupleTrunk(connections, self.build_final_norm(width=width, norm=norm), num_entries=2)
