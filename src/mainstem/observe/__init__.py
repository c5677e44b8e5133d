"""Finds the residual stream of any model from its data flow, and records it. Needs torch only."""

from mainstem.observe.find import find_stream
from mainstem.observe.map import BlockMap, Site, StreamMap, Value, WriteSite
from mainstem.observe.record import Books, Recording, batch_of, record

__all__ = [
    "BlockMap",
    "Books",
    "Recording",
    "Site",
    "StreamMap",
    "Value",
    "WriteSite",
    "batch_of",
    "find_stream",
    "record",
]
