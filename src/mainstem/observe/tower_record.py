"""Record a tower's stream through its connections, for the schemes whose stream no data flow shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mainstem.connections import Connection, Stream, Trunk
from mainstem.errors import ConfigError, StreamNotFoundError
from mainstem.measure.events import Batch, BlockEvent, Reducer, SublayerEvent, Write
from mainstem.observe._flow import CarryKind
from mainstem.observe._frames import Frame, unwrapped
from mainstem.observe._tail import TailRecorder
from mainstem.observe._trace import CallKey
from mainstem.observe.map import BlockMap, Site, StreamMap, Value, WriteSite
from mainstem.observe.record import Books, Recording, batch_of, relative_error, sum_of
from mainstem.observe.tower_ledger import Tower

PROBE = (2, 11)
"""Sequences and positions that the kinds of carry are read off."""
LOUDER = 1024.0
"""By what factor a stream and its update grow to see whether a norm sets the state's size anew."""


@dataclasses.dataclass(frozen=True)
class TowerMap(StreamMap):
    """The map of a tower by its connections: its values name modules, not calls.

    The state of a stream, before and after every sublayer, is what the trunk's way out makes of it
    (:meth:`mainstem.connections.Trunk.collapse`). A site's carry is ``"norm"`` where a stream and an update
    1024 times as large leave a state less than 32 times as large, ``"mix"`` where the state goes on otherwise
    than as it was.

    Attributes:
        has_history: whether the stream is a tuple of tensors.
        hands_on: whether the states are all that the blocks hand on, so that gradients go through them.
        adds: whether every state is a tensor of the stream, to which its sublayer adds what it writes.
    """

    has_history: bool = False
    hands_on: bool = False
    adds: bool = False


def tower_in(model: nn.Module) -> Tower | None:
    """Return the tower that ``model`` is or holds, if any."""
    for module in model.modules():
        if isinstance(getattr(module, "trunk", None), Trunk) and callable(getattr(module, "sublayers", None)):
            return cast(Tower, module)
    return None


@torch.no_grad()
def tower_map(model: nn.Module, token_ids: Tensor) -> TowerMap:
    """Return the map of a tower from what its connections do on a few tokens.

    Args:
        model: a tower, or a model that holds one.
        token_ids: ``[batch, pos]`` int64; at most 2 by 11 of them are used.

    Raises:
        StreamNotFoundError: ``model`` holds no tower.
    """
    model = unwrapped(model)
    tower = _require_tower(model)
    paths = {id(module): name for name, module in model.named_modules()}
    rows, columns = PROBE
    ids = token_ids[:rows, :columns]
    watch = _KindWatch(tower, [], Batch(mask=torch.ones_like(ids, dtype=torch.bool)), None)
    with torch.compiler.set_stance("force_eager"), watch:
        cast(Callable[..., Tensor], tower)(ids)
    sites, blocks = _sites(tower, paths, watch)
    embedding = paths[id(cast(Any, tower).token_embedding)]
    return TowerMap(
        source=Value(CallKey(Frame(embedding, 0), "forward", 0)),
        front=(),
        front_path=(),
        sites=tuple(sites),
        blocks=tuple(blocks),
        exits=(),
        num_streams=1,
        width=watch.width,
        output="logits",
        notes=(
            "the stream was taken from the tower's connections, for no data flow shows it: a state is what "
            "the tower's way out makes of what is carried at that place, and of a sublayer's step with its "
            "weights frozen, one part was carried and the rest written",
        ),
        has_history=watch.has_history,
        hands_on=watch.hands_on,
        adds=watch.has_states and set(watch.carries) == {"identity"},
    )


