"""A model's stream: by its data flow, or, of a tower whose stream no data flow shows, by its connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mainstem.errors import StreamNotFoundError
from mainstem.measure import Batch, Reducer
from mainstem.observe import (
    Ledger,
    Recording,
    StreamMap,
    TowerMap,
    find_stream,
    ledger_and_tail,
    record,
    record_tower,
    tower_in,
    tower_ledger,
    tower_map,
)


def stream_of(model: nn.Module, inputs: Mapping[str, Any]) -> StreamMap:
    """Return the map of a model.

    Raises:
        StreamNotFoundError: no stream was found, and the model holds no tower whose connections could be
            asked.
    """
    tower = tower_in(model)
    if tower is None:
        return find_stream(model, inputs)
    try:
        found = find_stream(model, inputs)
    except StreamNotFoundError:
        return tower_map(model, inputs["input_ids"])
    return found if len(found.blocks) == len(tower.blocks) else tower_map(model, inputs["input_ids"])


def recorded(
    model: nn.Module,
    inputs: Mapping[str, Any],
    stream_map: StreamMap,
    reducers: Sequence[Reducer],
    *,
    batch: Batch,
    keep_tail: bool = False,
) -> Recording:
    """Record one pass; see `mainstem.observe.record`."""
    if isinstance(stream_map, TowerMap):
        return record_tower(model, inputs, stream_map, reducers, batch=batch, keep_tail=keep_tail)
    return record(model, inputs, stream_map, reducers, batch=batch, keep_tail=keep_tail)


def ledger_of(
    model: nn.Module, inputs: Mapping[str, Any], stream_map: StreamMap, *, keep_tail: bool
) -> tuple[Ledger, Recording]:
    """Return the ledger of one pass and its recording; see `mainstem.observe.ledger_and_tail`."""
    tower = tower_in(model)
    if not isinstance(stream_map, TowerMap) or tower is None:
        return ledger_and_tail(model, inputs, stream_map, keep_tail=keep_tail)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        books = tower_ledger(tower, inputs["input_ids"], inputs.get("attention_mask"))
        return books, record_tower(model, inputs, stream_map, keep_tail=keep_tail)
