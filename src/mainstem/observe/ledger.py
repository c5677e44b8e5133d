"""The ledger: the final state as an exact sum over everything that was ever written."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mainstem.errors import BooksError
from mainstem.measure.events import Batch, Reducer, SublayerEvent
from mainstem.observe._frames import FrameTracker, unwrapped
from mainstem.observe._frozen import apply_frozen
from mainstem.observe._trace import CallKey
from mainstem.observe.map import PathCall, Site, StreamMap, Value
from mainstem.observe.record import Recorder, Recording, batch_of, relative_error


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Every contribution to the final state, with all coefficients frozen at the values of one pass.

    Attributes:
        labels: ``embed``, ``pos_embed``, ``0_attn_out``, ``0_mlp_out``, ..., ``bias``; in the order of
            writing. ``intervention``: what was put there at the sublayers that were said to be changed.
        rows: ``[component, batch, pos, (n,) width]``: what is left at the top of each contribution.
        final: ``[batch, pos, (n,) width]``: the final state, before the final norm.
        embedded: ``[batch, pos, (n,) width]``: the ``embed`` row as it entered the first block.
        mask: ``[batch, pos]``: real tokens.
    """

    labels: tuple[str, ...]
    rows: Tensor
    final: Tensor
    embedded: Tensor
    mask: Tensor

    @property
    def error(self) -> float:
        """Largest ``|sum of rows - final| / |final|`` over real tokens."""
        return relative_error(self.rows.sum(0), self.final, self.mask)

    def check(self, tolerance: float) -> Ledger:
        """Return the ledger itself.

        Raises:
            BooksError: the rows do not add up to the final state within ``tolerance``.
        """
        if not self.error <= tolerance:
            raise BooksError(
                f"the ledger does not balance: its {len(self.labels)} rows differ from the final state by "
                f"{self.error:.2e} of its size, more than the {tolerance:.0e} allowed; no attribution is "
                "given."
            )
        return self

    def __getitem__(self, label: str) -> Tensor:
        """Return the row called ``label``."""
        return self.rows[self.labels.index(label)]

    def carried_share(self) -> Tensor:
        """Return how much of the embedding is still there at the top: ``<row, embedded> / <embedded,
        embedded>``.

        Returns:
            ``[batch, pos]``: 1 where it is carried whole (Pre-LN), 0 where nothing is (no residual).
        """
        row, written = self["embed"].flatten(2), self.embedded.flatten(2)
        return (row * written).sum(-1) / (written * written).sum(-1).clamp_min(torch.finfo(row.dtype).tiny)

    def final_share(self, label: str) -> Tensor:
        """Return how much of the final state one row is: ``<row, final> / <final, final>``.

        Returns:
            ``[batch, pos]``: the shares of all rows sum to 1; one that points away has a negative one.
        """
        row, final = self[label].flatten(2), self.final.flatten(2)
        return (row * final).sum(-1) / (final * final).sum(-1).clamp_min(torch.finfo(row.dtype).tiny)


def ledger(model: nn.Module, inputs: Mapping[str, Any], stream_map: StreamMap) -> Ledger:
    """Return the ledger of any model that :func:`find_stream` has mapped.

    Whatever lies between a write and the top (scales, norms, mixing of streams) is applied to the write with
    its
    coefficients frozen: a norm's statistics, a gate, a mixing matrix are those of this pass. Holds one tensor
    of the stream's size for each write; give it few tokens.

    Args:
        model: the module; run once, without gradients.
        inputs: keyword arguments of its forward.
        stream_map: its map.

    Raises:
        StreamNotFoundError: the pass did not go through the sites of the map.
    """
    return ledger_and_tail(model, inputs, stream_map, keep_tail=False)[0]


def ledger_and_tail(
    model: nn.Module,
    inputs: Mapping[str, Any],
    stream_map: StreamMap,
    *,
    keep_tail: bool = True,
    reducers: Sequence[Reducer] = (),
    changed: Collection[int] = (),
) -> tuple[Ledger, Recording]:
    """Return the ledger of one pass and what :func:`mainstem.observe.record` would of it; see `ledger`.

    Args:
        model, inputs, stream_map: as for `ledger`.
        keep_tail: keep the model's end.
        reducers: what takes the events of the same pass, as for `mainstem.observe.record`.
        changed: numbers of sublayers that an intervention acts at: what is left there when all rows are taken
            off goes into the row ``intervention`` and up with the others. Rows and final state must add up
            all the same, so whatever else is amiss shows.
    """
    model = unwrapped(model)
    tracker = FrameTracker(model)
    recorder = LedgerRecorder(stream_map, tracker, batch_of(inputs), keep_tail=keep_tail)
    recorder.changed, recorder.reducers = frozenset(changed), reducers
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), tracker, recorder:
        recorder.note_inputs(inputs)
        output = model(**inputs)
    recorder.finish(type(model).__name__, output)
    tail = recorder.tail.close(output, stream_map.output) if recorder.tail is not None else None
    return recorder.close(), Recording(output, recorder.books, tail)


class _Step(Protocol):
    def __call__(self, row: Tensor, bias: bool) -> Tensor: ...


