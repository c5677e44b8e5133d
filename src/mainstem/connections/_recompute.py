"""Reads and writes that run again in the backward pass, so that what they work out is not kept for it.

::

     forward:   X ──► read ──► branch ──► u ──► write ──► X' ──► read ──► branch ──► u' ──► write ──► X''
     kept:      X                         u                                          u'
     backward:  X ──► read ─────────────► u ──► write ──► X' ──► read ─────────────► u' ──► write

A segment of sublayers keeps the stream it starts from and each branch's update; what else its reads and
writes save for backward is made again, once, when the first of it is asked for, and let go as it is used.
Branches keep what they keep and never run twice. As non-reentrant `torch.utils.checkpoint` does for one
function, this rests on `torch.autograd.graph.saved_tensors_hooks`, so that any read and write will do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

Recompute = Literal["off", "starts", "joins"]
_KEY = "mainstem.segment"


class Step(Protocol):
    """The part of a connection that runs again."""

    def read(self, stream: Any) -> tuple[Tensor, Any]:
        """Return what the branch sees, and the context for the write."""
        ...

    def write(self, stream: Any, update: Tensor, context: Any) -> Any:
        """Return the new stream."""
        ...


class _Keep(torch.autograd.Function):
    """Hands tensors on and saves them as any operation saves its inputs.

    So whoever manages saved tensors (a checkpoint around the block, off-loading, a counter of bytes) manages
    these, and PyTorch's own errors stand: changed in place, backward a second time.
    """

    @staticmethod
    def forward(ctx: Any, node: list[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        # Weakly: the graph holds the node, and holds the hooks that would hold it.
        node.append(weakref.ref(ctx))
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *grads


class _Kept:
    """Tensors that were kept, and whether each needs a gradient."""

    def __init__(self, tensors: Sequence[Tensor]):
        node: list[Any] = []
        self.tensors = tuple(tensors)
        if any(t.requires_grad for t in tensors):
            self.tensors = cast(tuple[Tensor, ...], _Keep.apply(node, *tensors))
        self._needs = [t.requires_grad for t in self.tensors]
        self._node = node[0] if node else None
        self._constant = () if node else self.tensors

    def release(self) -> tuple[Tensor, ...]:
        """Return the tensors for use in the graph, and hold them no longer."""
        tensors, self.tensors = self.tensors, ()
        return tensors

    def again(self) -> tuple[Tensor, ...] | None:
        """Return them as leaves of a graph of their own, or None where the graph that kept them is gone."""
        if self._node is None:
            return self._constant
        node = self._node()
        if node is None:
            return None
        return tuple(
            t.detach().requires_grad_(needs) for t, needs in zip(node.saved_tensors, self._needs, strict=True)
        )


class _Surroundings:
    """The random state and autocast of a moment of the forward pass."""

    def __init__(self, at: Tensor):
        kind = self._kind = at.device.type
        self._cpu = torch.get_rng_state()
        self._devices = get_device_states(at)
        self._autocast: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }

    def again(self) -> AbstractContextManager[Any]:
        """Restore the random state, and return a context with the autocast."""
        torch.set_rng_state(self._cpu)
        if self._devices[0]:
            set_device_states(*self._devices, device_type=self._kind)
        return torch.autocast(**self._autocast)

    @contextmanager
    def apart(self) -> Generator[None]:
        """Leave the random state of now as it is."""
        with torch.random.fork_rng(self._devices[0], device_type=self._kind if self._devices[0] else "cuda"):
            yield


class _DoneError(Exception):
    """All that was asked for has been made again."""


class _Sublayer:
    """What is needed to run one sublayer's read and write again."""

    def __init__(self, step: Step, at_read: _Surroundings):
        self.step = step
        self.at_read = at_read
        self.at_write: _Surroundings | None = None
        self.update: _Kept | None = None


