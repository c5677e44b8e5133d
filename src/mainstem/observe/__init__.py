"""Finds the residual stream of any model from its data flow, and records it. Needs torch only."""

from mainstem.observe.attribution import Attribution, attribute
from mainstem.observe.either import recorded, stream_of
from mainstem.observe.find import find_stream
from mainstem.observe.keep import KeepStream
from mainstem.observe.ledger import Ledger, ledger, ledger_and_tail
from mainstem.observe.map import BlockMap, PathCall, Site, StreamMap, Value, WriteSite
from mainstem.observe.record import Books, Recording, batch_of, record
from mainstem.observe.streams import streams_of, tower_streams
from mainstem.observe.tower_ledger import tower_ledger
from mainstem.observe.tower_record import TowerMap, record_tower, tower_in, tower_map

__all__ = [
    "Attribution",
    "BlockMap",
    "Books",
    "KeepStream",
    "Ledger",
    "PathCall",
    "Recording",
    "Site",
    "StreamMap",
    "TowerMap",
    "Value",
    "WriteSite",
    "attribute",
    "batch_of",
    "find_stream",
    "ledger",
    "ledger_and_tail",
    "record",
    "record_tower",
    "recorded",
    "stream_of",
    "streams_of",
    "tower_in",
    "tower_ledger",
    "tower_map",
    "tower_streams",
]
