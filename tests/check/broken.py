"""Small models, one clean and each of the others with one fault, for the suite to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mainstem.check import ResidualStack

VOCAB, WIDTH = 23, 16


class CausalMean(nn.Module):
    """Mixes tokens causally: the mean over all positions so far, then a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return self.out(x.cumsum(1) / counts)


class FeedForward(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Block(nn.Module):
    def __init__(self, extra: Callable[[], nn.Module] | None = None):
        super().__init__()
        self.mix_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.feed = CausalMean(), FeedForward()
        self.extra = extra() if extra is not None else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.mix_norm(x))
        return self.extra(x + self.feed(self.feed_norm(x)))


class Clean(nn.Module):
    """A Pre-LN decoder with tied embeddings and dropout."""

    def __init__(self, depth: int, extra: Callable[[], nn.Module] | None = None):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(extra) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def clean(depth: int) -> nn.Module:
    return Clean(depth)


class LookAhead(nn.Module):
    """The mean over all positions, as in MV-Split over the whole sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * x.mean(1, keepdim=True)


class GatedLookAhead(nn.Module):
    """The same behind a gate that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * x.mean(1, keepdim=True)


class LookAheadInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * x.mean(1, keepdim=True) if self.training else x


class OverBatch(nn.Module):
    """A norm whose statistics are those of the whole batch, position by position."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean((0, 2), keepdim=True).add(1e-6).sqrt()


class Doubled(nn.Module):
    """A residual that is added twice."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.used


class OtherInEval(nn.Module):
    """The norm's weight is left out in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else 1.1 * x[..., :] + 0.1


class OtherWhenCompiled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if torch.compiler.is_compiling() else x


class NotSaved(nn.Module):
    """A random projection that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.randn(WIDTH, WIDTH) * WIDTH**-0.5

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x @ self.projection


class Counting(nn.Module):
    """Changes with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.sin(self.calls * x)


class StaleTie(Clean):
    """A head tied to the embedding by a copy that is no parameter: loading leaves it behind."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.tied = self.embedding.weight.detach().clone()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tied.T


class Overlapping(nn.Module):
    """Two parameters that share a part of their memory, and neither holds all of it."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(3, WIDTH)
        self.first, self.second = nn.Parameter(memory[:2]), nn.Parameter(memory[1:])

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * (self.first + self.second).sum(0)


# name: kind of the finding, the model
BROKEN: dict[str, tuple[str, Callable[[int], nn.Module]]] = {
    "look ahead": ("future-leak", lambda depth: Clean(depth, LookAhead)),
    "gated look ahead": ("future-leak", lambda depth: Clean(depth, GatedLookAhead)),
    "look ahead in training": ("future-leak", lambda depth: Clean(depth, LookAheadInTraining)),
    "norm over the batch": ("batch-leak", lambda depth: Clean(depth, OverBatch)),
    "doubled": ("growth", lambda depth: Clean(depth, Doubled)),
    "unused": ("dead-parameter", lambda depth: Clean(depth, Unused)),
    "other in eval": ("train-eval", lambda depth: Clean(depth, OtherInEval)),
    "other when compiled": ("compile", lambda depth: Clean(depth, OtherWhenCompiled)),
    "not saved": ("save-load", lambda depth: Clean(depth, NotSaved)),
    "stale tie": ("save-load", StaleTie),
    "overlapping memory": ("save-load", lambda depth: Clean(depth, Overlapping)),
    "counting": ("repeat", lambda depth: Clean(depth, Counting)),
}


class Streams(nn.Module):
    """Two streams, mixed by a matrix from ``balance``."""

    def __init__(self, balance: Callable[[Tensor], Tensor], shown: bool = False):
        super().__init__()
        self.logits = nn.Parameter(torch.randn(2, 2))
        self.balance = balance
        if shown:
            self.mixing_matrices = lambda stream: [self.balance(self.logits)]

    def forward(self, stream: Tensor, branch: Any) -> Tensor:
        mixed = torch.einsum("ij,bpjc->bpic", self.balance(self.logits), stream)
        return mixed + branch(stream.mean(2))[:, :, None]


def sinkhorn(logits: Tensor) -> Tensor:
    matrix = logits.softmax(-1)
    for _ in range(20):
        matrix = matrix / (matrix.sum(-2, keepdim=True) + 1e-6)
        matrix = matrix / (matrix.sum(-1, keepdim=True) + 1e-6)
    return matrix


def sinkhorn_in_logs(logits: Tensor) -> Tensor:
    for _ in range(20):
        logits = logits.log_softmax(-2).log_softmax(-1)
    return logits.exp()


def sinkhorn_of_a_row(logits: Tensor) -> Tensor:
    """Each row alone: what is left are ones, as in a release of 2026."""
    rows = logits[:, None, :].softmax(-2)
    for _ in range(5):
        rows = nn.functional.normalize(rows, p=1, dim=-1)
        rows = nn.functional.normalize(rows, p=1, dim=-2)
    return rows[:, 0]


def rows_alone(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def streams(balance: Callable[[Tensor], Tensor], **options: Any) -> Callable[[int], ResidualStack]:
    def factory(depth: int) -> ResidualStack:
        return ResidualStack(
            [Streams(balance, **options) for _ in range(depth)],
            width=WIDTH,
            expand=lambda x: x[:, :, None].expand(-1, -1, 2, -1),
            collapse=lambda stream: stream.mean(2),
        )

    return factory


class Plain(nn.Module):
    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.scale = scale

    def forward(self, stream: Tensor, branch: Any) -> Tensor:
        return stream + self.scale * branch(stream)


def plain_stack(depth: int, scale: float = 1.0, **options: Any) -> ResidualStack:
    return ResidualStack([Plain(scale) for _ in range(depth)], width=WIDTH, **options)
