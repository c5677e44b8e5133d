"""Finds the residual stream of any model from its data flow, and records it. Needs torch only."""

from mainstem.observe.find import find_stream
from mainstem.observe.keep import KeepStream
from mainstem.observe.ledger import Ledger, ledger
from mainstem.observe.map import BlockMap, PathCall, Site, StreamMap, Value, WriteSite
from mainstem.observe.record import Books, Recording, batch_of, record
from mainstem.observe.tower_ledger import tower_ledger

__all__ = [
    "BlockMap",
    "Books",
    "KeepStream",
    "Ledger",
    "PathCall",
    "Recording",
    "Site",
    "StreamMap",
    "Value",
    "WriteSite",
    "batch_of",
    "find_stream",
    "ledger",
    "record",
    "tower_ledger",
]
