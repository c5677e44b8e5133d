"""What a pass predicts: words at the top, and every state read out by the model's own tail."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.audit._seen import Seen
from mainstem.measure import Result, lens_divergence
from mainstem.measure.geometry import measuring_dtype

NUM_BEST = 5


@dataclasses.dataclass(frozen=True)
class Word(Result):
    """A token that is predicted.

    Attributes:
        id: its number; ``text``: what it reads as.
        probability: in [0, 1]; ``logit``: as the model returns it, after any soft-cap or scale.
    """

    id: int
    text: str
    probability: float
    logit: float


@dataclasses.dataclass(frozen=True)
class StateReadout(Result):
    """What one state predicts after one token, read out as if it were the last (logit lens).

    Attributes:
        state: ``l``: before block ``l``; the last one is the model's own prediction.
        top: its best words.
        probability: of the model's own best word; ``rank``: its place, 0 the best.
        kl: ``KL(p_model || p_state)``, nats.
    """

    state: int
    top: tuple[Word, ...]
    probability: float
    rank: int
    kl: float


def best_words(seen: Seen, logits: Tensor, count: int = NUM_BEST) -> tuple[Word, ...]:
    """Return the likeliest words of ``logits``, ``[vocab]``."""
    wide = logits.to(measuring_dtype(logits.dtype))
    chances = wide.softmax(-1)
    best = wide.topk(min(count, len(wide)))
    return tuple(
        Word(id=i, text=seen.subject.text_of(i), probability=float(chances[i]), logit=float(value))
        for value, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )


def readouts(seen: Seen, position: int) -> tuple[StateReadout, ...]:
    """Read out every state at one position; none where the model predicts no words.

    A tail takes states of the pass's own shape, each token by itself; so the states of one token are given to
    it as if they were the tokens of a sentence, which costs ``states / pos`` tails instead of ``states``.
    Where the last of them does not then give the model's own logits, every state is read out whole.
    """
    if seen.logits is None or seen.recording.tail is None:
        return ()
    own = seen.logits[position]
    logits = _at_position(seen, position)
    if not torch.allclose(logits[-1], own, rtol=1e-3, atol=1e-3 * float(own.abs().max())):
        logits = torch.stack(
            [state_logits(seen, number)[position] for number in range(len(seen.film.states))]
        )
    logits[-1] = own  # to the bit, whatever the order of sums in a batch of other tokens
    divergence = lens_divergence(own.expand_as(logits), logits).kl.tolist()
    wide = logits.to(measuring_dtype(logits.dtype))
    best = int(own.argmax())
    chances = wide.softmax(-1)[:, best].tolist()
    ranks = (wide > wide[:, best, None]).sum(-1).tolist()
    return tuple(
        StateReadout(state, best_words(seen, logits[state]), chances[state], ranks[state], divergence[state])
        for state in range(len(logits))
    )


def state_logits(seen: Seen, number: int) -> Tensor:
    """Return what the model's tail makes of one state, ``[pos, vocab]``."""
    assert seen.recording.tail is not None
    shape = tuple(seen.recording.tail.shape)
    with torch.no_grad():
        return seen.recording.tail(seen.film.states[number].reshape(shape))[0]


def _at_position(seen: Seen, position: int) -> Tensor:
    """Return the logits of all states at one position, ``[state, vocab]``."""
    assert seen.recording.tail is not None
    states = torch.stack([state[0, position] for state in seen.film.states])
    num_tokens, shape = len(seen.ids), tuple(seen.recording.tail.shape)
    found: list[Tensor] = []
    with torch.no_grad():
        for piece in states.split(num_tokens):
            filled = (
                piece
                if len(piece) == num_tokens
                else torch.cat([piece, piece[-1:].expand(num_tokens - len(piece), *piece.shape[1:])])
            )
            found.append(seen.recording.tail(filled.reshape(shape))[0][: len(piece)])
    return torch.cat(found)


def lens_grids(seen: Seen) -> dict[str, NDArray[np.float32] | NDArray[np.int32]]:
    """Return the lens at every state and token, each ``[state, pos]``; nothing where no words are predicted.

    ``lens_probability`` of each token's own final best word, ``lens_kl`` against the model's own prediction,
    ``lens_top`` the id of the state's best word.
    """
    if seen.logits is None or seen.recording.tail is None:
        return {}
    best = seen.logits.argmax(-1, keepdim=True)
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for number in range(len(seen.film.states)):
        logits = state_logits(seen, number)
        wide = logits.to(measuring_dtype(logits.dtype))
        chance = (wide.gather(-1, best).squeeze(-1) - wide.logsumexp(-1)).exp()
        columns.append((chance, lens_divergence(seen.logits, logits).kl, logits.argmax(-1)))
    chance, kl, top = (torch.stack(column).cpu().numpy() for column in zip(*columns, strict=True))
    return {
        "lens_probability": chance.astype(np.float32),
        "lens_kl": kl.astype(np.float32),
        "lens_top": top.astype(np.int32),
    }


def token_losses(seen: Seen) -> list[float]:
    """Return the loss of predicting each token from those before it, nats; nan for the first.

    Empty where there is no loss of a next token.
    """
    if seen.logits is None or seen.subject.kind != "causal":
        return []
    logits = seen.logits[:-1].to(measuring_dtype(seen.logits.dtype))
    targets = torch.tensor(seen.ids[1:], device=logits.device)
    found = logits.logsumexp(-1) - logits.gather(-1, targets[:, None]).squeeze(-1)
    return [float("nan"), *found.tolist()]
