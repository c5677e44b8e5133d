"""Claim 8: a word's meaning by its context, in a real model."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.claims._page import Claim, Table, Verdict
from mainstem.sources import load_model

SENTENCES = {
    "river": (
        "The children sat on the grassy bank and watched the river",
        "After the flood the river had washed away its bank near the mill",
        "He pulled the canoe onto the muddy bank beside the stream",
        "Willows grew along the steep bank of the river",
        "The otter slid down the wet bank into the water",
        "We walked for miles along the bank of the Thames",
        "Fishermen stood on the bank casting their lines into the current",
        "The boat drifted toward the far bank under the trees",
    ),
    "money": (
        "She deposited her salary at the bank before noon",
        "The bank raised its interest rate on every loan",
        "He asked the bank for a mortgage on the house",
        "The robbers fled from the bank with the cash",
        "My account at the bank was charged a fee",
        "The central bank printed more money during the crisis",
        "A clerk at the bank counted the notes twice",
        "The bank refused to lend the company any credit",
    ),
}


@torch.no_grad()
def states_of_bank(model: object, tokenizer: object, sentence: str) -> Tensor:
    """Return the state at `` bank`` before the first block and after each, ``[block + 1, width]``."""
    ids = tokenizer(sentence, return_tensors="pt")["input_ids"]  # pyright: ignore
    (place,) = [i for i, t in enumerate(ids[0]) if tokenizer.decode([int(t)]).strip() == "bank"]  # pyright: ignore
    kept: list[Tensor] = []
    layers = model.model.layers  # pyright: ignore
    handles = [layers[0].register_forward_pre_hook(lambda _, args: kept.append(args[0][0, place].double()))]
    for layer in layers:
        handles.append(
            layer.register_forward_hook(
                lambda _m, _a, out: kept.append(
                    (out[0] if isinstance(out, tuple) else out)[0, place].double()
                )
            )
        )
    model(ids)  # pyright: ignore
    for handle in handles:
        handle.remove()
    return torch.stack(kept)


def meaning() -> Claim:
    """Claim 8. Holds where the two uses are the same at the bottom, and at their most distinct depth every
    one of the 16 sentences is nearer to the mean of its own use (itself left out) than to the other's, with a
    shuffle test below 0.01."""
    loaded = load_model("smollm2")
    found = {
        use: torch.stack([states_of_bank(loaded.model, loaded.tokenizer, s) for s in sentences])
        for use, sentences in SENTENCES.items()
    }
    everything = torch.cat(list(found.values()))
    first = len(SENTENCES["river"])
    rows: list[list[float | int]] = []
    scores: list[tuple[float, int, float]] = []
    for depth in range(everything.shape[1]):
        h = everything[:, depth]
        right = nearer_to_own(h, first)
        within, across = distances(h, first)
        rows.append([depth, within, across, across / within if within > 0 else 1.0, right])
        scores.append((across / within if within > 0 else 1.0, depth, right))
    ratio, depth, right = max(scores)
    p = shuffled(everything[:, depth], first, ratio)
    same = bool(torch.equal(everything[:, 0], everything[:1, 0].expand_as(everything[:, 0])))
    best_right = max(score[2] for score in scores)
    verdict: Verdict = (
        "holds" if same and right == 16 and p < 0.01 else ("holds only if" if p < 0.01 else "does not hold")
    )
    return Claim(
        number=8,
        text="A word changes its meaning by its context on the way up",
        verdict=verdict,
        condition=""
        if verdict == "holds"
        else f"most uses are meant: {right} of 16 are nearer to their own kind there",
        finding=(
            f"*bank* enters SmolLM2-135M as one and the same vector in all 16 sentences. After block "
            f"{depth - 1} the two uses "
            f"are {ratio:.3g} times as far apart as two sentences of one use (cosine distance; shuffled "
            f"labels reach that in a "
            f"share {p:.2g} of 10,000 draws), and {right} of 16 lie nearer to their own kind (at most "
            f"{best_right}, at any depth)."
        ),
        tables=[
            Table(
                caption="State of the token *bank* in 8 sentences by a river and 8 with money, "
                "SmolLM2-135M-Instruct: mean cosine "
                "distance within a use and across, by depth (0: the embedding); sentences nearer to the "
                "mean of their own use.",
                header=["depth", "within", "across", "across/within", "nearer to own, of 16"],
                rows=rows,
            )
        ],
    )


def distances(h: Tensor, first: int) -> tuple[float, float]:
    """Mean cosine distance of pairs of one use, and of pairs of both."""
    n = torch.nn.functional.normalize(h, dim=-1)
    d = 1 - n @ n.T
    own = torch.zeros_like(d, dtype=torch.bool)
    own[:first, :first] = own[first:, first:] = True
    pairs = ~torch.eye(len(h), dtype=torch.bool)
    return float(d[own & pairs].mean().clamp_min(0)), float(d[~own].mean().clamp_min(0))


def nearer_to_own(h: Tensor, first: int) -> int:
    """Count the sentences nearer to the mean of their own use, themselves left out, than to the other."""
    n = torch.nn.functional.normalize(h, dim=-1)
    count = 0
    for i in range(len(h)):
        own = [j for j in range(len(h)) if (j < first) == (i < first) and j != i]
        other = [j for j in range(len(h)) if (j < first) != (i < first)]
        likeness = torch.nn.functional.cosine_similarity
        count += bool(likeness(n[i], n[own].mean(0), dim=0) > likeness(n[i], n[other].mean(0), dim=0) + 1e-9)
    return count


def shuffled(h: Tensor, first: int, ratio: float, draws: int = 10_000) -> float:
    """Share of shuffles of the two labels that give a ratio at least as large."""
    n = torch.nn.functional.normalize(h, dim=-1)
    d = 1 - n @ n.T
    generator = torch.Generator().manual_seed(0)
    reached = 0
    for _ in range(draws):
        order = torch.randperm(len(h), generator=generator)
        a, b = order[:first], order[first:]
        within = (d[a][:, a].sum() + d[b][:, b].sum()) / (first * (first - 1) + len(b) * (len(b) - 1))
        reached += bool(d[a][:, b].mean() / within >= ratio)
    return (reached + 1) / (draws + 1)
