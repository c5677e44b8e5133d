"""One sentence a question, made from the figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from mainstem.audit.result import AuditResult, BlockFigures, Finding
from mainstem.measure import growth_per_block


def make_findings(result: AuditResult) -> AuditResult:
    """Return the result with a finding for every question it has figures for (docs/design.md, section 8)."""
    questions: list[tuple[int, str, Callable[[AuditResult], str | None]]] = [
        (1, "Do the books balance?", _books),
        (2, "How does the stream grow?", _growth),
        (3, "What does each sublayer write?", _writes),
        (5, "When does the answer form?", _answer),
        (7, "Which floors can go?", _removal),
    ]
    found = [(n, question, make(result)) for n, question, make in questions]
    findings = tuple(Finding(number=n, question=q, finding=text) for n, q, text in found if text)
    return dataclasses.replace(result, findings=findings)


def _books(result: AuditResult) -> str:
    books = result.books
    worst = max(
        (
            (share, b.block, kind)
            for b in result.blocks
            for kind, s in b.absorbed_bfloat16.items()
            for share in [s["first"]]
        ),
        default=None,
        key=lambda entry: -1.0 if math.isnan(entry[0]) else entry[0],
    )
    rest = [
        s["rest"] for b in result.blocks for s in b.absorbed_bfloat16.values() if not math.isnan(s["rest"])
    ]
    text = (
        f"Yes: over {books.sublayers} sublayers and {books.passes} passes the largest error is "
        f"{books.additivity:.1e} "
        f"in additivity and {books.continuity:.1e} in continuity."
    )
    if rest and worst is not None and not math.isnan(worst[0]):
        text += (
            f" A bfloat16 stream would swallow {_percent(sum(rest) / len(rest))} of the write entries on "
            f"average, and {_percent(worst[0])} of block {worst[1]}'s {_word(worst[2])} at first tokens."
        )
    return text


def _growth(result: AuditResult) -> str:
    blocks = result.blocks
    norms = [b.resid_norm_median for b in blocks]
    first, last = _number(norms[0]), _number(norms[-1])
    text = f"The median norm goes from {first} after block 0 to {last} after block {len(blocks) - 1}"
    if len(norms) > 1:
        text += f", x{growth_per_block(norms):.3f} a block"
    massive = [o for o in result.outliers if o.massive]
    largest = max(result.outliers, key=lambda o: abs(o.value), default=None)
    if largest is not None:
        text += (
            f"; the largest activation is {_number(largest.value)} at position {largest.position}, channel "
            f"{largest.channel}, after block {largest.block}"
        )
        bits = result.blocks[largest.block].headroom_bits["float16"]
        fits = f"{bits:.1f} doublings below float16's limit" if bits >= 0 else "beyond float16's limit"
        text += f" ({_number(largest.median_ratio)} medians, {fits})"
    if massive:
        text += f"; massive after {_ranges([o.block for o in massive])}"
    if result.first_nonfinite is not None:
        text += (
            f"; NOT FINITE first at block {result.first_nonfinite['block']}, {result.first_nonfinite['site']}"
        )
    return text + "."


def _writes(result: AuditResult) -> str | None:
    parts: list[str] = []
    for kind, name in (
        ("attn", "attention"),
        ("mlp", "feed-forward"),
        ("mixer", "mixer"),
        ("cross_attn", "cross-attention"),
    ):
        ratios = [
            (r, b.block)
            for b in result.blocks
            if (r := getattr(b, f"{kind}_write_ratio")) is not None and r == r
        ]
        if ratios:
            middle = sorted(r for r, _ in ratios)[len(ratios) // 2]
            most, block = max(ratios)
            parts.append(f"{name} {middle:.2f} (most {most:.2f}, block {block})")
    if not parts:
        return None
    erasing = [b.block for b in result.blocks if b.write_cosine is not None and b.write_cosine < 0]
    tail = f"; {_ranges(erasing)} write against the stream (cosine below 0)" if erasing else ""
    return f"Median size of a write beside the stream it joins: {', '.join(parts)}{tail}."


def _answer(result: AuditResult) -> str | None:
    blocks = [b for b in result.blocks if b.lens_top1 is not None and b.lens_kl is not None]
    if not blocks:
        return None
    settled = _from_then_on(blocks, lambda b: (b.lens_top1 or 0) >= 0.5)
    before = blocks[-2] if len(blocks) > 1 else blocks[-1]
    return (
        "Read out with the model's own head, the stream agrees with the final top word at half of the "
        "positions from "
        f"block {settled} of {len(blocks)} on; one block before the end KL(final || lens) is "
        f"{before.lens_kl:.2f} nats "
        f"and {_percent(before.lens_top1 or 0)} agree. After the last block it equals the model."
    )


def _removal(result: AuditResult) -> str:
    ranked = sorted(
        (b.block_influence, b.block) for b in result.blocks if b.block_influence == b.block_influence
    )
    least = ", ".join(str(block) for _, block in ranked[:3])
    text = f"Least influence (1 - cosine): block{'s' if len(ranked) > 1 else ''} {least}"
    best = [b for b in result.angular_distance.best if b["blocks"] in (2, 4, 8)]
    if best:
        runs = ", ".join(f"{int(b['start'])}-{int(b['start'] + b['blocks']) - 1}" for b in best)
        text += f"; least angular distance: runs {runs}"
    switching = _switches(result)
    if switching:
        text += (
            f"; {_ranges(switching)} create or erase a massive activation, so do not judge them by influence"
        )
    return text + ". These scores are guesses until the loss without the block is measured."


def _switches(result: AuditResult) -> list[int]:
    """Return the blocks after which the largest activation is ten times more, or less, than before."""
    sizes = [b.max_abs for b in result.blocks]
    massive = {o.block for o in result.outliers if o.massive}
    return [
        i
        for i in range(1, len(sizes))
        if ({i, i - 1} & massive) and (sizes[i] >= 2 * sizes[i - 1] or 2 * sizes[i] <= sizes[i - 1])
    ]


def _from_then_on(blocks: Sequence[BlockFigures], holds: Callable[[BlockFigures], bool]) -> int:
    first = len(blocks)
    for block in reversed(blocks):
        if not holds(block):
            break
        first = block.block
    return first


def _ranges(blocks: Sequence[int]) -> str:
    """Return ``block 3`` or ``blocks 3, 5-8``."""
    runs: list[list[int]] = []
    for block in sorted(blocks):
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("block " if len(blocks) == 1 else "blocks ") + ", ".join(words)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _word(kind: str) -> str:
    return {"attn": "attention write", "mlp": "feed-forward write"}.get(kind, f"{kind} write")
