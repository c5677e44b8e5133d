"""Norms and inner products of one block, each computed at most once and shared by every reducer.

Several streams ``[batch, pos, n, width]`` are measured as one vector of length ``n * width`` per token.
Inner products and norms are taken in fp32 (fp64 for an fp64 model) whatever the model's dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mainstem.measure.events import BlockEvent


def flat_streams(x: Tensor) -> Tensor:
    """Return ``x`` as ``[batch * pos, width]``, all streams of a token in one row, detached, in its own
    dtype.

    Raises:
        ValueError: ``x`` is neither ``[batch, pos, width]`` nor ``[batch, pos, n, width]``.
    """
    if x.dim() not in (3, 4):
        raise ValueError(f"A stream is [batch, pos, width] or [batch, pos, n, width]; got {list(x.shape)}.")
    return x.detach().reshape(x.shape[0] * x.shape[1], -1)


_CHUNK_BYTES = 5 << 17


def _by_rows(measure: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]) -> Tensor:
    """Apply ``measure`` to some rows of all ``tensors`` at a time and join its last axis.

    On a CPU, temporaries of a whole state ([1024, 576] fp32) cost more than the arithmetic: the allocator
    hands fresh pages to each; and what is read twice should still be in a core's cache (all figures of one
    block: 2.0 ms whole, 0.7 ms by chunks).
    """
    num_rows = tensors[0].shape[0]
    rows = max(1, _CHUNK_BYTES // (4 * max(t.shape[1] for t in tensors)))
    if tensors[0].device.type != "cpu" or rows >= num_rows:
        return measure(tensors)
    even = math.ceil(num_rows / math.ceil(num_rows / rows))
    pieces = zip(*(t.split(even) for t in tensors), strict=True)
    return torch.cat([measure(list(piece)) for piece in pieces], -1)


def measuring_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def token_norm(x: Tensor) -> Tensor:
    """Return ``|x_t|`` over all axes but the first two, ``[batch * pos]``, fp32 (fp64 for fp64).

    A norm that overflows fp32 (entries beyond 1e19) is inf.
    """
    # vector_norm 20 us, square().sum(-1) 39 us, sqrt(vecdot(x, x)) 55 us on [4, 256, 576] fp32, 2 threads.
    return _norm(flat_streams(x))


def _norm(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1, dtype=measuring_dtype(rows.dtype))


def token_dot(x: Tensor, y: Tensor) -> Tensor:
    """Return ``<x_t, y_t>`` over all axes but the first two, ``[batch * pos]``, fp32 (fp64 for fp64)."""
    return _by_rows(_dot, [flat_streams(x), flat_streams(y)])


def _dot(rows: list[Tensor]) -> Tensor:
    dtype = measuring_dtype(rows[0].dtype)
    # vecdot 53 us, (x * y).sum(-1) 54 us, F.cosine_similarity 151 us, einsum 234 us, in fp64 3,900 us.
    return torch.linalg.vecdot(rows[0].to(dtype), rows[1].to(dtype))


def token_largest(x: Tensor) -> Tensor:
    """Return ``max_i |x_ti|`` over all axes but the first two, ``[batch * pos]``, in the dtype of x."""
    # abs().amax(-1) 44 us, abs().max(-1) 218 us (it also returns indices), aminmax(dim=-1) 633 us, inf-norm
    # 822 us.
    return _by_rows(lambda rows: _largest(rows[0]), [flat_streams(x)])


def _largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(-1)


@dataclasses.dataclass(frozen=True)
class KnownState:
    """Token norms of a state that was measured, and which tensor it was."""

    tensor: weakref.ref[Tensor]
    norm: Tensor


@dataclasses.dataclass(frozen=True)
class WriteGeometry:
    """One write against what its sublayer carried; every tensor is ``[batch * pos]``.

    Attributes:
        sublayer: place of the sublayer in its block, 0-based.
        kind: the write's kind.
        norm: ``|w|``.
        carried_norm: ``|c|``, None where the sublayer carried nothing.
        dot: ``<w, c>``, None where the sublayer carried nothing.
    """

    sublayer: int
    kind: str
    norm: Tensor
    carried_norm: Tensor | None
    dot: Tensor | None


Figure: TypeAlias = tuple[str, int, int]
"""What is measured of which tensors of an event, by their places among its distinct ones. ``("norm", x, x)``,
``("largest", x, x)``, ``("dot", x, y)``; of the sum of all writes ``("total_norm", x, y)`` and, with ``x``,
``("total_dot", x, y)``.
"""

Asked: TypeAlias = dict[Hashable, dict[Figure, None]]
"""Figures that blocks of one make were asked for, in order."""


class BlockGeometry:
    """Lazily computed norms and inner products of one block.

    The first block of a pass works out each figure when it is asked for. A later one of the same make works
    out, at the first question, all that those before it were asked for, some rows of all its tensors at a
    time, so that each tensor is read from memory once.

    Sums of writes and inner products of states are computed directly, not derived: position 0 of a real model
    has a norm of 24,000 and writes of norm 10, so that ``|h'|^2 - |h|^2`` holds no correct digit in fp32.
    """

    def __init__(self, event: BlockEvent):
        # Not the event itself: it holds this object, and a cycle would keep its tensors until a collection.
        self._sublayers = event.sublayers
        self._tensors: list[Tensor] = []
        # Keyed by id: the event keeps its tensors alive for as long as this object can be asked.
        self._places: dict[int, int] = {}
        self._before, self._after = self._place(event.before), self._place(event.after)
        joins = [
            (None if s.carried is None else self._place(s.carried), [self._place(w.value) for w in s.writes])
            for s in event.sublayers
        ]
        self._writes = [place for _, written in joins for place in written]
        make = (self._after, str(joins), *((t.shape, t.dtype, t.device) for t in self._tensors))
        self._asked = event.batch.asked.setdefault(make, {})
        self._on_one_device = len({t.device for t in self._tensors}) == 1
        self._found: dict[Figure, Tensor] = {}
        self._latest = event.batch.latest
        if self._latest and self._latest[0].tensor() is event.before:
            self._found["norm", self._before, self._before] = self._latest[0].norm

    def _place(self, x: Tensor) -> int:
        place = self._places.setdefault(id(x), len(self._tensors))
        if place == len(self._tensors):
            self._tensors.append(x)
        return place

    def _figure(self, what: str, x: int, y: int) -> Tensor:
        figure = (what, x, y)
        if figure not in self._found:
            # Figures of the state before alone are asked of the first block only: it is the last one's after.
            if (x, y) != (self._before, self._before):
                self._asked[figure] = None
            others = [f for f in self._asked if f not in self._found and f != figure]
            self._measure([figure, *others] if self._on_one_device else [figure])
            norm = self._found.get(("norm", self._after, self._after))
            if norm is not None:
                self._latest[:] = [KnownState(weakref.ref(self._tensors[self._after]), norm)]
        return self._found[figure]

    def _measure(self, wanted: list[Figure]) -> None:
        needed = {place for _, x, y in wanted for place in (x, y)}
        if any(what.startswith("total") for what, _, _ in wanted):
            needed.update(self._writes)
        order = sorted(needed)
        tensors = [flat_streams(self._tensors[place]) for place in order]

        def measure(rows: list[Tensor]) -> Tensor:
            return _figures(wanted, dict(zip(order, rows, strict=True)), self._writes)

        self._found.update(zip(wanted, _by_rows(measure, tensors), strict=True))

    def norm(self, x: Tensor) -> Tensor:
        """``|x_t|`` of a tensor that the event holds, computed once however often it is asked for."""
        return self._figure("norm", self._places[id(x)], self._places[id(x)])

    def largest(self, x: Tensor) -> Tensor:
        """``max_i |x_ti|`` of a tensor that the event holds, ``[batch * pos]``, fp32 (fp64 for fp64)."""
        return self._figure("largest", self._places[id(x)], self._places[id(x)])

    @functools.cached_property
    def writes(self) -> list[WriteGeometry]:
        """Every write of the block against what its sublayer carried, in order."""
        found: list[WriteGeometry] = []
        for place, sublayer in enumerate(self._sublayers):
            carried = sublayer.carried
            for write in sublayer.writes:
                norm = self.norm(write.value)
                if carried is None:
                    found.append(WriteGeometry(place, write.kind, norm, None, None))
                else:
                    dot = self._figure("dot", self._places[id(write.value)], self._places[id(carried)])
                    found.append(WriteGeometry(place, write.kind, norm, self.norm(carried), dot))
        return found

    @functools.cached_property
    def total(self) -> tuple[Tensor, Tensor] | None:
        """``(|W|, <W, before>)``, ``W`` the sum of the writes, each ``[batch * pos]``; None without any."""
        if not self._writes:
            return None
        if len(self._writes) == 1:
            (only,) = self._writes
            return self._figure("norm", only, only), self._figure("dot", only, self._before)
        norm = self._figure("total_norm", self._before, self._after)
        return norm, self._figure("total_dot", self._before, self._after)

    @functools.cached_property
    def before_dot_after(self) -> Tensor:
        """``<before, after>``, ``[batch * pos]``."""
        return self._figure("dot", self._before, self._after)


def _figures(wanted: list[Figure], rows: dict[int, Tensor], writes: list[int]) -> Tensor:
    """Work out figures of some tokens, ``[len(wanted), rows]``, fp32 or, where one is, fp64."""
    wide: dict[int, Tensor] = {}

    def widened(place: int) -> Tensor:
        if place not in wide:
            wide[place] = rows[place].to(measuring_dtype(rows[place].dtype))
        return wide[place]

    total: Tensor | None = None
    found: list[Tensor] = []
    for what, x, y in wanted:
        if what.startswith("total") and total is None:
            total = functools.reduce(torch.add, (widened(place) for place in writes))
        if what == "norm":
            found.append(_norm(rows[x]))
        elif what == "largest":
            found.append(_largest(rows[x]).to(measuring_dtype(rows[x].dtype)))
        elif what == "dot":
            found.append(torch.linalg.vecdot(widened(x), widened(y)))
        elif what == "total_norm":
            assert total is not None
            found.append(_norm(total))
        else:
            assert total is not None
            found.append(torch.linalg.vecdot(total, widened(x)))
    return found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)
