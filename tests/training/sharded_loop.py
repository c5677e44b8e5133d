"""A training loop of a user's own that calls the monitor: one process, or several under torchrun with FSDP2.

python sharded_loop.py OUT MODEL
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from test_stream_monitor import StreamMonitor, llama, tower, windows
from torch import nn

from mainstem.tower import process_group_left


def main(out: Path, name: str) -> None:
    torch.set_num_threads(1)
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    model = llama(0.0) if name == "llama" else tower(name, 0.0)
    if ranks > 1:
        shard(model, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = StreamMonitor(out / "stream.jsonl", every=2)
    state = SimpleNamespace(global_step=0, is_world_process_zero=rank == 0)
    events = (SimpleNamespace(n_gpu=0, output_dir=str(out), torch_compile=False), state, SimpleNamespace())
    known = {"model": model.train(), "optimizer": optimizer}
    monitor.on_train_begin(*events, **known)
    for step in range(2):
        monitor.on_step_begin(*events, **known)
        share = 8 // ranks
        rows = windows()[8 * step + share * rank :][:share]
        model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss.backward()
        monitor.on_pre_optimizer_step(*events, **known)
        optimizer.step()
        monitor.on_optimizer_step(*events, **known)
        optimizer.zero_grad()
        state.global_step += 1
        monitor.on_step_end(*events, **known)
    monitor.on_train_end(*events, **known)


def shard(model: nn.Module, ranks: int) -> None:
    """Shard every block, and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (ranks,))
    blocks = model.tower.blocks if hasattr(model, "tower") else model.model.layers
    for block in (*blocks, model):
        fully_shard(block, mesh=mesh)


if __name__ == "__main__":
    with process_group_left():
        main(Path(sys.argv[1]), sys.argv[2])
