"""The ledger of a model, by its data flow or by its connections."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mainstem.measure import Reducer
from mainstem.observe import (
    Ledger,
    Recording,
    StreamMap,
    TowerMap,
    ledger_and_tail,
    record_tower,
    tower_in,
    tower_ledger,
)


def ledger_of(
    model: nn.Module,
    inputs: Mapping[str, Any],
    stream_map: StreamMap,
    *,
    keep_tail: bool,
    reducers: Sequence[Reducer] = (),
    changed: Collection[int] = (),
) -> tuple[Ledger, Recording]:
    """Return the ledger of one pass and its recording; see `mainstem.observe.ledger_and_tail`."""
    tower = tower_in(model)
    if not isinstance(stream_map, TowerMap) or tower is None:
        return ledger_and_tail(
            model, inputs, stream_map, keep_tail=keep_tail, reducers=reducers, changed=changed
        )
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        books = tower_ledger(tower, inputs["input_ids"], inputs.get("attention_mask"))
        return books, record_tower(model, inputs, stream_map, reducers, keep_tail=keep_tail)