class Segment:
    """Consecutive sublayers whose reads and writes run again together."""

    def __init__(self, stream: Any):
        self._is_tensor = isinstance(stream, Tensor)
        self._kept = _Kept((stream,) if isinstance(stream, Tensor) else stream)
        self._sublayers: list[_Sublayer] = []
        self._shapes: list[torch.Size] = []
        self._made: list[Tensor | None] = []
        self._last: tuple[weakref.ref[Tensor], ...] = ()

    def start(self) -> Any:
        """Return the stream that it starts from, kept."""
        return self._stream(self._kept.release())

    def run(self, step: Step, stream: Any, branch: Callable[[Tensor], Tensor]) -> Any:
        """Run one sublayer on the stream that the last one, or :meth:`start`, has returned."""
        self._last = ()  # nobody joins at a sublayer that was left by an exception
        first = stream if isinstance(stream, Tensor) else stream[0]
        sublayer = _Sublayer(step, _Surroundings(first))
        self._sublayers.append(sublayer)
        with saved_tensors_hooks(self._pack, self._unpack):
            read, context = step.read(stream)
        sublayer.update = _Kept((branch(read),))
        sublayer.at_write = _Surroundings(first)
        (update,) = sublayer.update.release()
        with saved_tensors_hooks(self._pack, self._unpack):
            new = step.write(stream, update, context)
        self._hand_on((new,) if isinstance(new, Tensor) else new)
        return new

    def _hand_on(self, stream: Sequence[Tensor]) -> None:
        self._last = tuple(weakref.ref(t) for t in stream)
        for t in stream:
            if t.grad_fn is not None:
                _metadata(t.grad_fn)[_KEY] = weakref.ref(self)

    def returned(self, stream: Any) -> bool:
        """Whether this very stream is what the last sublayer returned."""
        tensors = (stream,) if isinstance(stream, Tensor) else stream
        return len(tensors) == len(self._last) and all(
            ref() is t for ref, t in zip(self._last, tensors, strict=True)
        )

    def _stream(self, tensors: tuple[Tensor, ...]) -> Any:
        return tensors[0] if self._is_tensor else tensors

    def _pack(self, t: Tensor) -> int:
        self._shapes.append(t.shape)
        return len(self._shapes) - 1

    def _unpack(self, index: int) -> Tensor:
        if index >= len(self._made) or self._made[index] is None:
            self._made = self._make_again(index)
        made = self._made[index] if index < len(self._made) else None
        if made is None:
            raise RuntimeError(
                f"a connection saved {len(self._shapes)} tensors for backward and {len(self._made)} when its "
                "reads and writes were run again: it does not compute the same twice. Build it without "
                "recompute."
            )
        self._made[index] = None
        return made

    def _make_again(self, wanted: int) -> list[Tensor | None]:
        made: list[Tensor | None] = []

        def pack(t: Tensor) -> None:
            if t.shape != self._shapes[len(made)]:
                raise RuntimeError(
                    f"a connection saved a tensor of shape {tuple(self._shapes[len(made)])} for backward and "
                    f"one of {tuple(t.shape)} when its reads and writes were run again: it does not compute "
                    "the same twice. Build it without recompute."
                )
            made.append(t.detach())
            if len(made) == len(self._shapes):
                raise _DoneError

        try:
            with (
                self._sublayers[0].at_read.apart(),
                torch.enable_grad(),
                saved_tensors_hooks(pack, _never),
            ):
                self._run_again(lambda: len(made) > wanted)
        except _DoneError:
            pass
        return made

    def _run_again(self, enough: Callable[[], bool]) -> None:
        tensors = self._kept.again()
        if tensors is None:
            return
        stream = self._stream(tensors)
        for sublayer in self._sublayers:
            with sublayer.at_read.again():
                _, context = sublayer.step.read(stream)
            try:
                update = None if sublayer.update is None else sublayer.update.again()
            except RuntimeError:
                if not enough():
                    raise
                return  # what follows had no part in this backward pass, which has let its update go
            if update is None or sublayer.at_write is None:
                return
            with sublayer.at_write.again():
                stream = sublayer.step.write(stream, update[0], context)


def _never(_: Any) -> Tensor:
    raise AssertionError("the second run of reads and writes has no backward pass")


def run_recomputed(step: Step, how: Recompute, stream: Any, branch: Callable[[Tensor], Tensor]) -> Any:
    """Run a sublayer whose read and write run again in the backward pass.

    Args:
        step: its connection.
        how: ``"starts"`` a segment, or ``"joins"`` the one whose last write has made ``stream``; where there
            is none, because somebody put another stream in its place, it starts one too.
        stream: before the sublayer.
        branch: what reads and returns an update in the stream's dtype.

    Returns:
        The stream after it; the same numbers and gradients as without.
    """
    segment = _segment_of(stream) if how == "joins" else None
    if segment is None:
        segment = Segment(stream)
        stream = segment.start()
    return segment.run(step, stream, branch)


def _metadata(node: Any) -> dict[str, Any]:
    return node.metadata


def _segment_of(stream: Any) -> Segment | None:
    for t in (stream,) if isinstance(stream, Tensor) else stream:
        if t.grad_fn is not None:
            ref = _metadata(t.grad_fn).get(_KEY)
            segment = None if ref is None else ref()
            return segment if segment is not None and segment.returned(stream) else None
    return None
