"""torch.compile by block: one graph for a tower of any depth."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor
from torch.utils import _pytree as pytree

from mainstem.tower._block import Block
from mainstem.tower._model import Tower

_GRAPHS_A_KIND = 8
"""Training or not, with gradients or not, one text length or any: Dynamo's own limit for one function."""


def compile_blocks(tower: Tower, **options: Any) -> int:
    """Compile every block of ``tower``, in place, without graph breaks.

    Blocks that are alike share a graph, so that the first step costs the same at any depth. What a block
    does with a cache stays uncompiled: keys have another length at every token. Weights, names in the state
    dict, and the order of random numbers (but for Inductor's own generator) stay as they are; forward hooks
    on blocks run outside of the graph. Checkpointing may be chosen before or after, sharding too.

    A scheme whose history grows hands each block more tensors than the one below, which is a graph for each
    block; Dynamo's process-wide recompile limits are raised to hold them, for what exceeds them would run
    uncompiled.

    Args:
        tower: the tower.
        options: for :func:`torch.compile`, such as ``backend`` or ``mode``.

    Returns:
        How many graphs one pass needs: kinds of blocks, told apart by what they are handed and made of.

    Raises:
        ConfigError: the connection refuses.
    """
    tower.config.check_served("compile", "be compiled", "Leave its blocks uncompiled.")
    num_kinds = len(_kinds(tower))
    needed = _GRAPHS_A_KIND * num_kinds
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(dynamo_config, limit, max(getattr(dynamo_config, limit), needed))
    for block in tower.blocks:
        block = cast(Block, block)
        block.compiled = torch.compile(block.run, fullgraph=True, **options)
    return num_kinds


@torch.no_grad()
def _kinds(tower: Tower) -> set[Any]:
    """Run one token through the connections alone, and tell blocks apart by their streams and modules."""
    kinds: set[Any] = set()
    embedding = tower.token_embedding.weight
    with torch.random.fork_rng():
        stream = tower.trunk.enter(embedding.new_zeros(1, 1, tower.config.width))
        for block, block_type in zip(tower.blocks, tower.config.block_types, strict=True):
            shapes = tuple(t.shape for t in pytree.tree_leaves(stream))
            kinds.add((shapes, str(block), block_type))
            for connection, _ in cast(Block, block).sublayers():
                stream = connection(stream, _nothing)
    return kinds


def _nothing(read: Tensor) -> Tensor:
    return torch.zeros_like(read)
