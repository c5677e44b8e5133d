"""Find the first place in a model where a number stops being finite."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from mainstem.errors import StreamNotFoundError
from mainstem.observe import StreamMap, find_stream
from mainstem.observe._frames import Frame, FrameTracker, unwrapped
from mainstem.observe._trace import CallCounter, CallKey, function_name


@dataclasses.dataclass(frozen=True)
class NonFiniteSite:
    """The first place of a pass where a number is not finite though everything it was made from is.

    Attributes:
        module: dotted path of the module in which it came up; of the owner, for a parameter.
        block: 0-based number of the block, None outside the blocks.
        what: what it is, for people: ``"the update of the mlp, made by linear"``.
        value: ``"NaN"`` or ``"infinity"``.
        in_backward: whether it is a gradient; the forward pass was finite then.
    """

    module: str
    block: int | None
    what: str
    value: str
    in_backward: bool = False

    def describe(self) -> str:
        """Return one sentence."""
        where = "" if self.block is None else f"block {self.block}, "
        pass_name = "backward" if self.in_backward else "forward"
        return (
            f"the first number that is not finite is {self.value} in the {pass_name} pass: "
            f"{where}{self.module or 'the model itself'}: {self.what}."
        )


def first_non_finite(model: nn.Module, inputs: Mapping[str, Any]) -> NonFiniteSite | None:
    """Run ``model(**inputs)`` once and name the first place where a number is not finite, or return None.

    The pass is followed back from what the model returns (its loss, where it returns one), so that the
    infinities of an attention mask, which are meant, are not mistaken for the cause. If the loss is finite,
    its gradients are looked at. Parameters, their gradients, hooks, mode and random state are left as they
    were; compiled parts run uncompiled. Sharded by FSDP, all ranks have to call it.

    Args:
        model: run as it is, in train or eval mode.
        inputs: keyword arguments of its forward, with labels if gradients are wanted.
    """
    model = unwrapped(model)
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    names = _Names(model, inputs)
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a checkpointed block says that nothing in it needs a gradient
        site = _in_forward(model, inputs, names)
        return site if site is not None else _in_backward(model, inputs, names)


# ---- names ----


def numbered_blocks(model: nn.Module) -> dict[str, int]:
    """Return the paths of the members of the longest module list, and their numbers."""
    lists = {name: len(m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    longest = max(lists, key=lists.__getitem__, default="")
    return {f"{longest}.{i}": i for i in range(lists.get(longest, 0))}


class _Names:
    """Turns a call into words."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]):
        self.map: StreamMap | None = None
        try:
            self.map = find_stream(model, inputs)
        except StreamNotFoundError:
            self.blocks = numbered_blocks(model)
        else:
            self.blocks = {block.module: block.index for block in self.map.blocks if block.call == 0}

    def block(self, frame: Frame) -> int | None:
        """Return the number of the block that a module call belongs to."""
        parts = frame.path.split(".")
        paths = {".".join(parts[: i + 1]) for i in range(len(parts))}
        if self.map is None:
            return next((self.blocks[path] for path in paths if path in self.blocks), None)
        called = [b for b in self.map.blocks if b.module in paths]  # more than one where layers are shared
        return next((b.index for b in called if b.call == frame.call), called[0].index if called else None)

    def made(self, key: CallKey) -> str:
        """Say what a call makes."""
        by = f", made by {key.function}"
        if self.map is None:
            return f"its output{by}"
        block = self.block(key.frame)
        if block is None:
            return f"its output{by}"
        where = self.map.blocks[block]
        sites = self.map.sites[where.first_site : where.end_site]
        for site in sites:
            if key in (site.join.call, site.after.call) and site.carried:
                kinds = " and ".join(write.kind for write in site.writes)
                return f"the stream after the {kinds}{by}"
        for site in sites:
            for write in site.writes:
                if key.frame.path == write.module or key.frame.path.startswith(f"{write.module}."):
                    return f"the update of the {write.kind}{by}"
        return f"what is read from the stream{by}"


