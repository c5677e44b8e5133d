"""Attention: the branch that moves information between positions."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mainstem.tower._cache import Cache
from mainstem.tower._config import TowerConfig
from mainstem.tower._places import Place, rotate


class ValueMix(nn.Module):
    """``V' = first_weight * V_first + own_weight * V_own``: the first block's values in a later block.

    Shapes: ``[batch, pos, kv_width]``, before heads are split; two weights of shape ``[1]``, parameters that
    are not decayed, or buffers. Cost: 3 FLOPs and 3 elements moved a channel of the values. They are part of
    the branch and have its dtype.
    Value at initialisation: ``initial``; ``(0, 1)`` gives ``V_own`` to the bit.
    Source: Zhou et al. 2024 (ResFormer, arXiv 2410.17897), the mixture of values before attention. Read: the
    authors' Llama (``Zcchill/Value-Residual-Learning``, ``modeling_llama_resformer.py`` and
    ``modeling_llama_svformer.py``: fixed at 0.5 and 0.5, or shared) and modded-nanogpt of 2024-11-10, which
    learns one number for both. Of the paper itself only summaries were read: Identity-ResFormer is
    ``"fixed"``, Learnable-ResFormer ``"learned"`` with both weights 0.5 at the start, Constant-ResFormer
    ``"fixed"`` at ``(2, 1)``, Sparse-ResFormer a ``value_residual_start`` in the upper part. Not here:
    ResFormer-Plus, whose weights are a softmax over the depth, and DenseFormer-like mixtures of all values.
    """

    first_weight: Tensor
    own_weight: Tensor

    def __init__(self, initial: tuple[float, float], learned: bool):
        super().__init__()
        self.initial = initial
        for name in ("first_weight", "own_weight"):
            if learned:
                self.register_parameter(name, nn.Parameter(torch.empty(1)))
            else:
                self.register_buffer(name, torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial values."""
        nn.init.constant_(self.first_weight, self.initial[0])
        nn.init.constant_(self.own_weight, self.initial[1])

    def forward(self, first: Tensor, own: Tensor) -> Tensor:
        """Return the mixture."""
        return self.first_weight * first + self.own_weight * own


class Attention(nn.Module):
    """``update = out(softmax(scale * q k^T + mask) v)`` with grouped keys, rotary positions and QK-norm.

    Shapes: read and update ``[batch, pos, width]``. Softmax is fp32 or better. Parameters:
    ``2 * width * head_dim * (heads + kv_heads)`` and biases and QK-norms. What :meth:`forward` returns is the
    whole update of the branch, bias and dropout included, so that a forward hook sees it.
    Source: Vaswani et al. 2017 (arXiv 1706.03762), eq. 1; grouped keys: Ainslie et al. 2023 (arXiv
    2305.13245), section 2.2; QK-norm: Henry et al. 2020 (arXiv 2010.04245); soft cap: Gemma 2 (arXiv
    2408.00118), section 2; values of the first block: :class:`ValueMix`.
    """

    def __init__(self, config: TowerConfig, block_index: int):
        super().__init__()
        self.block_index = block_index
        self.head_dim = config.head_dim
        self.scale = config.attn_scale
        self.softcap = config.attn_softcap
        self.qk_norm = config.qk_norm
        self.attn_dropout = config.attn_dropout
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.width, q_width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.width, kv_width, bias=config.qkv_bias)
        self.values_from = _values_from(config, block_index)
        if block_index == 0 or self.values_from != "first":
            self.v_proj = nn.Linear(config.width, kv_width, bias=config.qkv_bias)
        if self.values_from == "both":
            learned = config.value_residual == "learned"
            self.value_mix = ValueMix(config.value_residual_weights, learned)
        self.out_proj = nn.Linear(q_width, config.width, bias=config.attn_out_bias)
        if config.qk_norm != "none":
            per_head = config.qk_norm == "head"
            self.q_norm = config.norm.build(config.head_dim if per_head else q_width)
            self.k_norm = config.norm.build(config.head_dim if per_head else kv_width)
        self.inner_norm = config.scheme().build_inner_norm(width=q_width, norm=config.norm)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, place: Place, cache: Cache | None = None, first_values: Tensor | None = None
    ) -> Tensor:
        """Return the update for what was read, ``[batch, pos, width]``.

        Args:
            x: what was read.
            place: angles and mask.
            cache: gets the keys and the values that are attended to, the mixed ones.
            first_values: what the first block's value matrix made, ``[batch, pos, kv_width]``, in a tower
                with a value residual.
        """
        q, k, v = self.q_proj(x), self.k_proj(x), self._values(x, first_values)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = self._split(q), self._split(k), self._split(v)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if place.rotation is not None:
            q, k = rotate(q, place.rotation), rotate(k, place.rotation)
        if cache is not None:
            k, v = cache.update(k, v, self.block_index)
        mixed = self._mix(q, k, v, place.mask).transpose(1, 2).flatten(2)
        if self.inner_norm is not None:
            mixed = self.inner_norm(mixed)
        return self.dropout(self.out_proj(mixed))

    def _values(self, x: Tensor, first: Tensor | None) -> Tensor:
        if first is None or self.values_from == "own":
            return self.v_proj(x)
        return first if self.values_from == "first" else self.value_mix(first, self.v_proj(x))

    def extra_repr(self) -> str:
        """Where values come from, if it is not this block alone."""
        return "" if self.values_from == "own" else f"values_from={self.values_from}"

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.attn_dropout if self.training else 0.0
        if mask is not None:
            mask = mask[..., -k.shape[-2] :]  # a sliding cache returns the newest slots only
        if self.softcap is None:
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(-1, -2) * self.scale
        scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = scores.to(torch.promote_types(q.dtype, torch.float32)).softmax(-1).to(q.dtype)
        return F.dropout(weights, p=dropout) @ v


def _values_from(config: TowerConfig, block_index: int) -> Literal["own", "first", "both"]:
    """Say whose values a block attends to: its own, the first block's, or both mixed."""
    if config.value_residual == "none":
        return "own"
    if block_index == 0:
        return "first"
    if block_index < config.value_residual_start:
        return "own"
    return "first" if config.value_residual == "shared" else "both"
