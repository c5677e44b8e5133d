"""The stream as plain module hooks show it, independent of mainstem."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Hooked:
    """What went into and came out of each block, ``[batch, pos, width]`` each, and the model's output."""

    before: list[Tensor]
    after: list[Tensor]
    output: Any


def first_tensor(value: Any) -> Tensor:
    """Return a block's state: its output, or the first of its outputs."""
    return value if isinstance(value, Tensor) else value[0]


def hooked(model: nn.Module, inputs: dict[str, Any], blocks: list[str]) -> Hooked:
    """Run a model with a hook on each block, keeping copies."""
    before: list[Tensor] = []
    after: list[Tensor] = []

    def keep_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before.append(first_tensor(args or kwargs["hidden_states"]).clone())

    def keep_output(_module: nn.Module, _args: Any, output: Any) -> None:
        after.append(first_tensor(output).clone())

    handles = []
    for path in blocks:
        block = model.get_submodule(path)
        handles.append(block.register_forward_pre_hook(keep_input, with_kwargs=True))
        handles.append(block.register_forward_hook(keep_output))
    try:
        with torch.no_grad():
            output = model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return Hooked(before, after, output)
