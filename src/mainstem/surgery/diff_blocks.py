"""Which block of one model is which of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PRUNED = "prune.json"


def match_blocks(
    num_a: int, num_b: int, record_a: dict[str, Any] | None = None, record_b: dict[str, Any] | None = None
) -> tuple[list[tuple[int, int]], str]:
    """Return pairs of a block of A and a block of B, and how they were found, in words.

    By the record of a pruned model whose depth before and after are those of the two; otherwise by order from
    the bottom, where of a deeper model the blocks above have no partner.

    Args:
        num_a, num_b: blocks of each.
        record_a, record_b: ``prune.json`` of each, or None.
    """
    for record, turned in ((record_b, False), (record_a, True)):
        whole, shorter = (num_b, num_a) if turned else (num_a, num_b)
        kept = _kept(record, whole, shorter)
        if kept is not None:
            pairs = [(block, place) for place, block in enumerate(kept)]
            says = f"by the {PRUNED} of {'A' if turned else 'B'}"
            return ([(b, a) for a, b in pairs] if turned else pairs), says
    shared = min(num_a, num_b)
    return [(block, block) for block in range(shared)], "by order"


def _kept(record: dict[str, Any] | None, whole: int, shorter: int) -> list[int] | None:
    if record is None or record.get("num_blocks") != {"before": whole, "after": shorter}:
        return None
    kept = [block for start, end in record.get("kept_ranges", ()) for block in range(start, end)]
    return kept if len(kept) == shorter else None


def prune_record(folder: str) -> dict[str, Any] | None:
    """Return the record beside a model, or None where there is none that can be read."""
    try:
        found: Any = json.loads((Path(folder).expanduser() / PRUNED).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None  # pyright: ignore[reportUnknownVariableType]
