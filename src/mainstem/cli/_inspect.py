"""`mainstem inspect` and `mainstem connections`: what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mainstem.cli._options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    RevisionOption,
    TrustOption,
)
from mainstem.cli._terminal import output, stdout_kept_clean

if TYPE_CHECKING:
    from mainstem.observe import StreamMap


def inspect(
    model: ModelArgument,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show where MODEL's residual stream is: its blocks, what each writes, and how the stream is carried."""
    import json

    from mainstem.audit import map_of

    with stdout_kept_clean():
        stream_map = map_of(
            model, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code
        )
    with output():
        print(json.dumps(map_as_dict(stream_map), indent=1) if as_json else stream_map.describe())


def connections(as_json: JsonOption = False) -> None:
    """List every residual connection: formula, paper, how it starts, and what it costs, counted."""
    import json

    from mainstem.connections.table import scheme_rows
    from mainstem.report import plain_console, print_schemes

    rows = scheme_rows()
    with output():
        if as_json:
            print(json.dumps([row.to_dict() for row in rows], indent=1, ensure_ascii=False))
        else:
            print_schemes(rows, plain_console())


def map_as_dict(stream_map: StreamMap) -> dict[str, Any]:
    """Return a map as plain values: sizes, blocks with their sublayers, and the names of the points."""
    return {
        "schema": "mainstem.map/1",
        "num_streams": stream_map.num_streams,
        "width": stream_map.width,
        "output": stream_map.output,
        "blocks": [
            {
                "block": block.index,
                "module": block.module,
                "call": block.call,
                "sublayers": [
                    {
                        "carry": site.carry,
                        "then": site.then,
                        "writes": [{"kind": write.kind, "module": write.module} for write in site.writes],
                    }
                    for site in stream_map.sites[block.first_site : block.end_site]
                ],
            }
            for block in stream_map.blocks
        ],
        "points": stream_map.names(),
        "notes": list(stream_map.notes),
    }
