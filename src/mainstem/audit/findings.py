"""One or two sentences a question, made from the figures."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence

from mainstem.audit.result import AuditResult, Finding, Identity
from mainstem.measure import growth_per_block

KINDS = {"attn": "attention", "cross_attn": "cross-attention", "mlp": "feed-forward", "mixer": "mixer"}
"""Kinds of writes that have a ratio of their own, in words."""


def make_findings(result: AuditResult, asked: Collection[int] | None = None) -> AuditResult:
    """Return the result with a finding for every question it has figures for (docs/design.md, section 8).

    Args:
        result: the figures.
        asked: numbers of the questions to answer, None for all.
    """
    questions: list[tuple[int, str, Callable[[AuditResult], str | None]]] = [
        (1, "Do the books balance?", _books),
        (2, "How does the stream grow?", _growth),
        (3, "What does each sublayer write?", _writes),
        (4, "Is the word still there?", _identity),
        (5, "When does the answer form?", _answer),
        (6, "What if a block gives bad advice?", _damage),
        (7, "Which blocks can go?", _removal),
        (8, "Do learning signals get down?", _signals),
    ]
    found = [(n, question, make(result)) for n, question, make in questions if asked is None or n in asked]
    findings = tuple(Finding(number=n, question=q, finding=text) for n, q, text in found if text)
    return dataclasses.replace(result, findings=findings)


def _books(result: AuditResult) -> str:
    books = result.books
    checked = f"over {_count(books.sublayers, 'sublayer')} and {_count(books.passes, 'pass', 'passes')}"
    if books.additivity == books.continuity == 0:
        text = f"Yes, to the last bit, {checked}."
    else:
        text = (
            f"Yes: {checked} the largest relative error is {books.additivity:.1e} in additivity and "
            f"{books.continuity:.1e} in continuity."
        )
    if result.first_nonfinite is not None:
        text += (
            f" But the stream is NOT FINITE from block {result.first_nonfinite['block']} "
            f"({result.first_nonfinite['site']}) on, and figures that it touches are null."
        )
    return text + _absorbed(result)


def _absorbed(result: AuditResult) -> str:
    shares = [
        (share, name, b.block, kind)
        for b in result.blocks
        for kind, by_token in b.absorbed_bfloat16.items()
        for name, share in by_token.items()
        if math.isfinite(share)
    ]
    rest = [share for share, name, *_ in shares if name == "rest"]
    first = [entry for entry in shares if entry[1] == "first"]
    if not first:
        return ""
    most, _, block, kind = max(first)
    average = f"{_percent(sum(rest) / len(rest))} of the write entries on average, and " if rest else ""
    return (
        f" A bfloat16 stream would swallow {average}up to {_percent(most)} of a write at the windows' first "
        f"tokens (block {block}, {KINDS.get(kind, kind)})."
    )


def _growth(result: AuditResult) -> str:
    norms = [b.resid_norm_median for b in result.blocks]
    text = f"The median norm is {_number(norms[0])} after block 0"
    if len(norms) > 1:
        text = text.replace("is", "goes from", 1) + f" to {_number(norms[-1])} after block {len(norms) - 1}"
        growth = growth_per_block(norms) if all(math.isfinite(n) and n > 0 for n in norms) else math.nan
        text += f", x{growth:.3f} a block" if math.isfinite(growth) else ""
    sizes = [o for o in result.outliers if math.isfinite(o.value)]
    if sizes:
        largest = max(sizes, key=lambda o: abs(o.value))
        text += (
            f"; the largest activation is {_number(largest.value)} at position {largest.position}, channel "
            f"{largest.channel}, after block {largest.block}"
        )
        asides = [f"{_number(largest.median_ratio)} medians"] if math.isfinite(largest.median_ratio) else []
        bits = result.blocks[largest.block].headroom_bits.get("float16", math.nan)
        if math.isfinite(bits):
            asides.append(
                f"{bits:.1f} doublings below float16's limit" if bits >= 0 else "beyond float16's limit"
            )
        text += f" ({', '.join(asides)})" if asides else ""
    massive = [o.block for o in result.outliers if o.massive]
    return text + (f"; massive after {_ranges(massive)}." if massive else ".") + _directions(result)


def _directions(result: AuditResult) -> str:
    """Say how many directions the tokens of the states use."""
    states = [s for s in result.spectra or () if math.isfinite(s.whole.participation_ratio)]
    if len(states) < 2:
        return ""
    first, last = states[0], states[-1]
    ratios = [_number(s.whole.participation_ratio) for s in (first, last)]
    ranks = [_number(s.whole.effective_rank) for s in (first, last)]
    text = (
        f" Its tokens spread over {ratios[0]} directions before block 0 and {ratios[1]} after the last block "
        f"(participation ratio; effective rank {ranks[0]} and {ranks[1]})"
    )
    least = min(states, key=lambda s: s.whole.participation_ratio)
    left_out = least.whole.num_tokens - least.typical.num_tokens
    if least not in (first, last) or left_out:
        text += f", over the fewest of the states looked at {_at(result, least.state)}: "
        text += _number(least.whole.participation_ratio)
        if left_out:
            less = f"{left_out} outlier token" + ("s" if left_out > 1 else "")
            text += f" ({_number(least.typical.participation_ratio)} without {less})"
    return text + "."


def _alike(result: AuditResult) -> str:
    """Say which neighbours of the states that were looked at are least alike."""
    pairs = [
        (s.cka_next, s, t) for s, t in itertools.pairwise(result.spectra or ()) if math.isfinite(s.cka_next)
    ]
    if not pairs:
        return ""
    cka, state, following = min(pairs, key=lambda pair: pair[0])
    typical = state.typical_cka_next
    aside = f"; {typical:.2f} without outlier tokens" if f"{typical:.2f}" not in ("nan", f"{cka:.2f}") else ""
    return (
        f" Of the states looked at the least alike neighbours are those {_at(result, state.state)} and "
        f"{_at(result, following.state)} (CKA {cka:.2f}{aside})."
    )


def _at(result: AuditResult, state: int) -> str:
    return f"before block {state}" if state < len(result.blocks) else "after the last block"


def _writes(result: AuditResult) -> str | None:
    parts: list[str] = []
    for kind, name in KINDS.items():
        found = [(getattr(b, f"{kind}_write_ratio"), b.block) for b in result.blocks]
        ratios = sorted((r, block) for r, block in found if r is not None and math.isfinite(r))
        if not ratios:
            continue
        middle, (most, block) = ratios[len(ratios) // 2][0], ratios[-1]
        parts.append(
            f"{name} {_number(middle)}"
            + (f" (most {_number(most)}, block {block})" if len(ratios) > 1 else "")
        )
    if not parts:
        carries_nothing = all(b.write_ratio is None for b in result.blocks)
        return "Nothing is carried: each sublayer replaces the stream." if carries_nothing else None
    cosines = [(b.write_cosine, b.block) for b in result.blocks if b.write_cosine is not None]
    erasing = [block for cosine, block in cosines if cosine < 0]
    verb = "writes" if len(erasing) == 1 else "write"
    tail = f"; {_ranges(erasing)} {verb} against the stream (cosine below 0)" if erasing else ""
    what = "Median over blocks of a write's size" if len(result.blocks) > 1 else "Size of a write"
    return f"{what} beside the stream it joins: {', '.join(parts)}{tail}.{_alike(result)}{_streams(result)}"


def _streams(result: AuditResult) -> str:
    streams = result.streams
    if streams is None:
        return ""
    is_history = streams.num_streams == 1
    last, parts = streams.blocks[-1], [" A history" if is_history else f" {streams.num_streams} streams"]
    if last.state.similarity is not None and math.isfinite(last.state.similarity):
        parts.append(
            f"after the last block two of them have a cosine of {_number(last.state.similarity)} on average, "
            f"as many as {_number(_or_nan(last.state.effective_streams))} unlike ones"
        )
    if last.product_gain is not None and last.product_distance is not None:
        parts.append(
            f"the product of all mixing matrices is {_number(last.product_distance)} from the identity, its "
            f"largest singular value {_number(last.product_gain)}"
        )
    elif not is_history:
        parts.append("how they are mixed could not be read exactly")
    shares = [(r.embed_share, r.effective_sources) for r in last.reads if r.embed_share is not None]
    if shares:
        share, sources = shares[-1]
        parts.append(
            f"the last sublayer has {_percent(_or_nan(share))} of its weight on the embedding and reads as "
            f"from {_number(_or_nan(sources))} equal writes"
        )
    return "; ".join([f"{parts[0]}: {parts[1]}", *parts[2:]]) + "." if len(parts) > 1 else ""


def _identity(result: AuditResult) -> str | None:
    shares = [_or_nan(b.nearest_embedding) for b in result.blocks]
    if result.identity is None or not math.isfinite(shares[-1]):
        return None
    text = (
        f"A token's own embedding is the nearest to the stream at {_percent(result.identity.nearest_before)} "
        f"of {result.identity.tokens:,} positions before block 0, {_percent(shares[0])} after it"
    )
    if len(shares) > 1:
        text += f" and {_percent(shares[-1])} after the last block"
        lost = next((i for i, share in enumerate(shares) if share < 0.5), None)
        text += f"; below half first after block {lost}" if lost else ""
    text += f" (always naming the commonest token: {_percent(result.identity.majority)})"
    return f"{text}{_carried(result.identity)}.{_probed(result)}"


def _probed(result: AuditResult) -> str:
    """Say what linear probes name on held-out text, at the first and the last state."""
    probe = result.probe
    if probe is None or not probe.figures or not math.isfinite(probe.figures[0].text):
        return ""
    at = {(f.state, f.offset): f for f in probe.figures}
    top = max(state for state, _ in at)
    baselines = {b.offset: b for b in probe.baselines}
    parts: list[str] = []
    for offset, words in ((0, "the token in place"), (1, "the one before it")):
        low, high = at[0, offset], at[top, offset]
        aside = f"commonest token {_percent(baselines[offset].text)}"
        if offset == 0 and math.isfinite(low.types):
            aside += f"; words it was not trained on {_percent(low.types)} and {_percent(high.types)}"
        elif math.isfinite(baselines[offset].bigram):
            aside += f", bigram {_percent(baselines[offset].bigram)}"
        parts.append(f"{words} at {_percent(low.text)} and {_percent(high.text)} ({aside})")
    return (
        " On held-out text a linear probe of the stream before block 0 and after the last block names "
        f"{', '.join(parts)}."
    )


def _carried(identity: Identity) -> str:
    share, final = identity.carried_share, _or_nan(identity.final_share)
    text = f"{_percent(final)} of the final state" if math.isfinite(final) else ""
    if share is None or not math.isfinite(share):
        return f"; the embedding is {text}" if text else ""
    carried = f"{_percent(share)} of the embedding is carried to the top"
    if share > 1.005:
        carried = f"the embedding is carried to the top x{_number(share)}"
    return f"; {carried}" + (f", and is {text}" if text else "")


def _signals(result: AuditResult) -> str | None:
    gradient = result.gradient
    if gradient is None or not math.isfinite(gradient.bottom_to_top):
        return None
    norms = [(_or_nan(b.gradient_norm), b.block) for b in result.blocks]
    if not all(math.isfinite(norm) for norm, _ in norms):
        return None
    largest, block = max(norms)
    return (
        f"The gradient of the loss with respect to the stream is {_number(gradient.norm_before)} a token "
        f"before block 0 and {_number(norms[-1][0])} after the last block, a ratio of "
        f"{_number(gradient.bottom_to_top)}; "
        f"of all blocks it is largest after block {block} ({_number(largest)})."
    )


def _answer(result: AuditResult) -> str | None:
    said = [text for text in (_formed(result), _attributed(result)) if text]
    return " ".join(said) or None


def _attributed(result: AuditResult) -> str | None:
    """Whose parts of a logit are largest."""
    found = result.attribution
    if found is None or not math.isfinite(found.before):
        return None
    logit = f"the logit of {found.token!r}"
    if found.against is not None:
        logit = f"{found.token!r} over {found.against!r}"
    size = f"{_signed(found.before)} logits"
    if found.transforms:
        size += f" ({_signed(found.after)} after {', '.join(found.transforms)})"
    largest = sorted(found.parts, key=lambda part: -abs(part.logit))[:3]
    parts = ", ".join(f"{part.label} {_signed(part.logit)}" for part in largest)
    rest = sum(part.logit for part in found.parts) - sum(part.logit for part in largest)
    return (
        f"At position {found.position} {logit} is {size}, the sum of {len(found.parts)} parts: {parts}, the "
        f"others {_signed(rest)}."
    )


def _formed(result: AuditResult) -> str | None:
    if not any(b.lens_top1 is not None for b in result.blocks):
        return None
    agree = [_or_nan(b.lens_top1) for b in result.blocks]
    last = len(agree) - 1
    if not math.isfinite(agree[last]):
        return None
    if last == 0:
        return "There is one block, and what it leaves, read out with the model's own head, is the answer."
    settled = _from_then_on(agree, lambda share: share >= 0.5)
    where = f"from block {settled} of {last + 1} on" if settled < last else "only after the last block"
    text = (
        "Read out with the model's own head, the stream has the final top word at half of the positions "
        f"or more {where}"
    )
    kl = _or_nan(result.blocks[-2].lens_kl)
    if math.isfinite(kl):
        text += (
            f"; one block before the end KL(final || lens) is {_number(kl)} nats and "
            f"{_percent(agree[-2])} of the top words agree"
        )
    return text + _depth(result) + "."


def _depth(result: AuditResult) -> str:
    depth = result.effective_depth
    if depth is None or not math.isfinite(depth.area):
        return ""
    places = [
        f"{_percent(c.threshold)} at block {c.first}"
        + (f" (for good at {c.settled})" if c.settled != c.first else "")
        for c in depth.crossings
        if c.first is not None
    ]
    return f"; KL falls below shares of its largest: {', '.join(places)}; area {_number(depth.area)}"


def _damage(result: AuditResult) -> str | None:
    damage = result.damage
    if damage is None:
        return None
    found = sorted((b.kl, b.block, b.top1) for b in damage.blocks if math.isfinite(b.kl))
    parts: list[str] = []
    if found:
        (least, mildest, kept), (most, worst, left) = found[0], found[-1]
        alike = len(found) > 1 and most <= 1.001 * least  # one block applied many times
        parts.append(
            f"{'every block is missed alike' if alike else f'block {worst} is missed most'} "
            f"(KL {_number(most)} nats, {_percent(left)} of the top words stay)"
        )
        if len(found) > 1 and not alike:
            parts.append(f"block {mildest} least ({_number(least)}, {_percent(kept)})")
    grown = [b.change[-1] / b.change[0] for b in damage.blocks if len(b.change) > 1 and b.change[0] > 0]
    if grown and all(map(math.isfinite, grown)):
        num_more = sum(ratio > 1 for ratio in grown)
        parts.append(
            f"on the way to the top the relative change grows for {num_more} of {len(grown)} blocks, x"
            f"{_number(sorted(grown)[len(grown) // 2])} at the median"
        )
    if not parts:
        return None
    stopped = "" if damage.finished else " (stopped before the end)"
    how = "Made to write nothing" if damage.silenced else "Skipped"
    return f"{how} one at a time on {damage.tokens:,} tokens{stopped}: {'; '.join(parts)}."


def _removal(result: AuditResult) -> str | None:
    measured = _measured_removal(result)
    if measured is not None:
        return measured
    ranked = sorted((b.block_influence, b.block) for b in result.blocks if math.isfinite(b.block_influence))
    if not ranked:
        return None
    if len(result.blocks) == 1:
        return f"There is one block; its influence (1 - cosine) is {_number(ranked[0][0])}."
    least = ", ".join(str(block) for _, block in ranked[:3])
    text = f"Least influence (1 - cosine): block{'s' if len(ranked) > 1 else ''} {least}"
    best = [
        (int(b["blocks"]), int(b["start"]))
        for b in result.angular_distance.best
        if b["blocks"] in (2, 4, 8) and b["blocks"] < len(result.blocks) and math.isfinite(b["distance"])
    ]
    if best:
        runs = ", ".join(f"{start}-{start + n - 1}" for n, start in best)
        text += f"; least angular distance: {'runs' if len(best) > 1 else 'run'} {runs}"
    switching = _switches(result)
    if switching:
        verb = "creates or erases" if len(switching) == 1 else "create or erase"
        text += f"; {_ranges(switching)} {verb} a massive activation, so influence misjudges them"
    return text + ". These scores are guesses until the loss without the blocks is measured."


def _measured_removal(result: AuditResult) -> str | None:
    """Cheap scores against the measured loss, or None where none was measured of all blocks."""
    damage = result.damage
    if damage is None or not damage.finished or len(damage.blocks) < 2:
        return None
    losses = [_or_nan(b.removal_loss) for b in damage.blocks]
    influences = [b.block_influence for b in result.blocks]
    if not all(map(math.isfinite, [*losses, *influences])):
        return None
    by_loss, by_influence = (sorted(range(len(x)), key=x.__getitem__) for x in (losses, influences))
    least = ", ".join(f"{b} ({losses[b]:+.3f})" for b in by_loss[:3])
    text = f"Least loss without it, nats a token on {damage.tokens:,} tokens: block {least}"
    guesses = [
        f"{name} {correlation:.2f}"
        for name, correlation in (
            ("influence (1 - cosine)", damage.influence_correlation),
            ("angular distance", damage.angle_correlation),
        )
        if correlation is not None
    ]
    text += f"; rank correlation of the loss with {' and with '.join(guesses)}" if guesses else ""
    names = {"block_influence": "least influence", "angular_distance": "least angular distance"}
    plans = [
        f"{names.get(plan.score, 'least loss each')} ({_ranges(plan.blocks)}) {plan.removal_loss:+.3f}"
        for plan in damage.plans
    ]
    text += f"; {len(damage.plans[0].blocks)} together, by {', '.join(plans)}" if plans else ""
    switching = [
        f"block {b} ({losses[b]:+.3f}; from the least {by_influence.index(b) + 1}. of {len(losses)} by "
        f"influence, {by_loss.index(b) + 1}. by loss)"
        for b in _switches(result)
    ]
    verb = "creates or erases" if len(switching) == 1 else "create or erase"
    text += f"; {', '.join(switching)} {verb} a massive activation" if switching else ""
    return text + "."


def _switches(result: AuditResult) -> list[int]:
    """Return the blocks that at least double or halve a massive largest activation."""
    sizes = [b.max_abs for b in result.blocks]
    massive = {o.block for o in result.outliers if o.massive}
    return [
        i
        for i in range(1, len(sizes))
        if ({i, i - 1} & massive) and (sizes[i] >= 2 * sizes[i - 1] or 2 * sizes[i] <= sizes[i - 1])
    ]


def _from_then_on(values: Sequence[float], holds: Callable[[float], bool]) -> int:
    first = len(values)
    for index in reversed(range(len(values))):
        if not holds(values[index]):
            break
        first = index
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


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _percent(share: float) -> str:
    if abs(share) >= 0.1 or share == 0:
        return f"{100 * share:.0f}%"
    return f"{round(100 * share, 1) + 0.0:.1f}%"  # a negative share that rounds to zero has no sign


def _signed(value: float) -> str:
    return ("+" if value >= 0 else "") + _number(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
