"""A model's stream: by its data flow, or, of a tower whose stream no data flow shows, by its connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from mainstem.errors import StreamNotFoundError
from mainstem.measure.events import Batch, Reducer
from mainstem.observe.find import find_stream
from mainstem.observe.map import StreamMap
from mainstem.observe.record import Recording, record
from mainstem.observe.tower_record import TowerMap, record_tower, tower_in, tower_map


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
