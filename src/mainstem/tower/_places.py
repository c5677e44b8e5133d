"""Where each position stands: rotary angles, and which earlier positions it may look at."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mainstem.tower._config import RopeConfig


class Place(NamedTuple):
    """All that a block is told besides the stream.

    Attributes:
        rotation: cosines and sines, each ``[batch or 1, 1, pos, head_dim]``, or None without rotary
            positions.
        mask: ``[batch or 1, 1, query, key]``, True where a query may look, or None for plain causal
            attention.
    """

    rotation: tuple[Tensor, Tensor] | None
    mask: Tensor | None


def positions_from_mask(attention_mask: Tensor, num_queries: int) -> Tensor:
    """Number the real tokens from 0, whichever side the padding is on.

    Args:
        attention_mask: ``[batch, past + pos]``, true for real tokens.
        num_queries: ``pos``; the rows asked for are the last ones.

    Returns:
        ``[batch, pos]``, int64; padding before the first token stands at 0.
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -num_queries:]


def make_mask(
    num_queries: int,
    num_past: int,
    *,
    window: int | None,
    padding: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """Say which slots each query may look at; None where that is plain causal attention over the queries
    alone.

    Every slot may look at itself, padding too: a row that may look nowhere is NaN in some kernels, and NaN
    keys reach everyone. Padding is seen by no one else.

    Args:
        num_queries: new slots.
        num_past: slots in the cache before them.
        window: a query sees itself and ``window - 1`` slots before it; None for all.
        padding: ``[batch, past + pos]``, true for real tokens, or None.
        device: where to make it.

    Returns:
        bool ``[batch or 1, 1, query, key]`` or None.
    """
    num_keys = num_past + num_queries
    if padding is None and num_past == 0 and (window is None or window >= num_keys):
        return None
    key = torch.arange(num_keys, device=device)
    query = key[num_past:, None]
    allowed = key <= query
    if window is not None:
        allowed = allowed & (key > query - window)
    if padding is not None:
        allowed = allowed & padding.bool()[:, None, None, :]
    allowed = allowed | (key == query)
    return allowed if allowed.dim() == 4 else allowed[None, None]


def frequencies(rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Angle per position of each pair of channels, ``[head_dim / 2]``: ``theta ** (-2i / head_dim)``,
    stretched."""
    exponent = torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim
    frequency = 1.0 / (rope.theta**exponent)
    if rope.scaling == "linear":
        return frequency / rope.factor
    if rope.scaling == "llama3":
        turns = rope.original_max_positions * frequency / (2 * math.pi)  # over the first trained context
        low, high = rope.low_freq_factor, rope.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # share of the frequency that is left alone
        return frequency * (kept + (1 - kept) / rope.factor)
    return frequency


def make_rotation(
    rope: RopeConfig, head_dim: int, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``positions`` (``[batch or 1, pos]``), each ``[batch or 1, 1, pos, head_dim]``.

    Computed in fp32, or fp64 when ``dtype`` is, and never kept: a buffer would be rounded by
    ``model.to(bfloat16)`` and be empty after a build on the meta device. Cost: once a forward, not once a
    block.
    """
    exact = torch.promote_types(dtype, torch.float32)
    angle = positions[:, :, None].to(exact) * frequencies(rope, head_dim, exact, positions.device)
    angle = torch.cat((angle, angle), dim=-1)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel ``i`` with channel ``i + head_dim / 2``, for ``x`` of ``[batch, heads, pos,
    head_dim]``."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
