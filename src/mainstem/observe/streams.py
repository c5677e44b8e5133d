"""Record a stream that is more than one tensor: streams, reads, mixing matrices, weights over depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from mainstem.connections import Connection, Stream
from mainstem.measure.events import Batch, SublayerEvent
from mainstem.measure.streams import Joined, StreamFigures, StreamsEvent, StreamsResult
from mainstem.observe._frames import FrameTracker, unwrapped
from mainstem.observe.ledger import LedgerRecorder
from mainstem.observe.map import Site, StreamMap
from mainstem.observe.record import batch_of
from mainstem.observe.tower_ledger import Tower

EXACT = {torch.float64: 1e-10, torch.float32: 1e-4}
"""How far ``|M X - carry(X)| / |carry(X)|`` may be from 0 for M to count as read exactly, by dtype."""


@torch.no_grad()
def tower_streams(tower: Tower, token_ids: Tensor, attention_mask: Tensor | None = None) -> StreamsResult:
    """Return the figures of a tower's streams or history from what its connections say of themselves.

    Matrices and weights are read off :meth:`mainstem.connections.Connection.linearize` by what it makes of a
    unit in each part of the stream, and held against what it makes of the stream itself: where a step is not
    weights over parts, such as a norm on the stream, they are None from there on.

    Args:
        tower: run once, without gradients, compiled blocks eagerly; for a window or a few.
        token_ids: ``[batch, pos]`` int64.
        attention_mask: ``[batch, pos]``, true for real tokens.
    """
    mask = torch.ones_like(token_ids) if attention_mask is None else attention_mask
    batch = Batch(mask=mask.bool(), token_ids=token_ids)
    figures = StreamFigures()
    watch = _TowerWatch(tower, figures, batch)
    try:
        with torch.compiler.set_stance("force_eager"):  # a compiled block hides its branches
            cast(Callable[..., Tensor], tower)(token_ids, attention_mask)
    finally:
        watch.close()
    figures.end_pass(batch)
    return figures.result()


class _TowerWatch:
    """Hooks on the branches and connections of a tower, gone after `close`."""

    def __init__(self, tower: Tower, figures: StreamFigures, batch: Batch):
        self.trunk, self.figures, self.batch = tower.trunk, figures, batch
        self.updates: dict[str, Tensor] = {}
        self.handles: list[Any] = []
        self.is_first = True
        sublayers = list(tower.sublayers())
        for i, (block, connection, branches) in enumerate(sublayers):
            ends = i + 1 == len(sublayers) or sublayers[i + 1][0] != block
            for kind, branch in branches.items():
                self.handles.append(branch.register_forward_hook(self._keep(kind)))
            hook = self._join(block, "+".join(branches), ends)
            self.handles.append(connection.register_forward_hook(hook))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()

    def _keep(self, kind: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            self.updates[kind] = output

        return keep

    def _join(self, block: int, kind: str, ends: bool) -> Callable[..., None]:
        def join(connection: Connection, args: Any, output: Stream) -> None:
            stream: Stream = args[0]
            parts, self.updates = self.updates, {}
            update = connection.stream_of(torch.stack(list(parts.values())).sum(0))
            self.figures.update(self._event(block, kind, ends, connection, stream, update, output))

        return join

    def _event(
        self,
        block: int,
        kind: str,
        ends: bool,
        connection: Connection,
        stream: Stream,
        update: Tensor,
        after: Stream,
    ) -> StreamsEvent:
        read, context = _read(connection, stream)
        step = connection.linearize(stream, update, context)
        carried, written = step.carry(stream), step.inject(update)
        joined = [stream, carried, written, after]
        num = _num_parts(connection, stream)
        mix = mixing_matrix(step.carry, stream, carried, num)
        fractions = isinstance(stream, Tensor) and stream.ndim == 3
        weights = None if fractions else _checked_weights(connection, stream, read)
        expanded = None
        if self.is_first:
            parts = _split(stream, num)
            made = parts if fractions else _split(self.trunk.expand(torch.ones_like(parts[..., 0, :])), num)
            expanded = torch.ones_like(made[..., 0]) if fractions else made[..., 0]
        self.is_first = False
        return StreamsEvent(
            block=block,
            ends_block=ends,
            kind=kind,
            whole=self._whole(stream, joined),
            streams=Joined(*(_split(s, num) for s in joined)) if isinstance(stream, Tensor) else None,
            read=read,
            mix=mix,
            inject=None if fractions else inject_weights(step.inject, update, written),
            read_weights=weights,
            expanded=expanded,
            batch=self.batch,
        )

    def _whole(self, stream: Stream, joined: Sequence[Stream]) -> Joined:
        if isinstance(stream, Tensor):
            return Joined(
                *(cast(Tensor, s) if cast(Tensor, s).ndim == 3 else cast(Tensor, s).mean(-2) for s in joined)
            )
        before, carried, written, after = joined
        collapse = self.trunk.linearize_collapse(after)
        return Joined(
            self.trunk.collapse(before), collapse(carried), collapse(written), self.trunk.collapse(after)
        )


def _read(connection: Connection, stream: Stream) -> tuple[Tensor, Any]:
    """Return what is read before the connection's norm, where it goes through one, and the context."""
    seen: list[Tensor] = []
    norm = getattr(connection, "norm", None)
    if not isinstance(norm, nn.Module):
        return connection.read(stream)

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0])

    handle = norm.register_forward_pre_hook(keep)
    try:
        read, context = connection.read(stream)
    finally:
        handle.remove()
    return (seen[0] if seen else read), context


