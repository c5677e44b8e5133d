"""Claims 3 and 6: what a bad floor does, and where a write comes from."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.claims._page import Claim, Table, Verdict
from benchmarks.claims._towers import CONNECTIONS, Pass, fresh, kl, nll, run
from benchmarks.claims._word import Towers
from mainstem.tower import Attention, Tower
from mainstem.tower._places import rotate

BROKEN = (0, 1, 2, 4, 8, 16, 32, 48, 64, 80, 88, 94, 95)
"""Floors that are broken, of 96."""


def noise(block: int, size: float) -> Callable[[int, str, Tensor], Tensor]:
    """Add to both writes of a block Gaussian noise, ``size`` times the write's norm at each position."""
    generator = torch.Generator().manual_seed(block)

    def change(here: int, kind: str, out: Tensor) -> Tensor:
        if here != block:
            return out
        draw = torch.randn(out.shape, generator=generator)
        return out + size * draw * (out.norm(dim=-1, keepdim=True) / draw.norm(dim=-1, keepdim=True))

    return change


def gone(block: int) -> Callable[[int, str, Tensor], Tensor]:
    """Let a block write nothing."""
    return lambda here, kind, out: torch.zeros_like(out) if here == block else out


def moved(before: Pass, after: Pass, at: int) -> float:
    """Median over positions of ``|x' - x| / |x|`` of the state before block ``at``."""
    x, y = before.states[at].double(), after.states[at].double()
    return float(((y - x).norm(dim=-1) / x.norm(dim=-1).clamp_min(1e-30)).median())


def bad_floor(trained: Towers, plain: Tensor) -> Claim:
    """Claim 3. Holds where, in the trained tower with residuals, noise as large as the write moves the state
    right after by less than it moves it without residuals for every broken floor, and raises the loss by less
    than 0.1 nats for at least nine floors in ten; and the same noise leaves less than half of the top state
    alone without."""
    rows: list[list[str | float | int]] = []
    summary: dict[str, dict[str, list[float]]] = {}
    cases = [(f"{name}, start", fresh(connection, 96, 0), plain) for name, connection in CONNECTIONS.items()]
    cases += [(name, tower, ids) for name, (tower, ids) in trained.items()]
    for what, tower, ids in cases:
        intact = run(tower, ids)
        base = nll(intact.logits, ids)
        figures: dict[str, list[float]] = {"next": [], "top": [], "kl": [], "loss": [], "gone": []}
        for block in BROKEN:
            broken = run(tower, ids, noise(block, 1.0))
            figures["next"].append(moved(intact, broken, block + 1))
            figures["top"].append(moved(intact, broken, 96))
            figures["kl"].append(kl(intact.logits, broken.logits))
            figures["loss"].append(nll(broken.logits, ids) - base)
            figures["gone"].append(nll(run(tower, ids, gone(block)).logits, ids) - base)
            rows.append([what, block, *(figures[name][-1] for name in figures)])
        summary[what] = figures
    learned = summary.get("with, trained", summary["with, start"])
    stairs = summary.get("without, trained", summary["without, start"])
    cheap = [d for d in learned["loss"] if d < 0.1]
    ignored = len(cheap) >= 0.9 * len(BROKEN)
    safer = all(a < b for a, b in zip(learned["next"], stairs["next"], strict=True))
    verdict: Verdict = (
        "holds" if ignored and safer else ("holds only if" if safer or cheap else "does not hold")
    )
    dear = [b for b, d in zip(BROKEN, learned["loss"], strict=True) if d >= 0.1]
    return Claim(
        number=3,
        text="A floor that gives bad advice can be ignored",
        verdict=verdict,
        condition="" if verdict == "holds" else f"the floor is none of {', '.join(map(str, dear))}",
        finding=(
            f"Noise as large as what floor k writes moves the state above it by "
            f"{statistics.median(learned['next']):.3g} "
            f"of its size with residuals (median over floors, trained) and by "
            f"{statistics.median(stairs['next']):.3g} "
            f"without; at the top by {statistics.median(learned['top']):.3g} and "
            f"{statistics.median(stairs['top']):.3g}. "
            f"The loss rises by {statistics.median(learned['loss']):.3g} nats (median; at most "
            f"{max(learned['loss']):.3g}, floor {BROKEN[learned['loss'].index(max(learned['loss']))]}). "
            f"The tower "
            "without residuals has no loss to lose, so its loss is no evidence."
        ),
        tables=[
            Table(
                caption="Floor k broken by noise of the size of its write, 96 blocks. *next*, *top*: how "
                "far the state moves "
                "(median over positions, relative); *KL*, *dNLL*: at the logits; *silent*: dNLL when the "
                "floor writes nothing.",
                header=["tower", "floor", "next", "top", "KL", "dNLL", "silent"],
                rows=rows,
            )
        ],
    )


