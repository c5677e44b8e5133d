"""A cut as a configuration of mergekit, which makes the same checkpoint from the same source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence


def mergekit_yaml(
    source: str, ranges: Sequence[tuple[int, int]], silenced: Mapping[int, Sequence[str]], dtype: str
) -> str:
    """Return a ``passthrough`` merge that takes the kept blocks one range after another.

    Args:
        source: what mergekit shall read: a hub id or a folder.
        ranges: half-open, 0-based, in order.
        silenced: for blocks with a removed sublayer, the names of the modules whose weights are scaled by
            zero; such a block is a slice of its own.
        dtype: of the weights, ``"float32"``.
    """
    lines = [
        "# Blocks are counted from 0, and layer_range is half-open: [0, 2] takes blocks 0 and 1.",
        "merge_method: passthrough",
        f"dtype: {dtype}",
        "slices:",
    ]
    for start, end in _split(ranges, set(silenced)):
        lines += [
            "  - sources:",
            f"      - model: {json.dumps(source)}",
            f"        layer_range: [{start}, {end}]",
        ]
        if start in silenced:
            lines += ["        parameters:", "          scale:"]
            for name in silenced[start]:
                lines += [f"            - filter: {name}", "              value: 0.0"]
            lines += ["            - value: 1.0"]
    return "\n".join(lines) + "\n"


def _split(ranges: Sequence[tuple[int, int]], alone: set[int]) -> list[tuple[int, int]]:
    """Cut the ranges around the blocks that stand alone."""
    found: list[tuple[int, int]] = []
    for start, end in ranges:
        first = start
        for block in range(start, end):
            if block in alone:
                found += [(first, block), (block, block + 1)]
                first = block + 1
        found.append((first, end))
    return [(start, end) for start, end in found if start < end]
