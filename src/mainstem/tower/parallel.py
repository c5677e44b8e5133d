"""Several processes. FSDP2 shards parameters, gradients, optimiser states; the stream is as wide as ever."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from mainstem.connections import StreamModule
from mainstem.errors import ConfigError
from mainstem.tower._block import Block
from mainstem.tower._model import Tower

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

GLOO_LETS_GO = 0.5
"""Seconds in which a thread of gloo has done with its last collective; a millisecond when it is let."""


@contextlib.contextmanager
def process_group_left() -> Generator[None]:
    """Leave, at the end of the block, the process group that a run under a launcher has joined.

    For a process that ends after its run. A thread of gloo lets go of its last collective's Python state a
    moment after the collective is over, for which it needs the interpreter; where that ends first, the
    process aborts and its launcher calls the run failed (torch 2.13). DDP and FSDP keep the thread past the
    group's end.
    """
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
            time.sleep(GLOO_LETS_GO)


def shard_tower(
    tower: Tower,
    mesh: DeviceMesh | None = None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> Tower:
    """Shard ``tower`` in place with :func:`torch.distributed.fsdp.fully_shard`, block by block.

    Branches, embedding and head are gathered in ``param_dtype``; connections and the trunk in the stream's
    dtype, whose gradients are reduced in it too. Where the two differ they are groups of their own, one more
    gather a block. Nothing that enters a block is cast, so that the stream between blocks stays as wide as
    ``TowerConfig.stream_dtype`` says. Parameters become DTensors under their old names; ask for optimiser
    groups afterwards. Checkpointing and compiling blocks work before and after.

    Args:
        tower: on the mesh's device, the same weights on every process.
        mesh: one dimension to shard over, or two to replicate over the first and shard over the second; all
            processes when not given.
        param_dtype: what branches compute in; the weights' own dtype when not given. Give bf16 with fp32
            weights: the optimiser then updates fp32.
        reduce_dtype: what their gradients are added up in; ``param_dtype`` when not given.
        reshard_after_forward: free gathered blocks after the forward pass and gather them again for the
            backward pass; False keeps them, for more memory and less traffic.

    Returns:
        The tower.

    Raises:
        ConfigError: the connection refuses, no process group is there, or ``param_dtype`` is no
            floating-point dtype.
    """
    # Here, for its import takes half a second.
    from torch.distributed import is_available, is_initialized
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    tower.config.check_served("fsdp", "be sharded", "Train it with one process, or with DDP.")
    if not is_available() or not is_initialized():
        raise ConfigError(
            "there is no process group to shard over; start with torchrun or accelerate launch and call "
            "torch.distributed.init_process_group first."
        )
    if param_dtype is not None and not param_dtype.is_floating_point:
        raise ConfigError(f"param_dtype={param_dtype} is no floating-point dtype; give torch.bfloat16.")

    def shard(module: nn.Module, policy: MixedPrecisionPolicy, free: bool) -> None:
        fully_shard(module, mesh=mesh, reshard_after_forward=free, mp_policy=policy)

    compute_dtype = param_dtype or tower.token_embedding.weight.dtype
    of_branches = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
    of_stream = of_branches
    stream_dtype = tower.trunk.stream_dtype
    wide = stream_dtype is not None and torch.promote_types(compute_dtype, stream_dtype) != compute_dtype
    if wide:
        of_stream = MixedPrecisionPolicy(cast_forward_inputs=False)
    _compute_in(tower, compute_dtype)

    for block in tower.blocks:
        block = cast(Block, block)
        if wide and any(True for _ in block.connections.parameters()):
            shard(block.connections, of_stream, reshard_after_forward)
        shard(block, of_branches, reshard_after_forward)
    if wide and any(True for _ in tower.trunk.parameters()):
        shard(tower.trunk, of_stream, False)
        for method in ("enter", "leave"):  # a trunk is never called itself
            register_fsdp_forward_method(tower.trunk, method)
    shard(tower, of_branches, False)
    return tower


def _compute_in(tower: Tower, dtype: torch.dtype) -> None:
    """Tell connections and trunk what branches compute in, which sharded weights no longer show."""
    for module in tower.modules():
        if isinstance(module, StreamModule):
            module.branch_dtype = dtype