def _clean(path: str) -> str:
    """Leave out the wrapper of a compiled module."""
    return path.replace("_orig_mod.", "").removesuffix("._orig_mod")


# ---- forward ----


@dataclasses.dataclass(frozen=True)
class _Bad:
    """A call that made a number that is not finite, or (without key) a tensor that came as it is.

    Attributes:
        order: when.
        has_nan: whether it has NaN; infinities otherwise.
        parents: what it was made from that is not finite.
        is_given: nothing finite became infinite here: a constant, a mask, an input.
        leaf: the name of a parameter, buffer or input.
    """

    order: int
    has_nan: bool
    key: CallKey | None = None
    parents: tuple[_Bad, ...] = ()
    is_given: bool = False
    leaf: str = ""

    def origins(self, follow: Callable[[_Bad], bool]) -> list[_Bad]:
        """Return what this comes from, through parents that ``follow`` accepts."""
        found: list[_Bad] = []
        seen: set[int] = set()
        waiting = [self]
        while waiting:
            one = waiting.pop()
            if one.order in seen:
                continue
            seen.add(one.order)
            parents = [p for p in one.parents if follow(p)]
            waiting += parents
            if not parents:
                found.append(one)
        return found


class _Watcher(TorchFunctionMode):
    """Notes every call whose result is not finite, and nothing of the others."""

    def __init__(self, tracker: FrameTracker, leaves: Mapping[int, str]):
        super().__init__()
        self._counter = CallCounter(tracker)
        self._leaves = leaves
        self._number = 0
        self._bad: MutableMapping[Tensor, _Bad] = WeakTensorKeyDictionary()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = pytree.tree_leaves((args, kwargs))
        tensors = [t for t in given if isinstance(t, Tensor)]
        before = [self._bad[t] for t in tensors if t in self._bad]
        out = func(*args, **kwargs)
        if function_name(func).startswith("get:"):
            return out
        key = self._counter.key(func, tensors)
        made = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        if out is None or key.function == "setitem":
            made = tensors[:1]
        for t in made:
            has_nan, has_infinity = state_of(t)
            if not (has_nan or has_infinity) or "empty" in key.function:
                self._bad.pop(t, None)
                continue
            self._bad[t] = self._note(key, has_nan, given, before)
        return out

    def _note(self, key: CallKey, has_nan: bool, given: list[Any], before: list[_Bad]) -> _Bad:
        parents = [*before, *(leaf for t in given if (leaf := self.leaf(t)) is not None)]
        numbers = [x for x in given if isinstance(x, float)]
        no_tensor = not any(isinstance(t, Tensor) and t.is_floating_point() for t in given)
        is_given = not parents and (no_tensor or any(not math.isfinite(x) for x in numbers))
        self._number += 1
        return _Bad(self._number, has_nan, key, tuple(parents), is_given)

    def leaf(self, t: Any) -> _Bad | None:
        """Return a parameter, buffer or input that is not finite as it is given."""
        if not isinstance(t, Tensor) or id(t) not in self._leaves or t in self._bad:
            return None
        has_nan, has_infinity = state_of(t)
        if not (has_nan or has_infinity):
            return None
        self._number += 1
        name = self._leaves[id(t)]
        bad = _Bad(self._number, has_nan, is_given=not has_nan and ":" in name, leaf=name)
        self._bad[t] = bad
        return bad

    def of(self, t: Tensor) -> _Bad | None:
        """Return what made ``t``, if it is not finite."""
        return self._bad[t] if t in self._bad else self.leaf(t)


def state_of(t: Tensor) -> tuple[bool, bool]:
    """Return whether a tensor holds NaN, and whether it holds an infinity."""
    if not (t.is_floating_point() or t.is_complex()) or t.is_meta or bool(torch.isfinite(t).all()):
        return False, False
    return bool(torch.isnan(t).any()), bool(torch.isinf(t).any())


