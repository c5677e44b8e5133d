"""What takes more than a pass of a sentence: every block broken in turn, and the gradient by depth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from mainstem.audit._checks import clear_failures
from mainstem.audit._placement import kept_activations
from mainstem.audit._probes import let_gradients_in
from mainstem.audit._seen import Film, Subject
from mainstem.errors import ConfigError
from mainstem.intervene import Intervention, SweepConfig, sweep
from mainstem.measure import BlockEvent, Result
from mainstem.observe import TowerMap, batch_of, recorded

Tell = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class DamageMatrix(Result):
    """Every block broken in turn, on one sentence.

    Attributes:
        change: ``[block, state]`` fp32: mean over tokens but the first of ``|h' - h| / |h|``; nan where the
            state is not above the block, or the block was not come to.
        incoming: by state, the largest change of its column; nan where there is none.
        kl, top1, loss_change: by block, at the top; see `mainstem.intervene.FloorDamage`. nan where there is
            none.
        cosine_top: by block, cosine of the last state with the whole model's.
        finished: whether every block was broken; ``passes``: made; ``restarted``: whether they began at the
            broken block, else ``why_not``.
    """

    change: NDArray[np.float32]
    incoming: tuple[float, ...]
    kl: tuple[float, ...]
    top1: tuple[float, ...]
    loss_change: tuple[float, ...]
    cosine_top: tuple[float, ...]
    finished: bool
    passes: int
    restarted: bool
    why_not: str


def damage_matrix(
    subject: Subject, text: str, broken: Callable[[int], Intervention], tell: Tell | None = None
) -> DamageMatrix:
    """Break every block in turn and measure every state above it and the top.

    Args:
        subject: the model.
        text: the sentence.
        broken: the intervention for a block.
        tell: told of the passes done and of all; where it raises KeyboardInterrupt, what is done is returned.

    Raises:
        ConfigError: the sentence is too short or too long, or the model has no place for a break.
    """
    if not subject.can_break:
        raise ConfigError("this tower's stream is known by its connections alone, so no block can be broken.")
    inputs, num_blocks = subject.inputs_of(subject.encode(text)), len(subject.stream_map.blocks)
    with clear_failures(subject.model):
        found = sweep(subject.model, [inputs], subject.stream_map, SweepConfig(broken=broken), tell)
    change = np.full((num_blocks, num_blocks + 1), np.nan, dtype=np.float32)
    columns = {name: [math.nan] * num_blocks for name in ("kl", "top1", "loss", "cosine")}
    for one in found.floors:
        for state in one.states:
            change[one.floor, state.state] = state.change.rest
        columns["kl"][one.floor], columns["top1"][one.floor] = one.kl.all, one.top1.all
        columns["loss"][one.floor] = one.nll_delta if subject.kind == "causal" else math.nan
        columns["cosine"][one.floor] = one.states[-1].cosine.rest if one.states else math.nan
    incoming = [float(np.nanmax(c)) if not np.isnan(c).all() else math.nan for c in change.T]
    return DamageMatrix(
        change=change,
        incoming=tuple(incoming),
        kl=tuple(columns["kl"]),
        top1=tuple(columns["top1"]),
        loss_change=tuple(columns["loss"]),
        cosine_top=tuple(columns["cosine"]),
        finished=found.finished,
        passes=found.num_passes,
        restarted=found.restarted,
        why_not=found.why_not,
    )


@dataclasses.dataclass(frozen=True)
class SentenceGradients(Result):
    """Whether learning signals get down, on one sentence.

    Attributes:
        norm: ``[state, pos]`` fp64: ``|dL/dh_l,t|``, ``L`` the sum of the tokens' losses, nats per unit of
            the stream. A row for each state, ``0 .. num_blocks``.
        loss: mean over ``loss_tokens`` tokens, nats.
    """

    norm: NDArray[np.float64]
    loss: float
    loss_tokens: int

    @property
    def bottom_to_top(self) -> float:
        """Mean norm at state 0 over that at the last, tokens but the first; nan where the latter is 0."""
        bottom, top = float(self.norm[0, 1:].mean()), float(self.norm[-1, 1:].mean())
        return bottom / top if top else math.nan


class _Graph(Film):
    """Keeps the states themselves, with their gradients' way."""

    def update(self, event: BlockEvent) -> None:
        """Keep the states of one block."""
        if event.block == 0:
            self.states = []
        self.states.extend(state for _, state in event.states())


def gradients(subject: Subject, text: str, broken: Intervention | None = None) -> SentenceGradients:
    """Send the gradient of a sentence's loss down, and measure it at every state.

    One pass and one backward pass to state 0; no parameter's ``grad`` is made or changed.

    Raises:
        ConfigError: the model has no loss of a next token, or its gradient does not go through the states.
    """
    ids = subject.encode(text)
    if subject.kind != "causal" or not subject.speaks:
        raise ConfigError("there is no loss of a next token in this model, so no gradient comes of it.")
    stream_map = subject.stream_map
    if isinstance(stream_map, TowerMap) and not (stream_map.hands_on and broken is None):
        raise ConfigError("the gradient of this tower does not go through its states alone; none is given.")
    inputs, kept = subject.inputs_of(ids), _Graph()
    handle = subject.model.get_input_embeddings().register_forward_hook(let_gradients_in)
    try:
        with torch.enable_grad(), clear_failures(subject.model), kept_activations(subject.model):
            with subject.breaking(broken):
                seen = recorded(subject.model, inputs, stream_map, [kept], batch=batch_of(inputs))
            loss = _summed_loss(seen.output[stream_map.output], inputs["input_ids"])
            found = torch.autograd.grad(loss, kept.states, allow_unused=True)
    finally:
        handle.remove()
    reached = [
        grad for grad in found if isinstance(grad, Tensor)
    ]  # torch gives None for what is not on the way
    if len(reached) < len(found):
        raise ConfigError("the gradient does not pass through every state as it was recorded; none is given.")
    norms = torch.stack([torch.linalg.vector_norm(g[0].flatten(1).double(), dim=-1) for g in reached])
    count = len(ids) - 1
    return SentenceGradients(norms.cpu().numpy(), float(loss.detach()) / count, count)


def _summed_loss(logits: Tensor, ids: Tensor) -> Tensor:
    wide: Any = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide[0, :-1], ids[0, 1:], reduction="sum")
