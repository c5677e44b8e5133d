"""Feed-forward: the branch that works on each position alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from mainstem.tower._config import Activation, TowerConfig

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class FeedForward(nn.Module):
    """``update = down(activation(gate(x)) * up(x))``, or ``down(activation(up(x)))`` where it is not gated.

    Shapes: read and update ``[batch, pos, width]``. Parameters: ``3 * width * ffn_width`` gated, else 2, and
    biases. What :meth:`forward` returns is the whole update of the branch, bias and dropout included.
    Source: Shazeer 2020 (arXiv 2002.05202), eq. 5 and 6.
    """

    def __init__(self, config: TowerConfig):
        super().__init__()
        self.gated = config.gated
        self.activation = _ACTIVATIONS[config.activation]
        if config.gated:
            self.gate_proj = nn.Linear(config.width, config.ffn_width, bias=config.ffn_bias)
        self.up_proj = nn.Linear(config.width, config.ffn_width, bias=config.ffn_bias)
        self.down_proj = nn.Linear(config.ffn_width, config.width, bias=config.ffn_bias)
        self.inner_norm = config.scheme().build_inner_norm(width=config.ffn_width, norm=config.norm)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the update for what was read, ``[batch, pos, width]``."""
        if self.gated:
            inner = self.activation(self.gate_proj(x)) * self.up_proj(x)
        else:
            inner = self.activation(self.up_proj(x))
        if self.inner_norm is not None:
            inner = self.inner_norm(inner)
        return self.dropout(self.down_proj(inner))
