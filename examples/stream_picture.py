"""Draw an audit as a river: the stream from left to right, and every sublayer as a tributary.

    mainstem audit smollm2 --text tests/data/gpl-3.0.txt --out out/smollm2
    python examples/stream_picture.py out/smollm2/audit.json docs/pictures/stream.svg

The trunk's width is the median norm of the stream (log scale); attention joins from above, the feed-forward
from below, each as wide as its write is beside the stream it joins. Needs the standard library only.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, MIDDLE = 860, 300, 150
LEFT, RIGHT = 104, 62
INK, ATTENTION, FEED_FORWARD = "#333333", "#0072B2", "#C55300"


def picture(audit: dict[str, Any]) -> str:
    """Return the audit as an SVG document."""
    blocks = audit["blocks"]
    step = (WIDTH - LEFT - RIGHT) / (len(blocks) + 1)
    norms = [b["resid_norm_median"] for b in blocks]
    low = math.log10(min(norms)) - 0.3

    def half(norm: float) -> float:
        return 6 + 22 * (math.log10(norm) - low)

    xs = [LEFT + step * (i + 1) for i in range(len(blocks))]
    edge = [half(n) for n in norms]
    top = [f"{x:.1f},{MIDDLE - h:.1f}" for x, h in zip(xs, edge, strict=True)]
    bottom = [f"{x:.1f},{MIDDLE + h:.1f}" for x, h in zip(xs, edge, strict=True)]
    start = 6.0
    mouth = WIDTH - RIGHT - 14
    trunk = [f"{LEFT - 14},{MIDDLE - start}", *top, f"{mouth},{MIDDLE - edge[-1]:.1f}"]
    trunk += [f"{mouth + 20},{MIDDLE}", f"{mouth},{MIDDLE + edge[-1]:.1f}"]
    trunk += [*reversed(bottom), f"{LEFT - 14},{MIDDLE + start}"]
    parts = [f'<polygon points="{" ".join(trunk)}" fill="{INK}"/>']
    for block, x, h in zip(blocks, xs, edge, strict=True):
        for name, side, colour in (("attn", -1, ATTENTION), ("mlp", 1, FEED_FORWARD)):
            ratio = block[f"{name}_write_ratio"]
            if ratio is not None:
                parts.append(
                    tributary(x, MIDDLE + side * (h - 2), side, 1.2 + 9 * min(ratio, 2.0) ** 0.8, colour)
                )
        if block["block"] % 5 == 0 or block["block"] == len(blocks) - 1:
            parts.append(text(x, MIDDLE + 4, str(block["block"]), "#FFFFFF", "middle"))
    model, loss = audit["provenance"]["model"], audit["loss"]
    worst = max(audit["books"]["additivity"], audit["books"]["continuity"])
    parts += [
        text(4, 76, "attention", ATTENTION, "start"),
        text(4, MIDDLE + 4, "embedding", INK, "start"),
        text(WIDTH - 4, MIDDLE + 4, "logits", INK, "end"),
        text(4, 232, "feed-forward", FEED_FORWARD, "start"),
        text(
            4,
            HEIGHT - 8,
            f"{model['requested']}, {len(blocks)} blocks: median norm {norms[0]:.0f} to {norms[-1]:.0f}; "
            f"loss {loss['nll']:.3f} over {loss['tokens']:,} tokens; "
            f"books balance to {'the bit' if worst == 0 else format(worst, '.0e')}",
            INK,
            "start",
        ),
    ]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="The residual stream of {model["requested"]} as a river with tributaries">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#FFFFFF"/>\n{body}\n</svg>\n'
    )


def tributary(x: float, y: float, side: int, width: float, colour: str) -> str:
    """Return one curved line that joins the trunk at ``(x, y)`` from above (-1) or below (1)."""
    far = MIDDLE + side * 112
    bend = (far + y) / 2
    path = f"M {x - 16:.1f},{far:.1f} C {x - 14:.1f},{bend:.1f} {x - 2:.1f},{bend:.1f} {x:.1f},{y:.1f}"
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:.1f}" stroke-linecap="round"/>'
    )


def text(x: float, y: float, words: str, colour: str, anchor: str) -> str:
    """Return a line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" '
        f'font-family="system-ui, sans-serif" font-size="12">{words}</text>'
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    target.write_text(picture(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"wrote {target}")
