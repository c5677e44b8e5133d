"""Keys and values of what was read before."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    """What a tower asks of a cache; ``transformers``' ``DynamicCache`` has it too."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]:
        """Append and return a block's keys and values, ``[batch, kv_heads, past + pos, head_dim]``."""
        ...

    def get_seq_length(self) -> int:
        """Return how many slots are held."""
        ...


class KVCache:
    """A cache that grows by concatenation and holds everything, sliding blocks included.

    Cost: ``2 * num_blocks * kv_heads * head_dim`` elements a token, and one copy of a block's part a call.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]:
        """Append and return a block's keys and values."""
        if layer_idx in self._blocks:
            keys, values = self._blocks[layer_idx]
            key_states = torch.cat((keys, key_states), dim=-2)
            value_states = torch.cat((values, value_states), dim=-2)
        self._blocks[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return how many slots are held."""
        return self._blocks[0][0].shape[-2] if self._blocks else 0
