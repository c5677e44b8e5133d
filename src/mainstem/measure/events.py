"""What a reducer is handed while a model runs, and what a reducer is."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.measure._state import decode, encode
from mainstem.measure.geometry import Asked, BlockGeometry, KnownState


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """The tokens of one forward pass on the host; a token is addressed by its flat place in ``[batch *
    pos]``.

    Attributes:
        rest: flat places of real tokens that are not the first of their sequence, ascending.
        first: flat places of the first real token of every sequence that has one, ascending.
        position: ``[batch * pos]``: place of each token in its own sequence; -1 for padding.
        sequence: ``[batch * pos]``: number of the token's sequence among all sequences of the text.
        token_ids: ``[batch * pos]``, or None for a model that reads no tokens.
    """

    rest: NDArray[np.int64]
    first: NDArray[np.int64]
    position: NDArray[np.int64]
    sequence: NDArray[np.int64]
    token_ids: NDArray[np.int64] | None

    def token_id(self, place: int) -> int | None:
        """Id of the token at a flat place, or None for a model that reads no tokens."""
        return None if self.token_ids is None else int(self.token_ids[place])


@dataclasses.dataclass(frozen=True)
class Batch:
    """The tokens of one forward pass.

    Attributes:
        mask: ``[batch, pos]`` bool, True for a real token, False for padding (on either side).
        token_ids: ``[batch, pos]`` int64, or None for a model that reads no tokens.
        first_sequence: number of the first row among all sequences of the text, so that a finding can name
            its window.
    """

    mask: Tensor
    token_ids: Tensor | None = None
    first_sequence: int = 0

    @functools.cached_property
    def position(self) -> Tensor:
        """``[batch, pos]`` int64: place of each token in its own sequence, 0-based; -1 for padding."""
        return torch.where(self.mask, self.mask.long().cumsum(-1) - 1, -1)

    @functools.cached_property
    def is_first(self) -> Tensor:
        """``[batch, pos]`` bool: the first real token of each sequence."""
        return self.position == 0

    @functools.cached_property
    def is_last(self) -> Tensor:
        """``[batch, pos]`` bool: the last real token of each sequence."""
        return self.mask & (self.position == self.mask.sum(-1, keepdim=True) - 1)

    @functools.cached_property
    def is_rest(self) -> Tensor:
        """``[batch, pos]`` bool: real tokens that are not the first."""
        return self.mask & ~self.is_first

    @functools.cached_property
    def host(self) -> HostBatch:
        """The same on the host, in numpy. One device synchronisation a pass, however many reducers ask."""
        rows, columns = self.mask.shape
        position = self.position.reshape(-1).cpu().numpy()
        sequence = np.repeat(np.arange(rows, dtype=np.int64) + self.first_sequence, columns)
        ids = None if self.token_ids is None else self.token_ids.detach().reshape(-1).cpu().numpy()
        return HostBatch(np.flatnonzero(position > 0), np.flatnonzero(position == 0), position, sequence, ids)

    def places(self, which: str, device: torch.device, every: int = 1) -> Tensor:
        """Flat places of some tokens in ``[batch * pos]``, int64, on ``device``, kept for the rest of the
        pass.

        Args:
            which: ``"all"`` real tokens, the ``"first"`` or the ``"last"`` of each sequence, or the
                ``"rest"``.
            device: where the index is needed.
            every: of these, only positions that are a multiple of this (position 0 always is).
        """
        key = (which, device, every)
        if key not in self._places:
            chosen = self.mask if which == "all" else getattr(self, f"is_{which}")
            if every > 1:
                chosen = chosen & (self.position % every == 0)
            self._places[key] = chosen.reshape(-1).nonzero().squeeze(-1).to(device)
        return self._places[key]

    @functools.cached_property
    def _places(self) -> dict[tuple[str, torch.device, int], Tensor]:
        return {}

    @functools.cached_property
    def asked(self) -> Asked:
        """What the blocks of this pass were asked for so far: the next one works it out in one go."""
        return {}

    @functools.cached_property
    def latest(self) -> list[KnownState]:
        """The state measured last in this pass, if any: a block's input is the last one's output."""
        return []


@dataclasses.dataclass(frozen=True)
class Write:
    """One thing that was added to the stream.

    Attributes:
        kind: ``"attn"``, ``"cross_attn"``, ``"mlp"``, ``"mixer"`` or ``"other"``.
        value: what was added, after any norm or scale on it, in the stream's shape.
    """

    kind: str
    value: Tensor


@dataclasses.dataclass(frozen=True)
class SublayerEvent:
    """One join: ``after = carried + sum(writes)``.

    Attributes:
        index: number of the sublayer in the model, 0-based.
        carried: what the sublayer kept of the stream. For the plain residual it is the stream itself;
            zero-size ideas do not occur: None where nothing was carried (no residual).
        writes: what was added; two for a parallel block.
        after: the joined sum, ``[batch, pos, width]`` or ``[batch, pos, n, width]``.
    """

    index: int
    carried: Tensor | None
    writes: tuple[Write, ...]
    after: Tensor


@dataclasses.dataclass(frozen=True)
class BlockEvent:
    """One block, as soon as its last sublayer has written.

    Attributes:
        block: number of the block, 0-based; the events of one pass come in ascending order, without gaps.
        num_blocks: how many blocks the model has.
        before: state of the stream before the block (``resid_pre``), ``[batch, pos, width]`` or
            ``[batch, pos, n, width]``, in the model's dtype.
        sublayers: the block's joins, in order.
        after: state after the block (``resid_post``), before any final norm. Equal to the last sublayer's
            ``after`` where the stream itself is not normed or scaled.
        batch: the tokens.
    """

    block: int
    num_blocks: int
    before: Tensor
    sublayers: tuple[SublayerEvent, ...]
    after: Tensor
    batch: Batch

    def writes(self, kind: str) -> list[Tensor]:
        """Return the values of all writes of one kind in this block."""
        return [w.value for s in self.sublayers for w in s.writes if w.kind == kind]

    def states(self) -> list[tuple[int, Tensor]]:
        """Return the states that no earlier event of the pass has shown, numbered ``0 .. num_blocks``.

        State ``l`` is the stream before block ``l``; state ``num_blocks`` the stream after the last one. Only
        block 0 shows two.
        """
        after = [(self.block + 1, self.after)]
        return [(0, self.before), *after] if self.block == 0 else after

    @functools.cached_property
    def geometry(self) -> BlockGeometry:
        """Norms and inner products of this block, each computed at most once, for all reducers together."""
        return BlockGeometry(self)


class Reducer(abc.ABC):
    """Turns events into a result that does not grow with the number of tokens.

    ``update`` is called once a block and pass; ``end_pass`` once a pass, after the last block. ``merge`` adds
    another reducer of the same construction, as if its events had been seen here: the figures are the same as
    one process would give, up to fp64 rounding. A reducer must not keep or change a tensor it is handed.

    Attributes:
        name: the word its result goes by.
        saved: names of the attributes that hold what it has seen, for ``state_dict``.
    """

    name: ClassVar[str] = ""
    saved: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def update(self, event: BlockEvent) -> None:
        """Take in one block."""

    def end_pass(self, batch: Batch) -> None:
        """Take in that one forward pass is complete."""
        return None

    @abc.abstractmethod
    def merge(self, other: Any) -> None:
        """Add what ``other``, a reducer of the same class and options, has seen."""

    @abc.abstractmethod
    def result(self) -> Any:
        """Return the figures so far, as a dataclass or a dict of plain numbers and lists."""

    def state_dict(self) -> dict[str, Any]:
        """Return what complete passes have left, by name: JSON's values, and tensors, in copies.

        Raises:
            ConfigError: a reducer of this kind keeps no state that could be stored.
        """
        if not self.saved:
            raise ConfigError(
                f"{type(self).__name__} cannot be stored: it names nothing that it has seen in `saved`."
            )
        return {name: encode(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what was seen by what a reducer of the same class and options gave as ``state_dict``.

        Raises:
            ConfigError: it is of another kind.
        """
        if set(state) != set(self.saved):
            raise ConfigError(
                f"A state of {', '.join(state)} was given to {type(self).__name__}, which keeps "
                f"{', '.join(self.saved)}."
            )
        for name in self.saved:
            setattr(self, name, decode(state[name]))
