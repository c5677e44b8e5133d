"""The measured loss of removing blocks: what the cheap scores of removal only guess."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from mainstem.errors import ConfigError
from mainstem.intervene._tower import left_out
from mainstem.intervene.sweep import SweepConfig, sweep
from mainstem.measure import Result, Split
from mainstem.observe import StreamMap


@dataclasses.dataclass(frozen=True)
class Removal(Result):
    """What removing some blocks together does to the prediction.

    Attributes:
        blocks: numbers of the blocks, in order.
        kl: mean over tokens of ``KL(p || p')``, nats, ``p`` the whole model's prediction.
        top1: share of tokens whose most likely word stays the same.
        nll: mean loss of the next token, nats; ``nll_delta`` is that minus the whole model's. Only for a
            causal model are they a loss of its own.
        num_tokens: tokens that the loss was taken at.
    """

    blocks: tuple[int, ...]
    kl: Split
    top1: Split
    nll: float
    nll_delta: float
    num_tokens: int


def removal_loss(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    stream_map: StreamMap,
    blocks: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Removal, ...]:
    """Measure what the model's prediction loses without some of its blocks.

    The stream passes a removed block by as if it were not there, so the figures are those of the shorter
    model; where it is a history, see `left_out`. Passes begin at the lowest removed block where the model
    allows it, as in `sweep`.

    Args:
        model: in eval mode.
        batches: keyword arguments of its forward, one entry a batch.
        stream_map: from `mainstem.observe.find_stream`.
        blocks: sets of blocks; those of one set are removed together: ``[(13, 14, 15), (4, 14, 16)]``.
        progress: told of the passes done and of all passes.

    Returns:
        One entry a set, in the order given; those found so far after a KeyboardInterrupt.

    Raises:
        ConfigError: the model is in training mode, or a block that it does not have.
    """
    sets = [tuple(sorted(set(chosen))) for chosen in blocks]
    if not sets:
        raise ConfigError("no blocks to remove were given; expected sets such as [(13, 14, 15)].")
    config = SweepConfig(
        broken=lambda n: left_out(sets[n], stream_map), floors=range(len(sets)), states=False
    )
    found = sweep(model, batches, stream_map, config, progress).floors
    return tuple(
        Removal(sets[one.floor], one.kl, one.top1, one.nll, one.nll_delta, one.num_tokens) for one in found
    )