def record_tower(
    model: nn.Module,
    inputs: Mapping[str, Any],
    stream_map: TowerMap,
    reducers: Sequence[Reducer] = (),
    *,
    batch: Batch | None = None,
    keep_tail: bool = False,
) -> Recording:
    """Run ``model(**inputs)`` and hand its tower's stream to ``reducers``; see `mainstem.observe.record`.

    A sublayer's event is ``after = carried + writes`` of states: the parts of its
    :class:`mainstem.connections.AffineStep`, taken through the way out with the weights that it has for the
    stream that leaves. A bias of a norm on the stream is a write of the kind ``"other"``. Gradients flow
    through the states where they are what the blocks hand on.

    Args:
        model: the module that ``stream_map`` was found in.
        inputs: keyword arguments of its forward.
        stream_map: from :func:`tower_map`.
        reducers: what takes the events.
        batch: which tokens are real; when not given, ``attention_mask`` says so, or all are.
        keep_tail: keep the model's end for a logit lens.

    Raises:
        StreamNotFoundError: the pass did not go through all sublayers.
        ConfigError: ``batch`` has another shape than the stream.
    """
    model = unwrapped(model)
    tail = TailRecorder() if keep_tail else None
    watch = _Watch(_require_tower(model), reducers, batch or _batch_of(inputs), tail)
    with torch.compiler.set_stance("force_eager"), watch:
        output = model(**inputs)
    if watch.num_seen != len(stream_map.sites):
        raise StreamNotFoundError(
            f"{type(model).__name__} went through {watch.num_seen} of its {len(stream_map.sites)} sublayers."
        )
    for reducer in reducers:
        reducer.end_pass(watch.batch)
    return Recording(output, watch.books, None if tail is None else tail.close(output, stream_map.output))


def _batch_of(inputs: Mapping[str, Any]) -> Batch:
    return batch_of({"input_ids": inputs.get("token_ids"), **inputs})


def _sites(tower: Tower, paths: dict[int, str], watch: _KindWatch) -> tuple[list[Site], list[BlockMap]]:
    sites: list[Site] = []
    blocks: list[BlockMap] = []
    for i, (block, connection, branches) in enumerate(tower.sublayers()):
        here = Value(CallKey(Frame(paths[id(connection)], 0), "forward", 0))
        writes = [WriteSite(kind, paths[id(branch)], (here,)) for kind, branch in branches.items()]
        sites.append(Site(i, block, watch.carries[i], here, (here,), tuple(writes), here, here))
        if not blocks or blocks[-1].index != block:
            blocks.append(BlockMap(block, paths[id(tower.blocks[block])], 0, i, i + 1))
        blocks[-1] = dataclasses.replace(blocks[-1], end_site=i + 1)
    return sites, blocks


def _require_tower(model: nn.Module) -> Tower:
    tower = tower_in(model)
    if tower is None:
        raise StreamNotFoundError(
            f"{type(model).__name__} holds no mainstem tower, whose connections could be asked. Use "
            "mainstem.observe.find_stream."
        )
    return tower


class _Taping(TorchFunctionMode):
    """Tapes the calls from the final state on."""

    def __init__(self, tail: TailRecorder):
        super().__init__()
        self.tail = tail

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        return self.tail.call(func, args, kwargs) if self.tail.is_open else func(*args, **kwargs)


