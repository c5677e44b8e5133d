"""torch.compile by block: one graph for a tower of any depth."""

from __future__ import annotations

from typing import Any, cast

import torch

from mainstem.tower._block import Block
from mainstem.tower._model import Tower

_GRAPHS_A_KIND = 16
"""With a mask or not, training or not, with gradients or not, for one text length or any."""


def compile_blocks(tower: Tower, **options: Any) -> None:
    """Compile every block of ``tower``, in place, without graph breaks.

    Blocks that are alike share a graph, so that the first step costs the same at any depth. A scheme whose
    history grows hands each block more tensors than the one below, which is a graph for each block: Dynamo's
    recompile limits are raised for the whole process to hold them. What exceeds them raises, and never runs
    uncompiled unnoticed.

    What a block does with a cache stays uncompiled: keys have another length at every token. Weights, names
    in the state dict, and the order of random numbers (but for Inductor's own generator) stay as they are;
    forward hooks on blocks run outside of the graph. Checkpointing and sharding may come before or after.

    Args:
        tower: the tower.
        options: for :func:`torch.compile`, such as ``backend`` or ``mode``.

    Raises:
        ConfigError: the connection refuses.
    """
    import torch._dynamo.config as dynamo_config  # here, for it takes a second

    tower.config.check_served("compile", "be compiled", "Leave its blocks uncompiled.")
    grows = tower.config.scheme().properties.has_history
    num_kinds = len(tower.blocks) if grows else len({str(block) for block in tower.blocks})
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(dynamo_config, limit, max(getattr(dynamo_config, limit), _GRAPHS_A_KIND * num_kinds))
    for block in tower.blocks:
        block = cast(Block, block)
        block.compiled = torch.compile(block.run, fullgraph=True, **options)