class LedgerRecorder(Recorder):
    """Carries every row along while the model runs."""

    def __init__(self, stream_map: StreamMap, tracker: FrameTracker, batch: Batch, *, keep_tail: bool):
        super().__init__(stream_map, [], tracker, batch, keep_tail=keep_tail)
        for value in (stream_map.source, *stream_map.front):
            self.watch.add(value.call)
        for path_call in stream_map.front_path:
            self.watch.add(path_call.call)
        self.rows: dict[str, Tensor] = {}
        self.final: Tensor | None = None
        self.embedded = torch.empty(0)
        self.changed: frozenset[int] = frozenset()
        self._source: Tensor | None = None

    def on_call(self, key: CallKey) -> None:
        """Copy the source: what follows may scale it in place (CTRL)."""
        if key == self.map.source.call:
            self._source = self.calls[key].made[0].clone()

    def on_join(self, site: Site, event: SublayerEvent) -> None:
        """Carry the rows over the join and add what was written."""
        if not self.rows:
            self._open()
        if not site.carried:
            self.rows = {label: torch.zeros_like(event.after) for label in self.rows}
        elif not self._is_taken_whole(site):
            self.rows = self._each(lambda row, bias: self.carry(row, site, bias))
        for write in event.writes:
            label = f"{site.block}_{write.kind}_out"
            while label in self.rows:  # a block that writes one kind twice
                label += "'"
            self.rows[label] = write.value.clone()

    def on_leave(self, site: Site) -> None:
        """Take the rows through what happens to the stream itself."""
        if site.then_path:
            end = site.after.call
            path, start = site.then_path, site.join.call
            self.rows = self._each(lambda row, bias: self._walk(path, start, row, bias, end))
        self.final = self.stream_shaped(self.value(site.after)).clone()
        if site.index in self.changed:
            gap = self.final - torch.stack(list(self.rows.values())).sum(0)
            known = self.rows.get("intervention")
            self.rows["intervention"] = gap if known is None else known + gap

    def _is_taken_whole(self, site: Site) -> bool:
        """Whether what the site carries is the very state that enters it, so that every row stays."""
        value = site.carried[0]
        return (
            len(site.carried) == 1
            and value.sign > 0
            and self.calls[value.call].given[value.slot or 0] is self.calls[site.before.call].made[0]
        )

    def _each(self, step: _Step) -> dict[str, Tensor]:
        """Apply a linear step to all rows at once, and to the bias row, which takes up offsets, apart."""
        labels = [label for label in self.rows if label != "bias"]
        stacked = torch.stack([self.rows[label] for label in labels])
        done: Tensor = torch.vmap(functools.partial(step, bias=False))(stacked)
        return {**dict(zip(labels, done, strict=True)), "bias": step(self.rows["bias"], bias=True)}

    def close(self) -> Ledger:
        """Return the ledger, rows that are zero left out."""
        assert self.final is not None
        bias = self.rows.pop("bias")
        self.rows["bias"] = bias
        kept = {k: v for k, v in self.rows.items() if k not in ("pos_embed", "bias") or bool(v.any())}
        rows = torch.stack(list(kept.values()))
        return Ledger(tuple(kept), rows, self.final, self.embedded, self.batch.mask)

    def _open(self) -> None:
        """Start the rows: what is linear in the source, what is added to it, and norms' biases."""
        path, end = self.map.front_path, self.map.sites[0].before.call
        source = self.calls[self.map.source.call].made[0] if self._source is None else self._source
        nothing = torch.zeros_like(source)
        start = self.map.source.call
        embed = self._walk(path, start, source, False, end)
        added = self._walk(path, start, nothing, False, end, constants=True)
        everything = self._walk(path, start, nothing, True, end, constants=True)
        self.embedded = embed
        self.rows = {"embed": embed, "pos_embed": added, "bias": everything - added}

    def carry(self, row: Tensor, site: Site, offsets: bool) -> Tensor:
        """Return what the site keeps of a row."""
        made = self._evaluate(site.carry_path, site.before.call, row, offsets, constants=offsets)
        total: Tensor | None = None
        for value in site.carried:
            assert value.made_by is not None
            part = self.stream_shaped(self._pick(made, value)) * value.sign
            total = part if total is None else total + part
        assert total is not None
        return total

    def _walk(
        self,
        path: Sequence[PathCall],
        start: CallKey,
        row: Tensor,
        offsets: bool,
        end: CallKey,
        constants: bool | None = None,
    ) -> Tensor:
        keep = offsets if constants is None else constants
        return self.stream_shaped(self._evaluate(path, start, row, offsets, constants=keep)[end][0])

    def _evaluate(
        self, path: Sequence[PathCall], start: CallKey, row: Tensor, offsets: bool, *, constants: bool
    ) -> dict[CallKey, list[Tensor]]:
        """Apply a path's calls to ``row`` in place of the tensor that the call ``start`` made."""
        first = self.calls[start].made[0]
        made: dict[CallKey, list[Tensor]] = {start: [row.reshape(first.shape)]}
        for step in path:
            given = {v.slot: self._pick(made, v) for v in step.takes if v.slot is not None}
            made[step.call] = apply_frozen(self.calls[step.call], given, constants=constants, offsets=offsets)
        return made

    def _pick(self, made: Mapping[CallKey, list[Tensor]], value: Value) -> Tensor:
        """Return the stand-in for the argument ``value``, of those its maker made."""
        assert value.made_by is not None
        assert value.slot is not None
        taken = self.calls[value.call].given[value.slot]
        maker = self.calls[value.made_by]
        place = next((i for i, t in enumerate(maker.made) if t is taken), 0)
        return made[value.made_by][place]