def _in_forward(model: nn.Module, inputs: Mapping[str, Any], names: _Names) -> NonFiniteSite | None:
    leaves = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    leaves |= {id(t): f"input:{name}" for name, t in inputs.items() if isinstance(t, Tensor)}
    tracker = FrameTracker(model)
    watcher = _Watcher(tracker, leaves)
    with torch.no_grad(), tracker, watcher:
        output = model(**inputs)
    loss = loss_of(output)
    ends = [loss] if loss is not None else [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
    bad = [found for t in ends if (found := watcher.of(t)) is not None]
    return _site(min((_origin(one) for one in bad), key=lambda o: o.order), names) if bad else None


def _origin(bad: _Bad) -> _Bad:
    """Follow NaN to where the first was born; if infinities made it, follow those that are not meant."""
    born = min(bad.origins(lambda p: p.has_nan), key=lambda o: o.order) if bad.has_nan else bad
    unmeant = [o for o in born.origins(lambda p: True) if o is not born and not o.is_given]
    return min(unmeant, key=lambda o: o.order) if unmeant else born


def _site(bad: _Bad, names: _Names) -> NonFiniteSite:
    value = "NaN" if bad.has_nan else "infinity"
    if bad.key is not None:
        frame = bad.key.frame
        return NonFiniteSite(_clean(frame.path), names.block(frame), names.made(bad.key), value)
    if bad.leaf.startswith("input:"):
        return NonFiniteSite("", None, f"its input {bad.leaf.removeprefix('input:')}", value)
    owner, _, name = bad.leaf.rpartition(".")
    what = f"its parameter or buffer {name!r}, before the pass began"
    return NonFiniteSite(_clean(owner), names.block(Frame(owner, 0)), what, value)


def loss_of(output: Any) -> Tensor | None:
    """Return the loss a model gave among its outputs, or None."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) and first.ndim == 0 else None


# ---- backward ----


class _GradientHooks(TorchFunctionMode):
    """Hooks the gradient of every tensor that a pass makes; the first hook to see a bad one has it."""

    def __init__(self, tracker: FrameTracker):
        super().__init__()
        self._counter = CallCounter(tracker)
        self.first: tuple[CallKey | str, bool] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if function_name(func).startswith("get:"):
            return out
        key = self._counter.key(func, pytree.tree_leaves((args, kwargs)))
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.requires_grad and not t.is_leaf:
                t.register_hook(self.looking_at(key))
        return out

    def looking_at(self, what: CallKey | str) -> Callable[[Tensor], None]:
        """Return a hook for the gradient of ``what``: a call's output, or a parameter by name."""

        def look(gradient: Tensor) -> None:
            if self.first is None and any(state := state_of(gradient)):
                self.first = (what, state[0])

        return look


def _in_backward(model: nn.Module, inputs: Mapping[str, Any], names: _Names) -> NonFiniteSite | None:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tracker = FrameTracker(model)
    hooks = _GradientHooks(tracker)
    with torch.enable_grad(), tracker, hooks:
        loss = loss_of(model(**inputs))
    if loss is None or not loss.requires_grad:
        return None
    # Not backward(): that would add to .grad and, under DDP, start a reduction.
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    found: dict[str, Tensor | None] = dict(zip(trained, gradients, strict=True))  # None for what is unused
    for name, gradient in found.items():
        if hooks.first is None and gradient is not None and any(state := state_of(gradient)):
            hooks.first = (name, state[0])
    if hooks.first is None:
        return None
    what, has_nan = hooks.first
    value = "NaN" if has_nan else "infinity"
    if isinstance(what, str):
        owner, _, name = what.rpartition(".")
        said = f"the gradient of its parameter {name!r}"
        return NonFiniteSite(_clean(owner), names.block(Frame(owner, 0)), said, value, in_backward=True)
    said = f"the gradient with respect to {names.made(what)}"
    return NonFiniteSite(_clean(what.frame.path), names.block(what.frame), said, value, in_backward=True)
