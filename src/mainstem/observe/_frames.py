"""Where in the module tree a call happens, known without touching any module but those of a ``tp_plan``."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from mainstem.observe._sharded import sharded_as_one_call


class Frame(NamedTuple):
    """One call of one module: its name in the tree and the how-many-th call of it in this pass (0-based)."""

    path: str
    call: int


def unwrapped(model: nn.Module) -> nn.Module:
    """Return what ``torch.compile(model)`` wraps: the wrapper hides all calls, and its module has the plain
    names."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


class _Open(threading.local):
    """The trackers of this thread, innermost last; global hooks fire for all of them and in all threads."""

    def __init__(self) -> None:
        self.trackers: list[FrameTracker] = []


_OPEN = _Open()


@contextmanager
def own_arithmetic() -> Generator[None]:
    """Have no tracker that is open now take the calls inside for calls of the model that it follows."""
    silent = list(_OPEN.trackers)
    for tracker in silent:
        tracker.silent += 1
    try:
        yield
    finally:
        for tracker in silent:
            tracker.silent -= 1


class FrameTracker:
    """Follows which module call is innermost, through PyTorch's global module hooks.

    The hooks are not on any module, so hook tables of the model and of other people are untouched; they are
    removed on exit, after an exception too. A pass within a pass (a reducer that records) is the inner
    tracker's alone, but where that was opened ``beside`` those already there, to follow the pass they follow
    (two monitors of one training). One that was opened ``around`` passes to come (an intervention) follows
    those of trackers that are opened inside it too, as long as it was in no pass itself just then. Modules of
    a ``tp_plan`` are one call each meanwhile; see `sharded_as_one_call`.
    """

    def __init__(self, model: nn.Module, *, beside: bool = False, around: bool = False):
        self._beside, self._around = beside, around
        self._busy: set[int] = set()
        self.silent = 0
        self._names = {id(m): name.replace("._orig_mod", "") for name, m in model.named_modules()}
        # torch.compile's wrapper is no call of its own: what it wraps has the name.
        self._wrappers = {id(m) for m in model.modules() if unwrapped(m) is not m}
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._stack: list[Frame] = []
        self._handles: list[RemovableHandle] = []
        self._sharded = sharded_as_one_call(model)
        self.outside = Frame("", -1)

    @property
    def current(self) -> Frame:
        """The innermost module call, or ``outside`` before the model was called and in `own_arithmetic`."""
        return self._stack[-1] if self._stack and not self.silent else self.outside

    @property
    def stack(self) -> tuple[Frame, ...]:
        """All open module calls, outermost first."""
        return tuple(self._stack)

    @property
    def _is_hidden(self) -> bool:
        """Whether the calls now made are those of a pass within the one that is followed."""
        for tracker in reversed(_OPEN.trackers):
            if tracker is self:
                return False
            if not tracker._beside and (not self._around or id(self) in tracker._busy):
                return True
        return True

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._is_hidden or id(module) in self._wrappers:
            return
        path = self._names.get(id(module))
        if path is None:  # a module made on the fly belongs to whoever made it
            parent = self.current.path
            path = f"{parent}.<{type(module).__name__}>" if parent else f"<{type(module).__name__}>"
        self._stack.append(Frame(path, self._calls[path]))
        self._calls[path] += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_hidden and self._stack and id(module) not in self._wrappers:
            self._stack.pop()

    def __enter__(self) -> FrameTracker:
        self._busy = {id(tracker) for tracker in _OPEN.trackers if tracker._stack}
        _OPEN.trackers.append(self)
        self._sharded.__enter__()
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._enter),
            torch_module.register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _OPEN.trackers.remove(self)
        self._sharded.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        self._stack.clear()