def from_others(attention: Attention, read: Tensor, tower: Tower) -> Tensor:
    """Share of an attention's write that comes from other positions, ``[batch, pos]``.

    With the weights of the pass, the write is a sum over the positions looked at; the share is the norm of
    what the others gave over that plus the norm of what the position gave itself.
    """
    places = tower.places(torch.arange(read.shape[1])[None])
    place = next(iter(places.values()))
    q, k, v = (
        projection(read).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if place.rotation is not None:
        q, k = rotate(q, place.rotation), rotate(k, place.rotation)
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    weights = (q @ k.transpose(-1, -2) * attention.scale).masked_fill(~mask, float("-inf")).softmax(-1)
    own = torch.diag_embed(weights.diagonal(dim1=-2, dim2=-1))

    def write(w: Tensor) -> Tensor:
        return F.linear((w @ v).transpose(1, 2).flatten(2), attention.out_proj.weight).norm(dim=-1)

    return write(weights - own) / (write(weights - own) + write(own)).clamp_min(1e-30)


@torch.no_grad()
def gather(trained: Towers, plain: Tensor) -> Claim:
    """Claim 6. *Attention gathers* holds where more than half of its writes come from other positions in most
    blocks. *The feed-forward refines* holds where its writes, together, lower the logit lens' loss more than
    attention's."""
    rows: list[list[str | float | int]] = []
    facts: dict[str, tuple[float, float, float, float]] = {}
    cases = [("with, start", fresh("pre_norm", 96, 0), plain)]
    cases += [(name, tower, ids) for name, (tower, ids) in trained.items()]
    for what, tower, ids in cases:
        seen = run(tower, ids)
        shares: list[float] = []
        drops = {"attn": 0.0, "mlp": 0.0}
        foreign = 0.0
        state = seen.states[0]
        before = lens(tower, state, ids)
        for (block, kind, read, update), module in zip(
            seen.writes, (m for _, _, parts in tower.sublayers() for m in parts.values()), strict=True
        ):
            if isinstance(module, Attention):
                shares.append(float(from_others(module, read, tower)[:, 1:].mean()))
            else:
                alone = module(read[:, -1:])
                foreign = max(
                    foreign, float((alone - update[:, -1:]).norm() / update[:, -1:].norm().clamp_min(1e-30))
                )
            if what.startswith("with,"):
                state = state + update
                after = lens(tower, state, ids)
                drops[kind] += before - after
                before = after
            if block % 16 == 0 and kind == "attn":
                rows.append([what, block, shares[-1]])
        facts[what] = (
            statistics.mean(shares),
            sum(s > 0.5 for s in shares) / len(shares),
            drops["attn"],
            drops["mlp"],
        )
        rows.append([what, "all", facts[what][0]])
    key = "with, trained" if "with, trained" in facts else "with, start"
    mean, most, attn, mlp = facts[key]
    gathers, refines = most > 0.5, mlp > attn
    verdict: Verdict = (
        "holds" if gathers and refines else ("holds only if" if gathers or refines else "does not hold")
    )
    missing = (
        "refining is left out: attention's writes lower the loss more" if gathers else "gathering is left out"
    )
    return Claim(
        number=6,
        text="Attention gathers from other words, the feed-forward refines",
        verdict=verdict,
        condition="" if verdict == "holds" else missing,
        finding=(
            f"Of what attention writes {mean:.0%} comes from other positions (trained, mean over blocks; "
            f"more than half "
            f"in {most:.0%} of the blocks); of what a feed-forward writes, nothing: computed from its own "
            f"position alone "
            f"it is the same to {foreign:.0e}. Read out after each write, attention's lower the loss by "
            f"{attn:.2f} nats in "
            f"all and the feed-forwards' by {mlp:.2f}."
        ),
        tables=[
            Table(
                caption="Share of attention's write that comes from other positions (norms of the two "
                "parts, weights of the "
                "pass), mean over positions.",
                header=["tower", "block", "from others"],
                rows=rows,
            ),
            Table(
                caption="Sum over blocks of the fall of the logit lens' loss from before to after a write, "
                "nats a token.",
                header=["tower", "attention", "feed-forward"],
                rows=[
                    [what, values[2], values[3]] for what, values in facts.items() if what.startswith("with,")
                ],
            ),
        ],
    )


def lens(tower: Tower, state: Tensor, ids: Tensor) -> float:
    """Loss of the next token read out of a state by the tower's own end."""
    return nll(tower.head(tower.trunk.leave(state)), ids)
