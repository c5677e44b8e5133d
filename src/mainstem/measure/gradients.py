"""Whether learning signals get down: the gradient of the loss with respect to the stream."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.measure._host import SplitSums, ratio
from mainstem.measure._results import Result, Split
from mainstem.measure.events import Batch, BlockEvent, Reducer
from mainstem.measure.geometry import token_norm


@dataclasses.dataclass(frozen=True)
class StateGradient(Result):
    """``E_t |dL/dh_t|`` at one state.

    Attributes:
        state: ``l``: before block ``l``; the last one is after the last block.
        norm: mean over tokens, nats per unit of the stream.
    """

    state: int
    norm: Split


@dataclasses.dataclass(frozen=True)
class GradientResult(Result):
    """One entry a state, ``0 .. num_blocks``."""

    states: tuple[StateGradient, ...]
    num_tokens: int

    @property
    def bottom_to_top(self) -> float:
        """``G_0 / G_L`` over all tokens but the first of each sequence; nan where ``G_L`` is 0."""
        return ratio(self.states[0].norm.rest, self.states[-1].norm.rest)


class StreamGradients(Reducer):
    """The norm of ``dL/dh_l`` for each token, at every state ``l``, from one backward pass.

    ``G_l = E_t |dL/dh_l,t|``, ``L`` the **sum** of the tokens' losses, so that the figure does not depend on
    how many tokens there are (compare Mix-LN, arXiv 2412.13795). Several streams are one vector. Record the
    pass with gradients on, then hand its loss to `backward`: gradients go from the loss to state 0 and no
    further, so that no parameter's ``grad`` is made or changed, and no weight's gradient is computed.
    Until then the pass's graph is alive, as in training: its memory grows with depth and with the batch, not
    with the corpus.
    """

    name = "stream_gradients"
    saved = ("_sums", "_num_tokens")

    def __init__(self) -> None:
        self._sums = SplitSums()
        self._num_tokens = 0
        self._bottom: Tensor | None = None
        self._found: dict[int, NDArray[np.float64]] = {}
        self._num_states = 0

    def __getstate__(self) -> dict[str, Any]:
        # A graph belongs to a pass that is not complete.
        return {**self.__dict__, "_bottom": None, "_found": {}}

    def update(self, event: BlockEvent) -> None:
        """Put a hook on the states of one block.

        Raises:
            ConfigError: gradients do not reach the stream.
        """
        if event.block == 0:
            self._bottom, self._found, self._num_states = event.before, {}, 0
        for state, x in event.states():
            if not x.requires_grad:
                raise ConfigError(
                    "The stream has no gradients: record the pass under torch.enable_grad(), and where all "
                    "parameters are frozen give the embedding's output requires_grad_()."
                )
            self._num_states += 1
            if state > 0:
                x.register_hook(functools.partial(self._take, state))

    def _take(self, state: int, grad: Tensor) -> None:
        self._found[state] = token_norm(grad).cpu().double().numpy()

    def backward(self, loss: Tensor, batch: Batch) -> None:
        """Send the gradient of one recorded pass down and add its norms.

        Args:
            loss: a scalar: the sum of the tokens' losses.
            batch: the tokens of the pass.

        Raises:
            ConfigError: no pass was recorded, or the gradient does not pass through every state (a copy of
                one was recorded).
        """
        bottom, self._bottom = self._bottom, None
        if bottom is None:
            raise ConfigError("There is no recorded pass to send a gradient through: record one first.")
        (grad,) = torch.autograd.grad(loss, [bottom])
        self._take(0, grad)
        missing = sorted(set(range(self._num_states)) - self._found.keys())
        found, self._found = self._found, {}
        if missing:
            raise ConfigError(
                f"The gradient does not pass through states {missing[:8]} of {self._num_states} as they were "
                "recorded; none is given."
            )
        self._num_tokens += int(batch.mask.sum())
        for state, norms in sorted(found.items()):
            self._sums.add([state], norms[None], batch.host)

    def merge(self, other: Self) -> None:
        """Add what ``other`` has seen."""
        self._sums.merge(other._sums)
        self._num_tokens += other._num_tokens

    def result(self) -> GradientResult:
        """The figures so far."""
        states = tuple(StateGradient(s, self._sums.mean(s)) for s in sorted(self._sums.names))
        return GradientResult(states, self._num_tokens)
