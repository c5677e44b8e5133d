"""Norms and inner products of one block, each computed at most once and shared by every reducer.

Several streams ``[batch, pos, n, width]`` are measured as one vector of length ``n * width`` per token.
Inner products and norms are taken in fp32 (fp64 for an fp64 model) whatever the model's dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

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


_CHUNK_BYTES = 1 << 20


def _by_rows(measure: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]) -> Tensor:
    """Apply ``measure`` to some rows of all ``tensors`` at a time and join its last axis.

    On a CPU, temporaries of a whole state ([1024, 576] fp32) cost more than the arithmetic: the allocator
    hands fresh pages to each (all figures of one block: 3.7 ms whole, 1.1 ms by chunks that stay in a core's
    cache).
    """
    rows = max(1, _CHUNK_BYTES // (4 * tensors[0].shape[1]))
    if tensors[0].device.type != "cpu" or rows >= tensors[0].shape[0]:
        return measure(tensors)
    pieces = zip(*(t.split(rows) for t in tensors), strict=True)
    return torch.cat([measure(list(piece)) for piece in pieces], -1)


def measuring_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def token_norm(x: Tensor) -> Tensor:
    """Return ``|x_t|`` over all axes but the first two, ``[batch * pos]``, fp32 (fp64 for fp64).

    A norm that overflows fp32 (entries beyond 1e19) is inf.
    """
    # vector_norm 20 us, square().sum(-1) 39 us, sqrt(vecdot(x, x)) 55 us on [4, 256, 576] fp32, 2 threads.
    return torch.linalg.vector_norm(flat_streams(x), dim=-1, dtype=measuring_dtype(x.dtype))


def token_dot(x: Tensor, y: Tensor) -> Tensor:
    """Return ``<x_t, y_t>`` over all axes but the first two, ``[batch * pos]``, fp32 (fp64 for fp64)."""
    return _by_rows(_dot, [flat_streams(x), flat_streams(y)])


def _dot(rows: list[Tensor]) -> Tensor:
    dtype = measuring_dtype(rows[0].dtype)
    # vecdot 53 us, (x * y).sum(-1) 54 us, F.cosine_similarity 151 us, einsum 234 us, in fp64 3,900 us.
    return torch.linalg.vecdot(rows[0].to(dtype), rows[1].to(dtype))


def _total(rows: list[Tensor]) -> Tensor:
    before, *writes = rows
    total = writes[0].to(measuring_dtype(writes[0].dtype))
    for write in writes[1:]:
        total = total + write
    return torch.stack([torch.linalg.vector_norm(total, dim=-1), _dot([total, before])])


def token_largest(x: Tensor) -> Tensor:
    """Return ``max_i |x_ti|`` over all axes but the first two, ``[batch * pos]``, in the dtype of x."""
    # abs().amax(-1) 44 us, abs().max(-1) 218 us (it also returns indices), aminmax(dim=-1) 633 us, inf-norm
    # 822 us.
    return _by_rows(lambda rows: rows[0].abs().amax(-1), [flat_streams(x)])


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


class BlockGeometry:
    """Lazily computed norms and inner products of one block.

    Sums of writes and inner products of states are computed directly, not derived: position 0 of a real model
    has a norm of 24,000 and writes of norm 10, so that ``|h'|^2 - |h|^2`` holds no correct digit in fp32.
    """

    def __init__(self, event: BlockEvent):
        # Not the event itself: it holds this object, and a cycle would keep its tensors until a collection.
        self._before, self._after, self._sublayers = event.before, event.after, event.sublayers
        self._latest = event.batch.latest
        self._norms: dict[int, Tensor] = {}
        if self._latest and self._latest[0].tensor() is event.before:
            self._norms[id(event.before)] = self._latest[0].norm

    def norm(self, x: Tensor) -> Tensor:
        """``|x_t|`` of a tensor that the event holds, computed once however often it is asked for."""
        # Keyed by id: the event keeps its tensors alive for as long as this object can be asked.
        if id(x) not in self._norms:
            self._norms[id(x)] = token_norm(x)
            if x is self._after:
                self._latest[:] = [KnownState(weakref.ref(x), self._norms[id(x)])]
        return self._norms[id(x)]

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
                    dot = token_dot(write.value, carried)
                    found.append(WriteGeometry(place, write.kind, norm, self.norm(carried), dot))
        return found

    @functools.cached_property
    def total(self) -> tuple[Tensor, Tensor] | None:
        """``(|W|, <W, before>)``, ``W`` the sum of the writes, each ``[batch * pos]``; None without any."""
        writes = [write for sublayer in self._sublayers for write in sublayer.writes]
        if not writes:
            return None
        if len(writes) == 1 and self._sublayers[0].carried is self._before:
            only = self.writes[0]
            return only.norm, only.dot if only.dot is not None else token_dot(writes[0].value, self._before)
        norm, dot = _by_rows(_total, [flat_streams(self._before), *(flat_streams(w.value) for w in writes)])
        return norm, dot

    @functools.cached_property
    def before_dot_after(self) -> Tensor:
        """``<before, after>``, ``[batch * pos]``."""
        return token_dot(self._before, self._after)
