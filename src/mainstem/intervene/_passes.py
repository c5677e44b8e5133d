"""How the passes of a sweep are made: by a map of the data flow, or through a tower's connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mainstem.connections import Stream
from mainstem.intervene._doors import Doors, NoDoorsError, replaced
from mainstem.intervene._mode import InterveneMode, OnState
from mainstem.intervene._tower import through_connections, tower_of
from mainstem.intervene.kinds import Intervention
from mainstem.measure import Batch
from mainstem.observe import StreamMap, TowerMap, batch_of

NOT_ASKED = "restart=False"


class Entry(NamedTuple):
    """Rows of a pass that go on from what the whole model had.

    Attributes:
        rows: of the pass.
        held: number of the whole model's state that is put there.
        at: number of the block that it enters; as many as there are blocks for the end.
    """

    rows: range
    held: int
    at: int


class Passes(Protocol):
    """Makes the passes of one sweep.

    Attributes:
        why_not: why passes run in full; empty where they begin at the broken block.
        seconds: of each block in the last pass of the whole model; empty where it is not known.
    """

    why_not: str
    seconds: list[float]

    def run_whole(self, inputs: Mapping[str, Any]) -> tuple[dict[int, Tensor], Any]:
        """Run the whole model; return its states ``[batch, pos, (n,) width]`` by number, and its output.

        What later passes go on from is held until the next call.
        """
        ...

    def run_broken(
        self,
        inputs: Mapping[str, Any],
        active: Sequence[Intervention],
        entries: Sequence[Entry],
        see: OnState | None,
    ) -> Any:
        """Run under interventions, blocks below the lowest entry passed over; return the output.

        ``see`` is told of the states from there on, as they are after all changes.
        """
        ...

    def batch(self, inputs: Mapping[str, Any]) -> Batch:
        """Say which tokens are real."""
        ...

    def held_bytes(self) -> int:
        """Return the bytes of what is held beside the states, if anything is."""
        ...


def passes_of(
    model: nn.Module,
    stream_map: StreamMap,
    inputs: Mapping[str, Any],
    breaks: Sequence[Intervention],
    restart: bool,
) -> Passes:
    """Return what makes a sweep's passes.

    Args:
        model: the module that ``stream_map`` was found in.
        inputs: of a batch, for a look at the blocks.
        breaks: all that will be done.
        restart: begin at the broken block where the model allows it.

    Raises:
        ConfigError: a break that the model has no place for, or that is not defined there.
    """
    if isinstance(stream_map, TowerMap):
        return TowerPasses(model, breaks, restart)
    return MapPasses(model, stream_map, inputs, breaks, restart)


class MapPasses:
    """Passes of a model whose states are calls that a map names."""

    def __init__(
        self,
        model: nn.Module,
        stream_map: StreamMap,
        inputs: Mapping[str, Any],
        breaks: Sequence[Intervention],
        restart: bool,
    ):
        self.model, self.map, self.seconds = model, stream_map, list[float]()
        self._held: dict[int, Tensor] = {}
        InterveneMode(model, stream_map, breaks)  # refuses what cannot be
        self._doors, self.why_not = None, NOT_ASKED
        if restart:
            try:
                self._doors, self.why_not = Doors(model, stream_map, inputs), ""
            except NoDoorsError as reason:
                self.why_not = str(reason)

    def run_whole(self, inputs: Mapping[str, Any]) -> tuple[dict[int, Tensor], Any]:
        """Run the whole model and hold its states."""
        states: dict[int, Tensor] = {}

        def keep(number: int, state: Tensor) -> None:
            states[number] = state.detach().clone()

        self.seconds = []
        with ExitStack() as stack:
            mode = InterveneMode(self.model, self.map, [], keep)
            for one in (torch.no_grad(), torch.compiler.set_stance("force_eager"), mode.tracker, mode):
                stack.enter_context(one)
            if self._doors is not None:
                stack.enter_context(self._doors.passing(0, {}, _ignore, self.seconds))
            output = self.model(**inputs)
        self._held = states
        return states, output

    def run_broken(
        self,
        inputs: Mapping[str, Any],
        active: Sequence[Intervention],
        entries: Sequence[Entry],
        see: OnState | None,
    ) -> Any:
        """Run under interventions."""
        with ExitStack() as stack:
            mode = InterveneMode(self.model, self.map, active, see if self._doors is None else None)
            for one in (torch.no_grad(), torch.compiler.set_stance("force_eager")):
                stack.enter_context(one)
            if mode.edits:
                stack.enter_context(mode.tracker)
                stack.enter_context(mode)
            if self._doors is not None:
                self._enter_at(stack, self._doors, mode, entries, see or _ignore)
            return self.model(**inputs)

    def _enter_at(
        self, stack: ExitStack, doors: Doors, mode: InterveneMode, entries: Sequence[Entry], see: OnState
    ) -> None:
        first = min(entry.at for entry in entries)
        mode.allow_missing(range(first))
        placed: dict[int, list[tuple[range, Tensor]]] = {}
        for rows, held, at in entries:
            placed.setdefault(at, []).append((rows, self._held[held]))

        def on_state(number: int, state: Tensor) -> None:
            if number < len(self.map.blocks):
                mode.note_entry(number, state)
            see(number, state)

        stack.enter_context(doors.passing(first, placed, on_state))

    def batch(self, inputs: Mapping[str, Any]) -> Batch:
        """Say which tokens are real."""
        return batch_of(inputs)

    def held_bytes(self) -> int:
        """Nothing is held but the states."""
        return 0


class TowerPasses:
    """Passes of a tower whose stream is known by its connections alone.

    What a block hands on, a tensor or a history of them, is all that the blocks above need beside the first
    block's values, so a pass can begin at any block from what entered it. A state is what the tower's way out
    makes of that, as in :func:`mainstem.observe.record_tower`.
    """

    def __init__(self, model: nn.Module, breaks: Sequence[Intervention], restart: bool):
        self.model, self.tower = model, tower_of(model)
        self.why_not, self.seconds = "" if restart else NOT_ASKED, list[float]()
        self._held: dict[int, Stream] = {}
        self._values: list[Tensor] = []
        with through_connections(model, breaks):
            pass  # refuses what cannot be

    def run_whole(self, inputs: Mapping[str, Any]) -> tuple[dict[int, Tensor], Any]:
        """Run the whole model and hold what its blocks hand on."""
        states: dict[int, Tensor] = {}
        held: dict[int, Stream] = {}
        self.seconds = []

        def turn(
            block: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            if block == 0:
                held[0] = args[0]
                states[0] = self.tower.trunk.collapse(args[0])
            begin = time.perf_counter()
            out = forward(*args, **kwargs)
            self.seconds.append(time.perf_counter() - begin)
            held[block + 1], self._values = self._parts(out)
            states[block + 1] = self.tower.trunk.collapse(held[block + 1])
            return out

        with ExitStack() as stack:
            for one in (torch.no_grad(), torch.compiler.set_stance("force_eager")):
                stack.enter_context(one)
            stack.enter_context(replaced(list(self.tower.blocks), turn))
            output = self.model(**inputs)
        self._held = held
        return states, output

    def run_broken(
        self,
        inputs: Mapping[str, Any],
        active: Sequence[Intervention],
        entries: Sequence[Entry],
        see: OnState | None,
    ) -> Any:
        """Run under interventions."""
        first = min((entry.at for entry in entries), default=0)

        def turn(
            block: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            if block >= first:
                return forward(*args, **kwargs)
            stream = args[0]
            if block + 1 == first:  # a history is as long there as the blocks below have made it
                held = next(entry.held for entry in entries if entry.at == first)
                stream = _repeated(self._held[held], _rows(stream))
            values = [cast(Tensor, _repeated(v, _rows(stream))) for v in self._values]
            return self._whole(stream, values)

        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(through_connections(self.model, active))
            stack.enter_context(replaced(list(self.tower.blocks), turn))
            for number, block in enumerate(self.tower.blocks, start=1):  # after the interventions' own hooks
                if number >= first:
                    hook = self._left(number, [e for e in entries if e.at == number], see)
                    stack.callback(block.register_forward_hook(hook).remove)
            return self.model(**inputs)

    def _left(self, number: int, entries: list[Entry], see: OnState | None) -> Callable[..., Any]:
        def left(module: nn.Module, args: Any, output: Any) -> Any:
            stream, values = self._parts(output)
            for rows, held, _ in entries:
                stream = _put(stream, rows, self._held[held])
            if see is not None:
                see(number, self.tower.trunk.collapse(stream))
            return self._whole(stream, values)

        return left

    def _parts(self, output: Any) -> tuple[Stream, list[Tensor]]:
        """What a block hands on: the stream, and the first block's values where the tower passes them."""
        return (output[0], [output[1]]) if self.tower.passes_values else (output, [])

    def _whole(self, stream: Stream, values: list[Tensor]) -> Any:
        return (stream, *values) if self.tower.passes_values else stream

    def batch(self, inputs: Mapping[str, Any]) -> Batch:
        """Say which tokens are real."""
        return batch_of({"input_ids": inputs.get("token_ids"), **inputs})

    def held_bytes(self) -> int:
        """Return the bytes of what blocks hand on; a tensor that several histories hold counts once."""
        tensors = {id(t): t for stream in self._held.values() for t in pytree.tree_leaves(stream)}
        return sum(t.numel() * t.element_size() for t in tensors.values())


def _rows(stream: Stream) -> int:
    return len(stream[0] if isinstance(stream, tuple) else stream)


def _repeated(held: Stream, num_rows: int) -> Stream:
    """Give every break of a pass its copy of what was held of a batch."""

    def repeated(kept: Tensor) -> Tensor:
        times = num_rows // len(kept)
        return kept if times == 1 else kept.repeat(times, *[1] * (kept.ndim - 1))

    return cast(Stream, pytree.tree_map(repeated, held))


def _put(stream: Stream, rows: range, held: Stream) -> Stream:
    def put(made: Tensor, kept: Tensor) -> Tensor:
        if len(rows) == len(made):
            return kept
        return torch.cat([made[: rows.start], kept, made[rows.stop :]])

    return cast(Stream, pytree.tree_map(put, stream, held))


def _ignore(number: int, state: Tensor) -> None:
    """For a pass whose states are seen elsewhere."""