def _num_parts(connection: Connection, stream: Stream) -> int:
    if isinstance(stream, Tensor):
        if stream.ndim == 4:
            return stream.shape[-2]
        found = connection.mixing_matrices(stream)
        return found[0].values.shape[-1] if found else 1
    return len(stream)


def _split(stream: Stream, num: int) -> Tensor:
    """Return ``[batch, pos, parts, width]`` of streams, fractions or a history."""
    if isinstance(stream, Tensor):
        return stream if stream.ndim == 4 else stream.unflatten(-1, (num, -1))
    return torch.stack(tuple(stream), -2)


def _units(like: Tensor, first: int) -> Tensor:
    """Return parts ``[batch, pos, parts, width]`` of which part ``first + c`` is 1 in channel c, else 0."""
    num, width = like.shape[-2:]
    units = torch.zeros(num, width, dtype=like.dtype, device=like.device)
    chosen = torch.arange(first, min(num, first + width), device=like.device)
    units[chosen, chosen - first] = 1.0
    return units.expand(like.shape).contiguous()


def mixing_matrix(
    carry: Callable[[Stream], Stream], stream: Stream, carried: Stream, num: int
) -> Tensor | None:
    """Return M ``[batch, pos, out, in]`` with ``carried_o = sum_i M_oi stream_i``, None if there is none.

    A channel stands for a part: what comes out in channel c of part o of units that are 1 in channel i of
    part i is the whole row of M, if the map is one of weights over parts; whether it is, ``carried`` shows.

    Args:
        carry: linear.
        stream: streams, fractions of one (``num`` of them), or a history.
        carried: ``carry(stream)``.
        num: parts of ``stream``.
    """
    parts, out = _split(stream, num), _split(carried, num)
    columns: list[Tensor] = []
    for first in range(0, num, parts.shape[-1]):
        made = _split(carry(_like(_units(parts, first), stream)), num)
        columns.append(made[..., : min(num - first, parts.shape[-1])])
    matrix = torch.cat(columns, -1)
    return matrix if _agree(matrix @ parts, out) else None


def _like(parts: Tensor, stream: Stream) -> Stream:
    """Return ``[batch, pos, parts, width]`` in the shape of ``stream``."""
    if isinstance(stream, Tensor):
        return parts if stream.ndim == 4 else parts.flatten(-2)
    return parts.unbind(-2)


