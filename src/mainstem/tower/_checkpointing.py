"""Activation checkpointing: what a block keeps for the backward pass, and what it computes again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Checkpointing = Literal["none", "block", "selective"]
"""``"none"`` keeps all that autograd asks for, ``"block"`` the stream between blocks alone, ``"selective"``
also what matrix products and attention kernels have made."""

T = TypeVar("T")

_PRODUCTS = ("mm", "addmm", "_scaled_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


@functools.cache
def kept_operations() -> frozenset[OpOverload]:
    """Return the operations whose results ``"selective"`` keeps: those that cost most for a byte of result.

    Products with a matrix that all tokens share, and the fused attention kernels. A batched product
    (``bmm``) is not among them: it is one token's streams or history mixed, a few multiply-adds an entry, or
    the scores of unfused attention, whose size is the square of the text.
    """
    return frozenset(
        getattr(torch.ops.aten, name).default
        for name in (*_PRODUCTS, *_ATTENTION)
        if hasattr(torch.ops.aten, name)
    )


def run_checkpointed(function: Callable[..., T], mode: Checkpointing, *args: Any) -> T:
    """Return ``function(*args)``; in the backward pass it runs again where ``mode`` has not kept a result.

    Random numbers are replayed. Works inside and outside of a compiled region.
    Source: Chen et al. 2016 (arXiv 1604.06174); selective: Korthikanti et al. 2022 (arXiv 2205.05198),
    section 5.
    """
    if mode == "none":
        return function(*args)
    if mode == "block":
        return checkpoint(function, *args, use_reentrant=False)
    return checkpoint(function, *args, use_reentrant=False, context_fn=_contexts)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in kept_operations()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
