"""A Pre-LN stack in a few lines of fp64, and the same forward with a change written into it by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from handmade import VOCAB, WIDTH, PreBlock
from torch import Tensor, nn

Change = Callable[[int, str, Tensor, Tensor], Tensor]
"""Block, part, the state before, the write (or at ``"state"`` the state) -> what takes its place."""


class Bare(nn.Module):
    """Embedding, four blocks, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(PreBlock() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def bare() -> Bare:
    torch.manual_seed(3)
    return Bare().double().eval()


def keep(block: int, part: str, before: Tensor, value: Tensor) -> Tensor:
    return value


def by_hand(model: Bare, input_ids: Tensor, change: Change = keep) -> tuple[Tensor, list[Tensor]]:
    """The logits and all states, with ``change`` asked at every write, block and state."""
    x = model.embedding(input_ids)
    states = [x]
    for i, block in enumerate(model.blocks):
        assert isinstance(block, PreBlock)
        start = x
        x = x + change(i, "attn", x, block.attention(block.first(x)))
        x = x + change(i, "mlp", x, block.feed_forward(block.second(x)))
        update = x - start
        changed = change(i, "block", start, update)
        x = x if changed is update else start + changed
        x = change(i, "state", start, x)
        states.append(x)
    return model.head(model.norm(x)), states


def ids(rows: int = 3, positions: int = 9, seed: int = 5) -> Tensor:
    return torch.randint(VOCAB, (rows, positions), generator=torch.Generator().manual_seed(seed))
