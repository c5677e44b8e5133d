"""Watches the stream of a model while it trains: two providers of the same figures.

`MapWatch` follows the calls that a :class:`~mainstem.observe.StreamMap` names and sees every sublayer of any
model that has one. `ModuleWatch` looks at what goes into modules and comes out of them: the connections of a
tower whose stream is a history, and whole blocks where they are compiled and hide their insides.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mainstem.errors import StreamNotFoundError
from mainstem.measure import SublayerEvent
from mainstem.observe import Site, StreamMap, batch_of, find_stream
from mainstem.observe._frames import FrameTracker
from mainstem.observe.record import Recorder
from mainstem.tower import Block, Tower
from mainstem.training._monitor_sums import StepTally
from mainstem.training._non_finite import numbered_blocks


class _Handle(Protocol):
    def remove(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the stream of a model is.

    Attributes:
        source: ``"calls"`` (every sublayer, by the map), ``"connections"`` (of a tower), ``"blocks"``
            (compiled ones) or ``"none"``.
        blocks: dotted paths of the blocks.
        site_blocks: block of each sublayer; of each block, where those are watched.
        site_names: what each writes, for people.
        site_modules: the module it does it in.
        notes: what a reader should know.
    """

    source: str
    blocks: tuple[str, ...]
    site_blocks: tuple[int, ...] = ()
    site_names: tuple[str, ...] = ()
    site_modules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Watch(Protocol):
    """Sees forward passes and hands what it sees to a tally."""

    layout: Layout

    def begin(self, model: nn.Module, inputs: Mapping[str, Any], tally: StepTally) -> Callable[[], None]:
        """Watch one forward pass that is about to begin; return what ends that."""
        ...


# ---- every sublayer, by the calls of the map ----


class _TrainingRecorder(Recorder):
    """Measures at once, while the tensors are those of the graph; a pass that leaves the map is let go."""

    def __init__(self, stream_map: StreamMap, tracker: FrameTracker, inputs: Mapping[str, Any]):
        super().__init__(stream_map, (), tracker, batch_of(inputs))
        self.tally: StepTally | None = None
        self.left_the_map: StreamNotFoundError | None = None

    def on_join(self, site: Site, event: SublayerEvent) -> None:
        assert self.tally is not None
        if site.index == 0:
            assert self._before is not None
            self.tally.begin_pass(self.batch.mask)
            self.tally.state(0, [self._before], [self._before])
        for write in event.writes:
            self.tally.write((site.index, write.kind), write.value)

    def on_leave(self, site: Site) -> None:
        assert self.tally is not None
        after = self.value(site.after)
        self.tally.state(site.index + 1, [self.stream_shaped(after)], [after])

    def _join(self, site: Site) -> None:
        self._or_let_go(super()._join, site)

    def _then(self, site: Site) -> None:
        self._or_let_go(super()._then, site)

    def _or_let_go(self, step: Callable[[Site], None], site: Site) -> None:
        try:
            # Another monitor of the pass must not take what is measured for calls of the model.
            with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
                step(site)
        except StreamNotFoundError as error:
            self.left_the_map = error
            self._next = len(self.map.sites)

    def _check_exit(self, key: Any, args: Any, kwargs: Any) -> None:
        return None


class MapWatch:
    """Follows the calls that a map names, in the forward pass of the training itself."""

    def __init__(self, stream_map: StreamMap):
        self.map = stream_map
        self.layout = Layout(
            "calls",
            tuple(block.module for block in stream_map.blocks),
            tuple(site.block for site in stream_map.sites),
            tuple("+".join(write.kind for write in site.writes) for site in stream_map.sites),
            tuple(site.writes[0].module for site in stream_map.sites),
            stream_map.notes,
        )

    def begin(self, model: nn.Module, inputs: Mapping[str, Any], tally: StepTally) -> Callable[[], None]:
        """Enter the recorder."""
        tracker = FrameTracker(model, beside=True)
        recorder = _TrainingRecorder(self.map, tracker, inputs)
        recorder.tally = tally
        recorder.note_inputs(inputs)
        tracker.__enter__()
        recorder.__enter__()
        # The call of the model itself began before the tracker could see it.
        tracker._enter(model, ())  # pyright: ignore[reportPrivateUsage]

        def end() -> None:
            recorder.__exit__(None, None, None)
            tracker.__exit__(None, None, None)
            tally.sums.additivity = max(tally.sums.additivity, recorder.books.additivity)
            tally.sums.continuity = max(tally.sums.continuity, recorder.books.continuity)
            tally.end_pass()
            if recorder.left_the_map is not None:
                warnings.warn(f"StreamMonitor: {recorder.left_the_map}", stacklevel=2)

        return end


