"""One process of two that share weights: ``torchrun tensor_parallel_worker.py OUT UNPLANNED FOLDER...``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tiny_models as tiny
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mainstem.audit import audit_windows
from mainstem.errors import SourceError, StreamNotFoundError
from mainstem.observe import find_stream
from mainstem.sources import LoadedModel, load_model, load_text, make_windows
from mainstem.tower import process_group_left


def figures(loaded: LoadedModel, folder: Path) -> dict[str, Any]:
    """Audit everything there is, on windows of which the last is padded."""
    windows = make_windows(loaded.tokenizer, load_text(tiny.GPL), num_tokens=90, window=16, batch_size=4)
    config = tiny.config(folder, sweep=True, probe=True)
    return json.loads(json.dumps(audit_windows(loaded, windows, config).to_dict()))


def refusal(model: nn.Module) -> str:
    """Return why there is no map of a model."""
    try:
        find_stream(model, {"input_ids": torch.arange(14).reshape(2, 7)})
    except StreamNotFoundError as error:
        return str(error)
    return "found"


def refusals(folder: Path, unplanned: Path) -> dict[str, str]:
    """Share weights in two ways of which no process holds a stream that can be followed, and in no way."""
    by_torch = load_model(folder).model
    plan = {"mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for block in by_torch.model.layers:
        parallelize_module(block, init_device_mesh("cpu", (2,)), plan)
    by_position = load_model(folder, device="tp").model
    by_position.tp_plan = {**by_position.tp_plan, "model.norm": "sequence_parallel"}
    try:
        load_model(unplanned, device="tp")
        no_plan = "loaded"
    except SourceError as error:
        no_plan = str(error)
    return {"by torch": refusal(by_torch), "by position": refusal(by_position), "no plan": no_plan}


def main(out: Path, unplanned: Path, folders: list[Path]) -> None:
    """Write what this process finds."""
    found: dict[str, Any] = {}
    for folder in folders:
        loaded = load_model(folder, device="tp")
        forwards = [vars(m).get("forward") for m in loaded.model.modules()]
        found[folder.name] = figures(loaded, folder)
        assert sum(isinstance(p, DTensor) for p in loaded.model.parameters()) > 10
        assert forwards == [vars(m).get("forward") for m in loaded.model.modules()]
    found["refused"] = refusals(folders[0], unplanned)
    (out / f"{distributed.get_rank()}.json").write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    with process_group_left():
        main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(folder) for folder in sys.argv[3:]])
