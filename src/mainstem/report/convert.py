"""A conversion in words."""

from __future__ import annotations

from typing import Any


def conversion_lines(record: dict[str, Any]) -> list[str]:
    """Return what was measured, a line each, from what ``convert.json`` says."""
    distance = record["distance"]
    layout = f" in the layout {record['layout']}" if record["layout"] else ""
    kept = "the function is kept" if record["kept"] else "the function is NOT kept"
    return [
        f"{record['source']['requested']} -> {record['connection']}{layout}: {kept}",
        f"largest logit difference {_figure(distance['max_logit_difference'])}, mean KL "
        f"{_figure(distance['mean_kl'])} nats, over {distance['num_tokens']:,} tokens",
        f"loss {_figure(distance['loss_before'], '.4f')} -> {_figure(distance['loss_after'], '.4f')} nats a "
        "token",
        f"{record['parameters_new']:,} new parameters in {len(record['new'])} tensors, "
        f"{len(record['left_out'])} of the source left out",
    ]


def _figure(value: float | None, how: str = ".2g") -> str:
    return "not finite" if value is None else format(value, how)
