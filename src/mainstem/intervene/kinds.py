"""Interventions as data: where in the stream, at which positions, and what is put there."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from mainstem.errors import ConfigError

PARTS = ("block", "writes", "attn", "mlp", "cross_attn", "mixer", "other", "state")
"""What an intervention can be at; see `Intervention`."""


class Place(NamedTuple):
    """One place of the stream that can be changed.

    Attributes:
        block: its number, 0-based.
        part: ``"block"``, ``"state"``, or the kind of a write.
        sublayer: of a write: the place of its sublayer in the block, from 0, so that two of a kind are told
            apart. 0 for the others.
    """

    block: int
    part: str
    sublayer: int = 0


ByPlace: TypeAlias = Mapping[int, Tensor] | Mapping[Place, Tensor]
"""Tensors by place, or by block, for whatever part of it is changed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intervention(abc.ABC):
    """One change of a model's stream, at one or more blocks.

    Attributes:
        blocks: numbers of the blocks, 0-based.
        part: what is changed. ``"block"``: the update of the whole block, ``after - before``, whatever is in
            it (a norm on the stream too); ``"attn"``, ``"mlp"``, ``"cross_attn"``, ``"mixer"``, ``"other"``:
            what sublayers of that kind add; ``"writes"``: what every sublayer adds; ``"state"``: the stream
            as it leaves the block.
        positions: places in the pass, negative ones from its end; all when not given.
        rows: sequences of the batch, a half-open range of step 1; all when not given.
    """

    blocks: Sequence[int]
    part: str = "block"
    positions: Sequence[int] | None = None
    rows: range | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if not self.blocks:
            raise ConfigError(f"{type(self).__name__} names no block; give blocks=[...], 0-based.")
        if self.part not in PARTS:
            raise ConfigError(f"part is {self.part!r}; expected one of {', '.join(PARTS)}.")
        if self.positions is not None:
            object.__setattr__(self, "positions", tuple(self.positions))
        if self.rows is not None and (self.rows.step != 1 or self.rows.start < 0 or not self.rows):
            raise ConfigError(f"rows is {self.rows}; expected a range of step 1 that holds a row.")

    @property
    def scales(self) -> bool:
        """Whether it multiplies what it finds by a number, so that it may be done term by term."""
        return False

    @abc.abstractmethod
    def change(self, value: Tensor, place: Place) -> Tensor:
        """Return what is put in the place of ``value``, ``[batch, pos, (n,) width]``, at all positions."""

    def apply(self, value: Tensor, place: Place) -> Tensor:
        """Return ``value`` changed at the rows and positions of this intervention; a new tensor."""
        return self._select(value, lambda chosen: self.change(chosen, place))

    def apply_update(self, before: Tensor, after: Tensor, place: Place) -> Tensor:
        """Return the state after a block or sublayer whose update is changed; exact for a skip."""
        rows = self.rows or range(before.shape[0])

        def changed(chosen: Tensor) -> Tensor:
            start = before[rows.start : rows.stop].to(chosen.dtype)
            return self.change_update(start, chosen, place)

        return self._select(after, changed)

    def change_update(self, before: Tensor, after: Tensor, place: Place) -> Tensor:
        """Return ``before + change(after - before)``."""
        return before + self.change(after - before, place)

    def _select(self, value: Tensor, changed: Callable[[Tensor], Tensor]) -> Tensor:
        rows = self.rows or range(value.shape[0])
        if rows.stop > value.shape[0]:
            raise ConfigError(f"rows {rows} reach beyond the {value.shape[0]} sequences of the pass.")
        chosen = value[rows.start : rows.stop]
        new = changed(chosen).to(value.dtype)
        if new.shape != chosen.shape:
            raise ConfigError(
                f"{type(self).__name__} gives {list(new.shape)} where the stream has {list(chosen.shape)}."
            )
        if self.positions is not None:
            new = torch.where(self._places(value), new, chosen)
        if len(rows) == value.shape[0]:
            return new
        return torch.cat([value[: rows.start], new, value[rows.stop :]])

    def _places(self, value: Tensor) -> Tensor:
        num_positions = value.shape[1]
        assert self.positions is not None
        outside = [p for p in self.positions if not -num_positions <= p < num_positions]
        if outside:
            raise ConfigError(
                f"positions {outside} are outside a pass of {num_positions}; expected {-num_positions} to "
                f"{num_positions - 1}."
            )
        chosen = torch.zeros(num_positions, dtype=torch.bool)
        chosen[list(self.positions)] = True
        return chosen.to(value.device).view(1, -1, *[1] * (value.ndim - 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zero(Intervention):
    """Nothing is added: the write is 0. The sublayer's norm on the stream, if any, still acts (Post-LN)."""

    @property
    def scales(self) -> bool:
        """A write of several terms may be zeroed term by term."""
        return True

    def change(self, value: Tensor, place: Place) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(value)

    def change_update(self, before: Tensor, after: Tensor, place: Place) -> Tensor:
        """Return the state before."""
        return before


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skip(Zero):
    """The stream passes as if the block or sublayer were not there: the state after is the state before.

    The same as `Zero` where the stream is carried as it is; where it is normed, scaled or mixed on the way
    (Post-LN, hyper-connections), that is left out too. The outcome of removing the block.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part == "state":
            raise ConfigError("a state cannot be skipped; skip a 'block', or a sublayer such as 'attn'.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale(Intervention):
    """What is added, times ``factor``: 0 is `Zero`, 1 changes nothing, -1 gives the opposite advice."""

    factor: float

    @property
    def scales(self) -> bool:
        """A write of several terms may be scaled term by term."""
        return True

    def change(self, value: Tensor, place: Place) -> Tensor:
        """Return ``factor * value``."""
        return value * self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise(Intervention):
    """What is added, plus noise of ``size`` times its norm, token by token, in a random direction.

    ``w_t + size |w_t| g_t / |g_t|``, ``g`` standard normal, so that the noise's relative norm is ``size``
    exactly. Drawn on the host from ``seed`` and place: the same on every device, for a given shape.
    """

    size: float
    seed: int = 0

    def change(self, value: Tensor, place: Place) -> Tensor:
        """Return ``value`` and the noise; norms over all dims but batch and position."""
        wide = torch.promote_types(value.dtype, torch.float32)
        draw = torch.randn(value.shape, generator=_generator(self.seed, place), dtype=torch.float64)
        dims = tuple(range(2, value.ndim))
        direction = (draw / torch.linalg.vector_norm(draw, dim=dims, keepdim=True)).to(value.device, wide)
        size = torch.linalg.vector_norm(value.to(wide), dim=dims, keepdim=True)
        return value.to(wide) + self.size * size * direction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resample(Intervention):
    """What is added to one sequence is what was added, at the same positions, to another.

    Attributes:
        seed: of the choice.
        donors: by block or `Place`, recorded writes ``[sequences, pos, (n,) width]`` of another text, of
            which each sequence gets one at random; when not given, the sequences of the batch are given one
            another's, and none its own.
    """

    seed: int = 0
    donors: ByPlace | None = None

    def change(self, value: Tensor, place: Place) -> Tensor:
        """Return the writes of others.

        Raises:
            ConfigError: the batch holds one sequence and no donors were given, or none for this block.
        """
        generator, num_rows = _generator(self.seed, place), value.shape[0]
        if self.donors is not None:
            donors = _at_place(self.donors, place, "donors").to(value.device, value.dtype)
            chosen = torch.randint(len(donors), (num_rows,), generator=generator)
            return donors[chosen.to(value.device)]
        if num_rows < 2:
            raise ConfigError("Resample needs two sequences in a pass; give more, or donors of another text.")
        order = torch.randperm(num_rows, generator=generator)
        source = torch.empty_like(order)
        source[order] = order.roll(1)  # one cycle through all rows: none is its own donor
        return value[source.to(value.device)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replace(Intervention):
    """A given tensor in the place of what is added (or, at ``"state"``, of the stream): a patch.

    Attributes:
        values: by block or `Place`, ``[batch, pos, (n,) width]`` or anything that broadcasts to it.
    """

    values: ByPlace

    def change(self, value: Tensor, place: Place) -> Tensor:
        """Return the given tensor, in the stream's shape.

        Raises:
            ConfigError: there is none for this block, or it does not broadcast.
        """
        given = _at_place(self.values, place, "values").to(value.device, value.dtype)
        try:
            return given.expand(value.shape)
        except RuntimeError:
            raise ConfigError(
                f"the value for block {place.block} is {list(given.shape)}; expected {list(value.shape)} or "
                "what broadcasts to it."
            ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean(Intervention):
    """The mean over a corpus in the place of what is added, the same at every token.

    Attributes:
        means: the result of `WriteMeans`: by place, ``[(n,) width]``.
    """

    means: Mapping[Place, Tensor]

    def change(self, value: Tensor, place: Place) -> Tensor:
        """Return the mean, in the stream's shape.

        Raises:
            ConfigError: none was recorded for this place.
        """
        if place not in self.means:
            raise ConfigError(f"no mean was recorded for {place.part!r} of block {place.block}.")
        return self.means[place].to(value.device, value.dtype).expand(value.shape)


def _at_place(values: ByPlace, place: Place, name: str) -> Tensor:
    known = cast(Mapping[Any, Tensor], values)
    for key in (place, place.block):
        if key in known:
            return known[key]
    raise ConfigError(f"{name} has nothing for block {place.block}; it has {sorted(known)}.")


def _generator(seed: int, place: Place) -> torch.Generator:
    """Return a stream of random numbers of its own for each seed and place."""
    digest = hashlib.sha256(repr((seed, *place)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
