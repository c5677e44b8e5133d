"""What is needed to repeat an audit, and why some of its figures are null."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterator
from typing import Any

import torch

import mainstem
from mainstem.audit.config import AuditConfig
from mainstem.observe import StreamMap, TowerMap
from mainstem.sources import LoadedModel, Windows, WindowStream


def provenance_of(
    config: AuditConfig, loaded: LoadedModel, windows: Windows | WindowStream, stream_map: StreamMap
) -> dict[str, Any]:
    """Return the provenance of an audit; the sampling is added when the reducers are done."""
    return {
        "mainstem": mainstem.__version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "options": config.to_dict(),
        "model": loaded.provenance,
        "text": windows.provenance,
        "stream": {
            "num_blocks": len(stream_map.blocks),
            "num_sublayers": len(stream_map.sites),
            "num_streams": stream_map.num_streams,
            "width": stream_map.width,
            "output": stream_map.output,
            "carry": sorted({s.carry for s in stream_map.sites}),
            "then": sorted({s.then for s in stream_map.sites}),
            "points": stream_map.names(),
            "notes": list(stream_map.notes),
        },
        "exclusions": {
            "padding": "left out everywhere, by mask",
            "first": "the first token of each window is left out of block figures and given apart; "
            "the lens, the largest activation and the loss include it",
        },
        "notes": list(_notes(config, loaded, stream_map)),
        "seed": None,
        "machine": {
            "python": platform.python_version(),
            "system": platform.system(),
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
        },
    }


def speaks(stream_map: StreamMap) -> bool:
    """Say whether the stream was followed to a prediction of words."""
    return stream_map.output in ("logits", "prediction_logits")


def _notes(config: AuditConfig, loaded: LoadedModel, stream_map: StreamMap) -> Iterator[str]:
    kind = loaded.provenance.get("kind")
    if kind == "masked":
        yield "loss is null: a masked language model does not predict the next token"
    elif kind != "causal":
        yield "loss is null: the model has no output head"
    if not speaks(stream_map):
        yield "lens figures are null: the model has no output head"
    elif not config.lens:
        yield "lens figures are null: no lens was asked for"
    replaced = [str(b.index) for b in stream_map.blocks if stream_map.sites[b.first_site].carry == "none"]
    if replaced:
        yield (
            "write_ratio and write_cosine are null where nothing is carried into a block: its first sublayer "
            f"replaces the stream (blocks {', '.join(replaced)})"
        )
    if isinstance(stream_map, TowerMap) and not stream_map.adds:
        yield (
            "absorbed_bfloat16 and absorbed_float16 are empty: not every sublayer adds what it writes to a "
            "state that the stream holds, so there is no one sum to be rounded"
        )
    yield from stream_map.notes
