"""The data flow of one forward pass: which call made which tensor from which tensors."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mainstem.observe._frames import Frame, FrameTracker


@dataclasses.dataclass(frozen=True, order=True)
class CallKey:
    """Finds the same call again in another pass: which module call, which function, the how-many-th there."""

    frame: Frame
    function: str
    ordinal: int


@dataclasses.dataclass(eq=False)
class Node:
    """One call of a torch function, or (without arguments, named ``input:NAME``) a tensor from the caller.

    Attributes:
        index: place in execution order.
        key: how to find this call in another pass.
        stack: the open module calls, outermost first.
        args: positional arguments; ``kwargs``: keyword arguments (tensors included, kept alive).
        inputs: for each flattened argument that is a tensor: (slot, tensor, node that made it or -1).
        outputs: tensors it made; for an in-place call, the tensor it changed.
        inplace: slots of the arguments that the call changed.
    """

    index: int
    key: CallKey
    stack: tuple[Frame, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[tuple[int, Tensor, int]]
    outputs: list[Tensor]
    inplace: frozenset[int]

    @property
    def name(self) -> str:
        """Canonical name of the function."""
        return self.key.function

    @property
    def output(self) -> Tensor:
        """The first tensor it made."""
        return self.outputs[0]


@dataclasses.dataclass(eq=False)
class Trace:
    """All calls of one pass.

    Attributes:
        nodes: in execution order.
        maker: id of a tensor -> index of the node that last wrote it.
        result: what the model returned.
        parameters: ids of the model's parameters and buffers.
    """

    nodes: list[Node]
    maker: dict[int, int]
    result: Any
    parameters: set[int]


def function_name(func: Callable[..., Any]) -> str:
    """Name a torch function in one way, however it was spelled: ``a + b``, ``a.add_(b)``, ``torch.add(a,
    b)``."""
    name: str = getattr(func, "__name__", "") or str(func)
    if name == "__get__":
        return "get:" + str(getattr(getattr(func, "__self__", None), "__name__", "?"))
    bare = name.strip("_")
    for prefix in ("r", "i"):
        if name.startswith("__") and bare.startswith(prefix) and bare[1:] in _OPERATORS:
            bare = bare[1:]
    return _OPERATORS.get(bare, bare)


_OPERATORS = {
    "add": "add",
    "sub": "sub",
    "subtract": "sub",
    "mul": "mul",
    "multiply": "mul",
    "truediv": "div",
    "true_divide": "div",
    "div": "div",
    "divide": "div",
    "matmul": "matmul",
    "pow": "pow",
    "getitem": "getitem",
    "setitem": "setitem",
}


class CallCounter:
    """Gives each call its key."""

    def __init__(self, tracker: FrameTracker):
        self._tracker = tracker
        self._counts: defaultdict[tuple[Frame, str], int] = defaultdict(int)

    def key(self, func: Callable[..., Any], tensors: Iterable[Any]) -> CallKey:
        """Return the key of the call that happens now, counting it.

        Calls on integers and masks are counted apart: how many there are depends on what the caller passes,
        such as a mask, and must not shift the numbers of the others.
        """
        frame = self._tracker.current
        name = function_name(func)
        if not any(isinstance(t, Tensor) and carries(t) for t in tensors):
            name += " of integers"
        ordinal = self._counts[frame, name]
        self._counts[frame, name] = ordinal + 1
        return CallKey(frame, name, ordinal)


class _TraceMode(TorchFunctionMode):
    def __init__(self, tracker: FrameTracker):
        super().__init__()
        self._tracker = tracker
        self._counter = CallCounter(tracker)
        self.nodes: list[Node] = []
        self.maker: dict[int, int] = {}
        self._by_storage: defaultdict[int, set[int]] = defaultdict(set)
        self._alive: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [(i, t) for i, t in enumerate(pytree.tree_leaves((args, kwargs))) if isinstance(t, Tensor)]
        versions = [_version(t) for _, t in tensors]
        out = func(*args, **kwargs)
        changed = frozenset(
            slot for (slot, t), v in zip(tensors, versions, strict=True) if v is not None and _version(t) != v
        )
        taken = {id(t) for _, t in tensors}
        made = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and id(t) not in taken]
        key = self._counter.key(func, (t for _, t in tensors))
        if tensors and (made or changed):
            self._register(key, args, kwargs, tensors, made, changed)
        else:  # a property, a no-op cast, or a call that made something from nothing
            self._alive += made
        return out

    def _register(
        self,
        key: CallKey,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[tuple[int, Tensor]],
        made: list[Tensor],
        changed: frozenset[int],
    ) -> None:
        inputs = [(slot, t, self.maker.get(id(t), -1)) for slot, t in tensors]
        altered = [t for slot, t in tensors if slot in changed]
        index = len(self.nodes)
        self.nodes.append(
            Node(index, key, self._tracker.stack, args, kwargs, inputs, made or altered, changed)
        )
        for t in made:
            self._by_storage[_storage(t)].add(id(t))
            self.maker[id(t)] = index
        for t in altered:  # whoever looks at the same memory sees the change
            for one in self._by_storage[_storage(t)] | {id(t)}:
                self.maker[one] = index
        self._alive += made

    def add_input(self, name: str, value: Tensor) -> None:
        """Make a node for a tensor that the caller hands to the model."""
        key = CallKey(self._tracker.outside, f"input:{name}", 0)
        self.maker[id(value)] = len(self.nodes)
        self._by_storage[_storage(value)].add(id(value))
        self.nodes.append(Node(len(self.nodes), key, (), (), {}, [], [value], frozenset()))


def carries(t: Tensor) -> bool:
    """Whether a tensor can hold a state of the stream, complex numbers (rotary positions) included."""
    return t.is_floating_point() or t.is_complex()


def _version(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version  # pyright: ignore[reportPrivateUsage]


def _storage(t: Tensor) -> int:
    try:
        return t.untyped_storage().data_ptr() or id(t)
    except (RuntimeError, NotImplementedError):  # sparse, functorch and fake tensors have none
        return id(t)


def trace(model: nn.Module, inputs: Mapping[str, Any]) -> Trace:
    """Run ``model(**inputs)`` once without gradients and return its data flow.

    Random state is left as it was. The tensors of the pass stay alive as long as the trace does, so use few
    tokens.
    """
    tracker = FrameTracker(model)
    mode = _TraceMode(tracker)
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            mode.add_input(name, value)
    with torch.random.fork_rng(), torch.no_grad(), tracker, mode:
        result = model(**inputs)
    parameters = {id(t) for t in model.parameters()} | {id(t) for t in model.buffers()}
    return Trace(mode.nodes, mode.maker, result, parameters)
