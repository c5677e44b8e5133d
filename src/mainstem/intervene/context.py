"""Interventions around any model, as a context manager."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from mainstem.errors import ConfigError
from mainstem.intervene._mode import InterveneMode
from mainstem.intervene._tower import through_connections
from mainstem.intervene.kinds import Intervention
from mainstem.observe import StreamMap, TowerMap
from mainstem.observe._frames import unwrapped


@contextmanager
def intervening(
    model: nn.Module,
    interventions: Intervention | Sequence[Intervention],
    stream_map: StreamMap | None = None,
) -> Generator[None]:
    """Change the stream of every pass of ``model`` that is made inside the context.

    Several interventions at one place are done in order; at one block, its writes come before its update and
    that before its state. Gradients flow through what is left. On exit, after an exception too, everything is
    as it was: nothing of the model is touched, but for hooks on a tower's modules, which are removed. A
    compiled model runs uncompiled inside.

    Args:
        model: any module.
        interventions: one or more.
        stream_map: from `mainstem.observe.find_stream`. May be left out for a mainstem tower, or from
            `mainstem.observe.tower_map`: its connections are then asked instead, which works for every
            scheme: there a write is what the branch returns, before the connection weighs it.

    Raises:
        ConfigError: an intervention that the model has no place for, or that is not defined there; gradient
            checkpointing is on, which would run the blocks again outside of the context.
        StreamNotFoundError: a pass took another path than the map.
    """
    model = unwrapped(model)
    chosen = [interventions] if isinstance(interventions, Intervention) else list(interventions)
    if model.training and any(getattr(m, "gradient_checkpointing", False) is True for m in model.modules()):
        raise ConfigError(
            f"{type(model).__name__} has gradient checkpointing on, which would run its blocks again without "
            "the interventions. Turn it off (gradient_checkpointing_disable()) or call model.eval()."
        )
    if stream_map is None or isinstance(stream_map, TowerMap):
        with through_connections(model, chosen):
            yield
        return
    mode = InterveneMode(model, stream_map, chosen)
    with torch.compiler.set_stance("force_eager"), mode.tracker, mode:
        yield
