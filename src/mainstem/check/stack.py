"""The adapter for a residual connection that is not a model: somebody's connections around our branches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualStack(nn.Module):
    """Residual connections around causal branches of ours, so that only the connections can be at fault.

         x ── expand ──► connection 0 (branch 0) ──► connection 1 (branch 1) ──► ... ── collapse ── norm ──►

    Even branches mix tokens causally (softmax over earlier positions of fixed scores, then a matrix), odd
    ones are a feed-forward; their matrices are N(0, 1/fan_in).

    Args:
        connections: one for each sublayer; called as ``connection(stream, branch)`` with a callable
            ``branch`` from ``[batch, pos, width]`` to the same, it returns the next stream. A connection with
            a method ``mixing_matrices(stream)``, called with what its ``forward`` was, shows how it mixes
            streams: a list of `mainstem.connections.MixingMatrix`, whose promises are checked, or of tensors
            ``[..., out, in]``, which are held to be doubly stochastic.
        width: size of the last dimension of what a branch reads and returns.
        expand: ``[batch, pos, width]`` to the stream; the identity when not given.
        collapse: the last stream to ``[batch, pos, width]``; the identity when not given.
        norm_branches: branches norm what they read, as in Pre-LN. False for connections with norms of their
            own.
        final_norm: the norm after ``collapse``; a plain RMSNorm when not given.
        exact_start: the connections claim to start as plain Pre-LN; a distance is then a finding.
    """

    def __init__(
        self,
        connections: Iterable[nn.Module],
        *,
        width: int,
        expand: Callable[[Tensor], Any] | None = None,
        collapse: Callable[[Any], Tensor] | None = None,
        norm_branches: bool = True,
        final_norm: nn.Module | None = None,
        exact_start: bool = False,
    ):
        super().__init__()
        self.width = width
        self.connections = nn.ModuleList(connections)
        self.branches = nn.ModuleList(
            _FeedForward(width) if i % 2 else _TokenMixing(width) for i in range(len(self.connections))
        )
        self.expand = expand or nn.Identity()
        self.collapse = collapse or nn.Identity()
        self.final_norm = final_norm or nn.RMSNorm(width, eps=1e-6, elementwise_affine=False)
        self.norm_branches = norm_branches
        self.exact_start = exact_start

    def branch(self, index: int) -> Callable[[Tensor], Tensor]:
        """Return what connection ``index`` is called with."""
        module = self.branches[index]
        return (lambda x: module(_normed(x))) if self.norm_branches else module

    def states(self, x: Tensor) -> list[Any]:
        """Return every state of the stream, ``num_sublayers + 1`` of them."""
        states = [self.expand(x)]
        for i, connection in enumerate(self.connections):
            states.append(connection(states[-1], self.branch(i)))
        return states

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, pos, width]`` -> the same."""
        return self.final_norm(self.collapse(self.states(x)[-1]))

    def plain(self, x: Tensor) -> Tensor:
        """Return what plain Pre-LN computes with the same branches: ``x + F(norm(x))``, normed at the end."""
        for branch in self.branches:
            x = x + branch(_normed(x))
        return _normed(x)


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


class _TokenMixing(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        # One score for each distance: any number of positions, and every one of them is used.
        self.slope = nn.Parameter(torch.randn(()))
        self.out = nn.Linear(width, width, bias=False)
        nn.init.normal_(self.out.weight, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[-2], device=x.device)
        distance = places[:, None] - places[None, :]
        scores = torch.sin(self.slope + distance.to(x.dtype))
        return self.out(scores.masked_fill(distance < 0, float("-inf")).softmax(-1) @ x)


class _FeedForward(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        nn.init.normal_(self.up.weight, std=width**-0.5)
        nn.init.normal_(self.down.weight, std=(2 * width) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))
