"""Where a model's tensors are, and its training settings while it is looked at."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mainstem.sources import require


def device_of(model: Any) -> torch.device:
    """Return where a model takes its inputs, one whose weights Accelerate keeps elsewhere too."""
    embedding = model.get_input_embeddings()
    for module in (embedding, model):
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    here = (p.device for p in (*embedding.parameters(), *model.parameters()) if not p.is_meta)
    return next(here, torch.device("cpu"))


def weight_of(module: nn.Module) -> Tensor | None:
    """Return a module's ``weight``, a copy of it where Accelerate brings it only while it is used or where
    processes share it."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    full_tensor = getattr(weight.detach(), "full_tensor", None)  # of a DTensor
    if full_tensor is not None:
        return full_tensor()
    if not weight.is_meta:
        return weight.detach()
    align = require("accelerate.utils", feature="An offloaded model").align_module_device
    with align(module):
        brought: Tensor = module.weight  # pyright: ignore[reportAssignmentType]
        return brought.detach().clone()


@contextmanager
def kept_activations(model: nn.Module) -> Generator[None]:
    """Switch gradient checkpointing off for the block: a recomputed stream is not the one that was seen."""
    switched = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    for module in switched:
        setattr(module, "gradient_checkpointing", False)  # noqa: B010 - not declared on nn.Module
    try:
        yield
    finally:
        for module in switched:
            setattr(module, "gradient_checkpointing", True)  # noqa: B010
