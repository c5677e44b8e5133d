"""What the schemes that look back share: a trunk for tuple streams, and reads over the history.

A history is a tuple of tensors ``[batch, pos, width]``, one a source. The reads below stack it for the time
of one call: autograd keeps the sources, which the history holds anyway, and never a stack, so that what is
saved for backward grows with the depth and not with its square.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from mainstem.connections._base import Connection, Stream, Trunk
from mainstem.connections._policy import coefficient_dtype


class TupleTrunk(Trunk):
    """The trunk of a stream that is a tuple whose first tensor is the residual stream itself.

    ``expand`` puts the embedding into each of ``num_entries`` places; ``collapse`` takes the first.
    """

    def __init__(self, connections: Sequence[Connection], final_norm: nn.Module, num_entries: int):
        super().__init__(connections, final_norm)
        self.num_entries = num_entries

    def expand(self, x: Tensor) -> Stream:
        """``[batch, pos, width]`` -> that many views of it. Linear."""
        # Views, for Dynamo compiles again where two inputs are the very same tensor.
        return (x, *(x.view_as(x) for _ in range(self.num_entries - 1)))

    def collapse(self, stream: Stream) -> Tensor:
        """Return the first."""
        return stream[0]

    def linearize_collapse(self, stream: Stream) -> Callable[[Stream], Tensor]:
        """Taking one is linear."""
        return self.collapse


class _WeightedSum(torch.autograd.Function):
    """``sum_i weights[..., i] * sources[i]``; see :func:`weighted_sum`."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *sources)
        return _combine(weights, torch.stack(sources, dim=-2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weights, *sources = ctx.saved_tensors
        (grad,) = grads
        of_weights = (torch.stack(sources, dim=-2).to(weights.dtype) @ grad.to(weights.dtype)[..., None])[
            ..., 0
        ]
        if weights.ndim == 1:
            of_weights = of_weights.flatten(0, -2).sum(0)
        of_sources = (weights[..., None] * grad[..., None, :]).to(grad.dtype)
        return of_weights, *of_sources.unbind(-2)


def _combine(weights: Tensor, stacked: Tensor) -> Tensor:
    return (weights[..., None, :] @ stacked.to(weights.dtype))[..., 0, :].to(stacked.dtype)


def weighted_sum(weights: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """Mix sources: ``[n]`` or ``[batch, pos, n]`` weights over n tensors ``[batch, pos, width]``.

    Computed in the weights' dtype, fp32 at least, and returned in the sources'. Cost: n
    multiply-adds a channel, n + 1 elements moved and 2n more by the stack; saves no stack.
    """
    weights = weights.to(coefficient_dtype(weights))
    if torch.compiler.is_compiling():  # the compiler decides itself what to compute again
        return _combine(weights, torch.stack(tuple(sources), dim=-2))
    return cast(Tensor, _WeightedSum.apply(weights, *sources))


def frozen_weighted_sum(weights: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
    """:func:`weighted_sum` as a linear map of the sources, for ``linearize``: open to ``vmap``."""
    wide = weights.to(coefficient_dtype(weights))
    return lambda sources: _combine(wide, torch.stack(tuple(sources), dim=-2))


class _Scores(torch.autograd.Function):
    """``query . sources[i] * rsqrt(ms(sources[i]) + eps)``; see :func:`depth_scores`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, eps: float, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(query, *sources)
        ctx.eps = eps
        scale, dot = _scale_and_dot(query, eps, sources)
        return scale * dot

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, *sources = ctx.saved_tensors
        (grad,) = grads
        scale, dot = _scale_and_dot(query, ctx.eps, sources)
        stacked = torch.stack(sources, dim=-2)
        along = grad * scale
        of_query = (along[..., None, :] @ stacked.to(query.dtype)).flatten(0, -2).sum(0)
        inward = grad * dot * scale.pow(3) / query.shape[0]
        of_sources = along[..., None] * query - inward[..., None] * stacked
        return of_query, None, *of_sources.to(stacked.dtype).unbind(-2)


def _scale_and_dot(query: Tensor, eps: float, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    stacked = torch.stack(tuple(sources), dim=-2).to(query.dtype)
    return torch.rsqrt(stacked.square().mean(-1) + eps), stacked @ query


def one_hot(place: int, stream: Stream) -> Tensor:
    """Return ``[parts]`` weights that are 1 for one part of a history and 0 for the others."""
    weights = stream[0].new_zeros(len(stream))
    weights[place] = 1.0
    return weights


def depth_scores(query: Tensor, sources: Sequence[Tensor], eps: float) -> Tensor:
    """Score n sources ``[batch, pos, width]`` by ``query . RMSNorm(source)``: ``[batch, pos, n]``.

    ``query`` is ``[width]``, the norm's gain already in it; computed in its dtype. Cost: 2n multiply-adds a
    channel; saves no stack.
    """
    if torch.compiler.is_compiling():
        scale, dot = _scale_and_dot(query, eps, sources)
        return scale * dot
    return cast(Tensor, _Scores.apply(query, eps, *sources))