def inject_weights(inject: Callable[[Tensor], Stream], update: Tensor, written: Stream) -> Tensor | None:
    """Return ``[batch, pos, out]``, by which an update enters each part; None if it is no such weight."""
    made = _split(inject(torch.ones_like(update)), 1)[..., 0]
    return made if _agree(made[..., None] * update[..., None, :], _split(written, 1)) else None


def _checked_weights(connection: Connection, stream: Stream, read: Tensor) -> Tensor | None:
    weights = connection.read_weights(stream)
    if weights is None:
        return None
    made = (weights[..., None, :].to(read.dtype) @ _split(stream, 1).to(read.dtype))[..., 0, :]
    return weights.expand(*read.shape[:2], -1) if _agree(made, read) else None


def _agree(made: Tensor, wanted: Tensor) -> bool:
    tolerance = EXACT.get(wanted.dtype)
    if tolerance is None or made.shape != wanted.shape:
        return False
    error = (made - wanted).norm(dim=-1)
    return bool((error <= tolerance * wanted.norm(dim=-1).clamp_min(1e-30) + 1e-12).all())


def _copies(streams: Tensor) -> Tensor | None:
    """Return weights of 1 where all streams are the same, as copies of an embedding are; else None."""
    same = torch.equal(streams, streams[..., :1, :].expand_as(streams))
    return streams.new_ones(streams.shape[:-1]) if same else None


def streams_of(model: nn.Module, inputs: Mapping[str, Any], stream_map: StreamMap) -> StreamsResult:
    """Return the figures of any model whose map says that it carries several streams.

    Mixing matrices are read off the recorded calls with their coefficients frozen, and given where they make
    what the model itself carried. What a sublayer reads is not in a map: no figure of it is given.

    Args:
        model: the module; run once, without gradients; for a window or a few.
        inputs: keyword arguments of its forward.
        stream_map: its map, with ``num_streams`` of at least 2.

    Raises:
        StreamNotFoundError: the pass did not go through the sites of the map.
    """
    model = unwrapped(model)
    tracker = FrameTracker(model)
    recorder = _FlowWatch(stream_map, tracker, batch_of(inputs), keep_tail=False)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), tracker, recorder:
        recorder.note_inputs(inputs)
        output = model(**inputs)
    recorder.finish(type(model).__name__, output)
    recorder.figures.end_pass(recorder.batch)
    return recorder.figures.result()


class _FlowWatch(LedgerRecorder):
    """Reads the mixing matrix off the carried path of every site."""

    def __init__(self, stream_map: StreamMap, tracker: FrameTracker, batch: Batch, *, keep_tail: bool):
        super().__init__(stream_map, tracker, batch, keep_tail=keep_tail)
        self.figures = StreamFigures()

    def on_join(self, site: Site, event: SublayerEvent) -> None:
        """Hand on the sublayer."""
        before = self.stream_shaped(self.value(site.before))
        written = torch.stack([w.value.expand_as(event.after) for w in event.writes]).sum(0)
        carried = torch.zeros_like(event.after) if event.carried is None else event.carried
        mix = None
        if event.carried is not None and site.then == "identity":

            def carry(s: Stream) -> Stream:
                return self.carry(cast(Tensor, s), site, False)

            mix = mixing_matrix(carry, before, carried, before.shape[-2])
        joined = Joined(before, carried, written, event.after)
        block = self.map.blocks[site.block]
        self.figures.update(
            StreamsEvent(
                block=site.block,
                ends_block=site.index + 1 == block.end_site,
                kind="+".join(w.kind for w in event.writes),
                whole=Joined(*(t.mean(-2) for t in (before, carried, written, event.after))),
                streams=joined,
                read=None,
                mix=mix,
                inject=None,
                read_weights=None,
                expanded=_copies(before) if site.index == 0 else None,
                batch=self.batch,
            )
        )

    def on_leave(self, site: Site) -> None:
        """Nothing: the state after a site is the one before the next."""
