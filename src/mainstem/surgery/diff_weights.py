"""How far two models' weights are apart, block by block."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mainstem.errors import ConfigError, SourceError
from mainstem.measure import Result
from mainstem.observe import StreamMap, tower_in
from mainstem.tower import Tower


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightChange(Result):
    """Weights of one place in two models, tensor by tensor of the same name and shape.

    Attributes:
        change: ``|B - A| / |A|``, Frobenius, over all of them; nan where there are none, inf where A is 0.
        largest: name of the tensor whose own such figure is largest, or None where nothing differs.
        largest_change: that figure.
        num_tensors: how many were compared.
        only_a, only_b: names that only one model has, or in another shape.
    """

    change: float
    largest: str | None
    largest_change: float
    num_tensors: int
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()


def relative(difference: float, size: float) -> float:
    """Return ``difference / size``; 0 where both are 0, inf where only the size is."""
    if size > 0:
        return difference / size
    return math.inf if difference > 0 else 0.0


def compare_weights(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> WeightChange:
    """Compare tensors by name; sums in fp64."""
    shared = [name for name in a if name in b and a[name].shape == b[name].shape]
    total = base = 0.0
    largest, largest_change = None, 0.0
    for name in shared:
        first, second = a[name].detach().double(), b[name].detach().to(a[name].device).double()
        difference, size = float((second - first).square().sum()), float(first.square().sum())
        total, base = total + difference, base + size
        change = relative(math.sqrt(difference), math.sqrt(size))
        if change > largest_change:
            largest, largest_change = name, change
    return WeightChange(
        change=relative(math.sqrt(total), math.sqrt(base)) if shared else math.nan,
        largest=largest,
        largest_change=largest_change,
        num_tensors=len(shared),
        only_a=tuple(name for name in a if name not in shared),
        only_b=tuple(name for name in b if name not in shared),
    )


class Weights:
    """A model's parameters by block, under names that two models share.

    Where only one of two models is a tower, the other is read into one, so that the names are the same.

    Args:
        model: the model.
        stream_map: where its blocks are.
        as_tower: whether one of the two is a tower.

    Attributes:
        is_foreign: whether the names are not those of the other model.
    """

    def __init__(self, model: nn.Module, stream_map: StreamMap, *, as_tower: bool):
        tower: Any = tower_in(model)
        if tower is None and as_tower:
            tower = _read_as_tower(model)
        self.is_foreign = as_tower and tower is None
        holder = model if tower is None else tower
        paths = [block.module for block in stream_map.blocks]
        if tower is not None:
            paths = [f"blocks.{block.index}" for block in stream_map.blocks]
        self._parameters = dict(holder.named_parameters())
        self._paths = paths

    def of_block(self, block: int) -> dict[str, Tensor]:
        """Return a block's parameters by their name inside the block."""
        prefix = f"{self._paths[block]}."
        return {
            name.removeprefix(prefix): parameter
            for name, parameter in self._parameters.items()
            if name.startswith(prefix)
        }

    def outside(self) -> dict[str, Tensor]:
        """Return the parameters of no block: embedding, final norm, head."""
        prefixes = tuple(f"{path}." for path in self._paths)
        return {name: p for name, p in self._parameters.items() if not name.startswith(prefixes)}


@torch.no_grad()
def _read_as_tower(model: nn.Module) -> Tower | None:
    from mainstem.tower.pretrained import tower_from_transformers

    try:
        return tower_from_transformers(model)  # pyright: ignore[reportArgumentType]
    except (ConfigError, SourceError, AttributeError):
        return None
