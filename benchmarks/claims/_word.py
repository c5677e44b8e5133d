"""Claims 1, 2 and 7: is the word still there, does the sum balance, how large do the numbers grow."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from torch import Tensor

from benchmarks.claims._page import Claim, Table, Verdict, spread
from benchmarks.claims._towers import CONNECTIONS, fresh, run
from mainstem.connections import StreamModule
from mainstem.observe import tower_ledger
from mainstem.tower import Tower

Towers = dict[str, tuple[Tower, Tensor]]
"""What is measured on: a name such as ``with, trained`` -> the tower and its token ids."""

SEEDS = (0, 1, 2)
DEPTHS = (12, 48, 96)


def nearest(states: Tensor, embedding: Tensor, ids: Tensor) -> float:
    """Share of positions whose own token's embedding is the nearest one by cosine (Feucht et al. 2024,
    arXiv 2406.20086).

    Args:
        states: ``[batch, pos, width]``; position 0 is left out.
        embedding: ``[vocabulary, width]``.
        ids: ``[batch, pos]``.
    """
    h = torch.nn.functional.normalize(states[:, 1:].flatten(0, 1), dim=-1)
    found = (h @ torch.nn.functional.normalize(embedding, dim=-1).T).argmax(-1)
    return float((found == ids[:, 1:].flatten()).float().mean())


def probed(states: Tensor, embedding: Tensor, ids: Tensor, *, new_types: bool = False) -> float:
    """The same after the best linear map to the embedding, where the map was not fitted.

    Ridge regression from state to embedding; accuracy of the nearest embedding against the whole vocabulary.
    Fitted on the first three quarters of the windows and read on the last; with ``new_types``, fitted on the
    positions of one half of the token types and read on those of the other.
    """
    x, y = states[:, 1:].double(), ids[:, 1:]
    x = (x - x.mean((0, 1))) / x.std().clamp_min(1e-30)
    fit = torch.zeros_like(y, dtype=torch.bool)
    if new_types:
        types = y.unique()
        order = torch.randperm(len(types), generator=torch.Generator().manual_seed(0))
        fit = torch.isin(y, types[order[::2]])
    else:
        fit[: len(y) * 3 // 4] = True
    target = embedding.double()
    gram = x[fit].T @ x[fit]
    ridge = (1e-3 * gram.diagonal().mean() + 1e-12) * torch.eye(x.shape[-1], dtype=x.dtype)
    weights = torch.linalg.solve(gram + ridge, x[fit].T @ target[y[fit]])
    guess = torch.nn.functional.normalize(x[~fit] @ weights, dim=-1)
    found = (guess @ torch.nn.functional.normalize(target, dim=-1).T).argmax(-1)
    return float((found == y[~fit]).float().mean())


def likeness(states: Tensor) -> float:
    """Mean cosine between the states of two positions of a window that hold different tokens."""
    h = torch.nn.functional.normalize(states[:, 1:].double(), dim=-1)
    n = h.shape[1]
    return float(((h @ h.transpose(1, 2)).sum((1, 2)) - n).mean() / (n * (n - 1)))


def carried_share(tower: Tower, ids: Tensor) -> float:
    """Size of what the ledger says is left of the embedding at the top, relative to the embedding."""
    book = tower_ledger(tower, ids)
    return float(book["embed"].norm() / book.embedded.norm())


def word(trained: Towers, plain: Tensor) -> Claim:
    """Claim 1. *Kept* holds where, with residuals, a probe reads at the top at least half of the words that
    it reads at the bottom; *destroyed*, where without them it reads no more than twice what guessing the
    commonest does; each at initialisation and trained."""
    majority = Counter(plain[:, 1:].flatten().tolist()).most_common(1)[0][1] / plain[:, 1:].numel()
    rows: list[list[str | float]] = []
    kept: dict[str, bool] = {}
    lost: dict[str, bool] = {}
    cases: list[tuple[str, str, list[tuple[Tower, Tensor]]]] = []
    for name, connection in CONNECTIONS.items():
        for depth in DEPTHS:
            for norms in (True, False):
                towers = [(fresh(connection, depth, seed, norms=norms), plain) for seed in SEEDS]
                cases.append((name, f"{depth} blocks, start{'' if norms else ', no norms'}", towers))
        if f"{name}, trained" in trained:
            cases.append((name, "96 blocks, trained", [trained[f"{name}, trained"]]))
    for name, what, towers in cases:
        figures: list[list[float]] = []
        for tower, ids in towers:
            seen = run(tower, ids)
            table = tower.token_embedding.weight.detach()
            middle, top = seen.states[len(seen.states) // 2], seen.states[-1]
            figures.append(
                [
                    probed(seen.states[0], table, ids),
                    probed(middle, table, ids),
                    probed(top, table, ids),
                    probed(top, table, ids, new_types=True),
                    nearest(top, table, ids),
                    likeness(seen.states[0]),
                    likeness(top),
                    carried_share(tower, ids[:1]),
                ]
            )
        columns = list(zip(*figures, strict=True))
        rows.append([name, what, *(spread(column) for column in columns)])
        if name == "with":
            kept[what] = sum(columns[2]) >= sum(columns[0]) / 2
        else:
            lost[what] = sum(columns[2]) / len(towers) <= 2 * majority
    buried = [what for what, ok in kept.items() if not ok]
    living = [what for what, ok in lost.items() if not ok]
    verdict: Verdict = "holds" if not buried and not living else "holds only if"
    if len(buried) == len(kept) or len(living) == len(lost):
        verdict = "does not hold"
    conditions = [f"what is written does not bury the word ({'; '.join(buried)})"] if buried else []
    conditions += [f"the stairs are long enough ({'; '.join(living)})"] if living else []
    return Claim(
        number=1,
        text="Without the elevator the original word is destroyed; with it, it is kept",
        verdict=verdict,
        condition=" and ".join(conditions),
        finding=(
            "Share of words that a probe reads at the top: "
            + ", ".join(f"{row[4]} ({row[0]}, {row[1]})" for row in rows if "96 blocks" in str(row[1]))
            + f"; guessing the commonest gives {majority:.3f}. With residuals the embedding is carried "
            "whole (its row in the ledger has its full size) and not at all without: what is left of a "
            "word there went through every branch. Carried is not the same as easy to read: what the "
            "branches write lies on top of it."
        ),
        tables=[
            Table(
                caption="Share of positions whose word is found among the vocabulary. *probe*: a linear "
                "map, fitted on "
                "other windows, then the nearest embedding; *new words*: fitted on other token types; "
                "*nearest*: no "
                "map. *likeness*: mean cosine between positions. *carried*: size of the embedding's row in "
                "the "
                f"ledger, of the embedding's. {len(SEEDS)} seeds at the start, mean ± half the range.",
                header=[
                    "residuals", "tower", "probe, bottom", "probe, middle", "probe, top", "new words, top",
                    "nearest, top", "likeness, bottom", "likeness, top", "carried",
                ],
                rows=rows,
            )
        ],
    )  # fmt: skip


def ledger(trained: Towers, plain: Tensor) -> Claim:
    """Claim 2. Holds where the rows of the ledger sum to the final state to 1e-5 (fp32) and 1e-12 (fp64)."""
    rows: list[list[str | float]] = []
    worst = {torch.float32: 0.0, torch.float64: 0.0}
    cases: list[tuple[str, Tower, Tensor]] = []
    for name, connection in CONNECTIONS.items():
        cases.append((f"{name}, 96 blocks, start", fresh(connection, 96, 0), plain))
        if f"{name}, trained" in trained:
            cases.append((f"{name}, 96 blocks, trained", *trained[f"{name}, trained"]))
    for what, tower, ids in cases:
        line: list[str | float] = [what]
        for dtype in (torch.float32, torch.float64):
            tower.to(dtype)
            book = tower_ledger(tower, ids[:2])
            worst[dtype] = max(worst[dtype], book.error)
            line.append(book.error)
        sizes = book.rows.flatten(1).norm(dim=1)
        line.append(float((sizes > 1e-9 * sizes.max()).sum()))
        tower.float()
        rows.append(line)
    holds = worst[torch.float32] < 1e-5 and worst[torch.float64] < 1e-12
    return Claim(
        number=2,
        text="Each room only adds: what arrives at the top is the sum of all that was written",
        verdict="holds" if holds else "does not hold",
        condition="",
        finding=(
            f"The embedding and 192 writes sum to the final state to {worst[torch.float32]:.1e} in fp32 and "
            f"{worst[torch.float64]:.1e} in fp64. Without residuals the sum balances too, but has one "
            f"term: the last write."
        ),
        tables=[
            Table(
                caption="Relative error of the sum of the ledger's rows, and how many of its 193 rows are "
                "not zero.",
                header=["tower", "fp32", "fp64", "rows in the sum"],
                rows=rows,
            )
        ],
    )


def growth(trained: Towers, plain: Tensor) -> Claim:
    """Claim 7. Holds where the stream's RMS grows from bottom to top with residuals and norms, at the start
    and when trained, and where, without norms, it grows more."""
    rows: list[list[str | float]] = []
    ratios: dict[str, float] = {}
    cases: list[tuple[str, Tower, Tensor]] = [
        (
            f"{name}, {depth} blocks, start{'' if norms else ', no norms'}",
            fresh(c, depth, 0, norms=norms),
            plain,
        )
        for name, c in CONNECTIONS.items()
        for depth in DEPTHS
        for norms in (True, False)
    ]
    cases += [(f"{name}, 96 blocks", tower, ids) for name, (tower, ids) in trained.items()]
    for what, tower, ids in cases:
        seen = run(tower, ids)
        sizes = [float(state.double().square().mean().sqrt()) for state in seen.states]
        peak = max(float(state.abs().max()) for state in seen.states)
        half = fp16_result(tower, ids, seen.logits)
        ratios[what] = sizes[-1] / sizes[0]
        rows.append(
            [what, sizes[0], sizes[len(sizes) // 2], sizes[-1], ratios[what], peak, 65504 / peak, half]
        )
    at_start = [ratios[f"with, {depth} blocks, start"] for depth in DEPTHS]
    bare = [ratios[f"with, {depth} blocks, start, no norms"] for depth in DEPTHS]
    learned = ratios.get("with, trained, 96 blocks", float("nan"))
    grows = min(at_start) > 1 and (learned != learned or learned > 1)
    more = all(b > a for a, b in zip(at_start, bare, strict=True))
    return Claim(
        number=7,
        text="The numbers in the elevator grow with every floor; normalization keeps that in hand",
        verdict="holds" if grows and more else ("holds only if" if grows or more else "does not hold"),
        condition=""
        if grows and more
        else (
            "the branches have learned to write: at GPT-2's initial values, whose writes are scaled by "
            "1/sqrt(2L), an un-normed branch writes less than a normed one, for it reads a small embedding"
            if grows
            else "norms are left out"
        ),
        finding=(
            f"Top over bottom RMS with residuals and norms at the start: "
            f"{', '.join(f'{r:.3g}' for r in at_start)} at "
            f"{', '.join(map(str, DEPTHS))} blocks; without norms {', '.join(f'{r:.3g}' for r in bare)}; "
            f"trained, 96 "
            f"blocks: {learned:.3g}. fp16 holds 65,504; the last columns say how far that is, and what an "
            f"fp16 pass gave."
        ),
        tables=[
            Table(
                caption="RMS of the stream before the first block, in the middle and at the top; its "
                "largest entry; the "
                "headroom to fp16's limit; and the largest relative error of the logits when all of it "
                "runs in fp16.",
                header=["tower", "bottom", "middle", "top", "top/bottom", "peak", "headroom", "in fp16"],
                rows=rows,
            )
        ],
    )


@torch.no_grad()
def fp16_result(tower: Tower, ids: Tensor, exact: Tensor) -> str:
    """Run in fp16, stream and all; return the relative error of the logits, or what became of them."""
    half = copy.deepcopy(tower)
    for module in half.modules():
        if isinstance(module, StreamModule):
            module.keep_stream_in(None)
    rounded = run(half.half(), ids).logits.float()
    if not bool(torch.isfinite(rounded).all()):
        return "not finite"
    return f"{float((rounded - exact).norm() / exact.norm()):.1e}"
