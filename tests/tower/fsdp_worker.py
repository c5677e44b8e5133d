"""One of the two processes of test_fsdp.py: ``python fsdp_worker.py FOLDER RANK``."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from policy_cases import CASES, largest_error, make_tower, tokens, train_step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from mainstem.connections import Connection
from mainstem.tower import Tower, process_group_left, shard_tower

DROPOUT = {"dropout": 0.1, "attn_dropout": 0.1}
MIXED: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def one_process(tower: Tower, num_ranks: int, rank: int) -> list[Tensor]:
    """Logits of this rank's text and the mean of all ranks' gradients, without sharding."""
    results = [[r.clone() for r in train_step(tower, tokens(r), r)] for r in range(num_ranks)]
    wide = [[t if t.dtype == torch.float64 else t.float() for t in one] for one in results]
    summed: list[Any] = [sum(of_all) for of_all in zip(*wide, strict=True)]
    return [results[rank][0], *(g / num_ranks for g in summed[1:])]


def whole(results: list[Tensor]) -> list[Tensor]:
    return [r.full_tensor() if isinstance(r, DTensor) else r for r in results]


def check_exact(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """fp64: the logits and gradients of one process, plain and checkpointed."""
    expected = one_process(make_tower(**case, **DROPOUT), 2, rank)
    tower = shard_tower(make_tower(**case, **DROPOUT))
    found = {"sharded": all(isinstance(p, DTensor) for p in tower.parameters())}
    for mode in ("none", "block", "selective"):
        tower.checkpoint_activations(mode)
        found[mode] = largest_error(whole(train_step(tower, tokens(rank), rank)), expected)
    return found


def check_mixed(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """fp32 weights, bf16 branches, fp32 stream: what a tower that was cast to bf16 computes."""
    expected = one_process(make_tower(torch.float32, **case).to(torch.bfloat16), 2, rank)
    tower = shard_tower(make_tower(torch.float32, **case), **MIXED)
    seen: dict[str, set[str]] = {"stream": set(), "branch": set(), "of_stream": set(), "of_branch": set()}

    def watch_block(block: nn.Module, args: Any) -> None:
        stream = args[0] if isinstance(args[0], tuple) else args[:1]
        seen["stream"] |= {str(s.dtype) for s in stream}

    def watch_branch(branch: nn.Module, args: Any) -> None:
        seen["branch"].add(str(args[0].dtype))
        seen["of_branch"] |= {str(p.dtype) for p in branch.parameters()}

    def watch_connection(connection: nn.Module, args: Any) -> None:
        seen["of_stream"] |= {str(p.dtype) for p in connection.parameters()}

    for block in tower.blocks:
        block.register_forward_pre_hook(watch_block)
        block.attn.register_forward_pre_hook(watch_branch)
    for module in tower.modules():
        if isinstance(module, Connection):
            module.register_forward_pre_hook(watch_connection)
    found: dict[str, Any] = {
        "error": largest_error(whole(train_step(tower, tokens(rank), rank)), expected),
        "kept": sorted({str(p.dtype) for p in tower.parameters()}),
    }
    return found | {name: sorted(dtypes) for name, dtypes in seen.items()}


def check_state(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Out of a sharded tower and into another, all state to the bit; and the names of an unsharded one."""
    plain = make_tower(torch.float32, **case)
    saved = get_model_state_dict(shard_tower(make_tower(torch.float32, **case), **MIXED))
    other = make_tower(torch.float32, **case)
    with torch.no_grad():
        for value in (*other.parameters(), *other.buffers()):
            value.fill_(7)
    shard_tower(other, **MIXED)
    set_model_state_dict(other, saved)
    back = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
    expected = plain.state_dict()
    return {
        "names": sorted(saved) == sorted(expected),
        "equal": rank > 0 or all(torch.equal(back[name], value) for name, value in expected.items()),
    }


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        results[name] = {}
        for check in (check_exact, check_mixed, check_state):
            try:
                results[name][check.__name__] = check(case, rank)
            except Exception:  # reported by the test of this case; the other process fails alike
                results[name][check.__name__] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    with process_group_left():
        main(Path(sys.argv[1]), int(sys.argv[2]))