class _Watch:
    """Hooks on the branches, the connections and the final norm of a tower, for one pass."""

    def __init__(self, tower: Tower, reducers: Sequence[Reducer], batch: Batch, tail: TailRecorder | None):
        self.tower, self.trunk, self.reducers, self.batch = tower, tower.trunk, reducers, batch
        self.tail, self.books = tail, Books(passes=1)
        self.num_seen = 0
        self._updates: dict[str, Tensor] = {}
        self._stream: Stream | None = None
        self._state, self._first = torch.empty(0), torch.empty(0)
        self._sublayers: list[SublayerEvent] = []
        self._open = ExitStack()

    def __enter__(self) -> _Watch:
        sublayers = list(self.tower.sublayers())
        for i, (block, connection, branches) in enumerate(sublayers):
            ends = i + 1 == len(sublayers) or sublayers[i + 1][0] != block
            for kind, branch in branches.items():
                self._open.callback(branch.register_forward_hook(self._keep(kind)).remove)
            self._open.callback(connection.register_forward_hook(self._join(block, ends)).remove)
        self._open.callback(self.trunk.final_norm.register_forward_pre_hook(self._leave).remove)
        if self.tail is not None:
            self._open.enter_context(_Taping(self.tail))
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def _keep(self, kind: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            self._updates[kind] = output

        return keep

    def _join(self, block: int, ends: bool) -> Callable[..., None]:
        def join(connection: Connection, args: Any, output: Stream) -> None:
            self._take_up(args[0])
            if not self._sublayers:
                self._first = self._state
            self._sublayers.append(self._event(connection, args[0], output))
            self._stream, self._updates = output, {}
            if ends:
                self._end_block(block)

        return join

    def _take_up(self, stream: Stream) -> None:
        """Make sure that a sublayer is given what the one before left."""
        if self._stream is None:
            self._state = self.trunk.collapse(stream)
            if self._state.shape[:2] != self.batch.mask.shape:
                raise ConfigError(
                    f"the batch's mask has shape {tuple(self.batch.mask.shape)}, but the stream is "
                    f"{tuple(self._state.shape)}; expected {tuple(self._state.shape[:2])}, one entry a token."
                )
            return
        for taken, made in zip(_entries(stream), _entries(self._stream), strict=True):
            error = 0.0 if taken is made else relative_error(taken, made, self.batch.mask)
            self.books.note_continuity(error, self.num_seen)

    def _event(self, connection: Connection, stream: Stream, output: Stream) -> SublayerEvent:
        before, after = self._state, self.trunk.collapse(output)
        with torch.no_grad():
            updates = {kind: connection.stream_of(u) for kind, u in self._updates.items()}
            update = connection.stream_of(sum_of(list(self._updates.values())))
            _, context = connection.read(stream)
            step = connection.linearize(stream, update, context)
            out = self.trunk.linearize_collapse(output)
            carried = out(step.carry(stream))
            if (constant := self.trunk.collapse_offset()) is not None:
                carried = carried + constant
            writes = [Write(kind, out(step.inject(u))) for kind, u in updates.items()]
            if step.offset is not None:
                writes.append(Write("other", out(step.offset)))
            error = relative_error(sum_of([carried, *(w.value for w in writes)]), after, self.batch.mask)
            self.note_site(connection, stream, update, torch.equal(carried, before), after)
        self.books.note_additivity(error, self.num_seen)
        self._state = after
        self.num_seen += 1
        return SublayerEvent(self.num_seen - 1, carried, tuple(writes), after)

    def note_site(
        self, connection: Connection, stream: Stream, update: Tensor, is_kept: bool, after: Tensor
    ) -> None:
        """For the map."""

    def _end_block(self, block: int) -> None:
        event = BlockEvent(
            block=block,
            num_blocks=len(self.tower.blocks),
            before=self._first,
            sublayers=tuple(self._sublayers),
            after=self._state,
            batch=self.batch,
        )
        for reducer in self.reducers:
            reducer.update(event)
        self._sublayers = []

    def _leave(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Make sure that the end of the tower takes up the last state, and tape it from there."""
        self.books.note_continuity(relative_error(args[0], self._state, self.batch.mask), self.num_seen)
        if self.tail is not None:
            self.tail.open(args[0])


def _entries(stream: Stream) -> tuple[Tensor, ...]:
    return stream if isinstance(stream, tuple) else (stream,)


class _KindWatch(_Watch):
    """Sees what kind of carry every sublayer has."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.carries: list[CarryKind] = []
        self.has_history, self.hands_on, self.has_states, self.width = False, True, True, 0

    def note_site(
        self, connection: Connection, stream: Stream, update: Tensor, is_kept: bool, after: Tensor
    ) -> None:
        """Note one sublayer."""
        state = self.trunk.collapse(stream)
        self.hands_on = self.hands_on and state is stream
        self.has_states = self.has_states and any(state is entry for entry in _entries(stream))
        self.has_history, self.width = isinstance(stream, tuple), after.shape[-1]
        louder = tuple(LOUDER * t for t in stream) if isinstance(stream, tuple) else LOUDER * stream
        _, context = connection.read(louder)
        grown = self.trunk.collapse(connection.write(louder, LOUDER * update, context))
        is_normed = bool(grown.norm() < LOUDER**0.5 * after.norm())
        self.carries.append("identity" if is_kept else "norm" if is_normed else "mix")