# ---- what goes into modules and comes out ----


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A module that takes the stream and returns it.

    Attributes:
        branches: modules whose outputs it writes, by kind; empty where what is written is not seen apart.
        is_whole: whether what it takes first and returns is the stream whole, several tensors included.
    """

    module: nn.Module
    block: int
    branches: Mapping[str, nn.Module]
    is_whole: bool

    def stream_after(self, result: Any) -> list[Tensor]:
        """Return the tensors of the stream in what the module returned."""
        if isinstance(self.module, Block) and self.module.passes_values:
            result = result[0]
        return self.stream(result)

    def stream(self, value: Any) -> list[Tensor]:
        """Return the tensors of the stream among arguments or results."""
        tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point()]
        return tensors if self.is_whole else tensors[:1]


class ModuleWatch:
    """Looks at the first argument and the result of each of some modules."""

    def __init__(self, units: Sequence[_Unit], layout: Layout):
        self.units, self.layout = units, layout

    def begin(self, model: nn.Module, inputs: Mapping[str, Any], tally: StepTally) -> Callable[[], None]:
        """Hook the modules."""
        tally.begin_pass(batch_of(inputs).mask)
        handles: list[_Handle] = []
        for site, unit in enumerate(self.units):
            handles += [
                branch.register_forward_hook(self._branch_hook(tally, (site, kind)))
                for kind, branch in unit.branches.items()
            ]
            handles.append(_hook_around(unit.module, self._unit_hook(tally, site, unit)))

        def end() -> None:
            for handle in handles:
                handle.remove()
            tally.end_pass()

        return end

    def _branch_hook(self, tally: StepTally, key: tuple[int, str]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            tally.write(key, output)

        return hook

    def _unit_hook(self, tally: StepTally, site: int, unit: _Unit) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            before = unit.stream(args[0] if unit.is_whole else (args, kwargs))
            after = unit.stream_after(output)
            if site == 0:
                tally.state(0, before, before)
            kept = {id(part) for part in before}
            tally.state(site + 1, after, [part for part in after if id(part) not in kept])
            if not unit.branches and len(before) == len(after) == 1:
                tally.write((site, self.layout.site_names[site]), after[0].detach() - before[0].detach())

        return hook


def _hook_around(module: nn.Module, hook: Callable[..., None]) -> _Handle:
    """Call ``hook`` after a module, outside what is compiled: a hook on it would be compiled into it."""
    compiled = module._compiled_call_impl  # pyright: ignore[reportPrivateUsage]
    if compiled is None:
        return module.register_forward_hook(hook, with_kwargs=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        output = compiled(*args, **kwargs)
        hook(module, args, kwargs, output)
        return output

    module._compiled_call_impl = call  # pyright: ignore
    return _CompiledHandle(module, compiled)


@dataclasses.dataclass(frozen=True)
class _CompiledHandle:
    module: nn.Module
    compiled: Any

    def remove(self) -> None:
        """Put the compiled call back."""
        self.module._compiled_call_impl = self.compiled  # pyright: ignore


# ---- which of them ----


def find_watch(model: nn.Module, inputs: Mapping[str, Any]) -> Watch | None:
    """Choose how to watch a model; None where its stream cannot be seen.

    Runs the model once on a few tokens, without gradients; buffers and random state are left as they were.
    """
    if is_compiled(model):
        return None
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    stream_map: StreamMap | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of checkpointing without gradients, of hooks and compiled modules
            stream_map = find_stream(model, inputs)
    except StreamNotFoundError:
        pass
    finally:
        with torch.no_grad():
            for buffer, value in buffers.items():
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
    tower = next((m for m in model.modules() if isinstance(m, Tower)), None)
    if hides_insides(model):
        return _watch_blocks(model, tower, stream_map)
    if stream_map is not None:
        return MapWatch(stream_map)
    return None if tower is None else _watch_connections(model, tower)


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs compiled code."""
    if isinstance(module, Block) and module.compiled is not None:
        return True
    of_torch = module._compiled_call_impl is not None or hasattr(module, "_orig_mod")  # pyright: ignore
    return of_torch or getattr(module, "compiled", None) is not None  # by mainstem.tower.compile_blocks


def hides_insides(model: nn.Module) -> bool:
    """Whether something in a model is compiled, flexible attention included."""
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return attention == "flex_attention" or any(is_compiled(m) for m in model.modules())


def _watch_blocks(model: nn.Module, tower: Tower | None, stream_map: StreamMap | None) -> Watch | None:
    if stream_map is not None:
        paths = [block.module for block in stream_map.blocks if block.call == 0]
    elif tower is not None:
        paths = list(numbered_blocks(model))
    else:
        return None
    whole = tower is not None
    units = [_Unit(model.get_submodule(path), i, {}, whole) for i, path in enumerate(paths)]
    numbers = tuple(range(len(paths)))
    names = ("block",) * len(paths)
    note = "the blocks are compiled or use flexible attention: what their sublayers write is not seen"
    return ModuleWatch(units, Layout("blocks", tuple(paths), numbers, names, tuple(paths), (note,)))


def _watch_connections(model: nn.Module, tower: Tower) -> Watch:
    units = [_Unit(connection, block, branches, True) for block, connection, branches in tower.sublayers()]
    names = {id(module): name for name, module in model.named_modules()}
    layout = Layout(
        "connections",
        tuple(names[id(block)] for block in tower.blocks),
        tuple(unit.block for unit in units),
        tuple("+".join(unit.branches) for unit in units),
        tuple(names[id(next(iter(unit.branches.values())))] for unit in units),
        ("a state of several tensors is measured as one vector; the gradient is that of what is new in it",),
    )
    return ModuleWatch(units, layout)


def named_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of ``model`` by name."""
    if not args:
        return dict(kwargs)
    names = inspect.signature(model.forward).parameters
    return dict(zip(names, args, strict=False)) | dict(kwargs)
