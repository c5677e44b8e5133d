"""Whether the word is still there: a state's nearest embedding."""

from __future__ import annotations

import dataclasses
from typing import Self

import torch
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.measure._host import ratio
from mainstem.measure._results import Result, Split, require_positive
from mainstem.measure.events import BlockEvent, Reducer
from mainstem.measure.geometry import measuring_dtype


def nearest_embedding(states: Tensor, embedding: Tensor, *, chunk_tokens: int = 128) -> Tensor:
    """Return ``argmax_v cos(h_t, E_v)``, ``[tokens]`` int64; the first of equals.

    Args:
        states: ``[tokens, width]``; computed in fp32 (fp64 for fp64).
        embedding: ``[vocab, width]``; a row of zeros has cosine 0 with everything.
        chunk_tokens: tokens compared at a time: one ``[chunk, vocab]`` is held.
    """
    dtype = measuring_dtype(states.dtype)
    return nearest_of(states.to(dtype), unit_rows(embedding.to(states.device, dtype)), chunk_tokens)


def unit_rows(embedding: Tensor) -> Tensor:
    """Rows at length 1; a row of zeros stays."""
    norm = torch.linalg.vector_norm(embedding, dim=-1, keepdim=True)
    return torch.where(norm == 0, 0.0, embedding / norm)


def nearest_of(states: Tensor, unit: Tensor, chunk_tokens: int) -> Tensor:
    """``argmax_v cos``, ``unit`` being rows of length 1 in the states' dtype."""
    # The state's own norm is one factor for all words and changes no order.
    return torch.cat([(rows @ unit.T).argmax(-1) for rows in states.split(chunk_tokens)])


@dataclasses.dataclass(frozen=True)
class StateIdentity(Result):
    """Share of tokens whose own embedding is the nearest to a state by cosine.

    Attributes:
        state: ``l``: before block ``l``; the last one is after the last block.
        nearest: the share.
    """

    state: int
    nearest: Split


@dataclasses.dataclass(frozen=True)
class IdentityResult(Result):
    """Token identity by depth.

    Attributes:
        states: one entry a state, ``0 .. num_blocks``.
        majority: share that always naming the most frequent of these tokens would get.
        every: positions looked at: the multiples of this.
        num_tokens: how many tokens were.
    """

    states: tuple[StateIdentity, ...]
    majority: Split
    every: int
    num_tokens: int


class NearestEmbedding(Reducer):
    """Ask at every state which word's embedding is nearest by cosine, and whether it is the token's own.

    ``share_l = E_t[ argmax_v cos(h_l,t, E_v) == token_t ]``: the probe of token identity that needs no
    training (compare Feucht et al., arXiv 2406.20086). Several streams are asked through their mean. Costs
    ``2 * width * vocab`` FLOPs a state and token looked at, and holds one copy of the embedding.

    Args:
        embedding: ``[vocab, width]``, the model's input embedding.
        every: look at positions that are a multiple of this; 1 is exact.
        chunk_tokens: tokens compared at a time.

    Raises:
        ConfigError: the embedding is no matrix, or a number is less than 1.
    """

    name = "nearest_embedding"
    saved = ("_hits", "_counts")

    def __init__(self, embedding: Tensor, *, every: int = 1, chunk_tokens: int = 128):
        if embedding.dim() != 2:
            raise ConfigError(f"An embedding is [vocab, width]; got {list(embedding.shape)}.")
        self.every = require_positive("every", every)
        self.chunk_tokens = require_positive("chunk_tokens", chunk_tokens)
        self._unit = unit_rows(embedding.detach().to(measuring_dtype(embedding.dtype)))
        self._hits: dict[int, list[int]] = {}
        self._counts = {which: torch.zeros(len(embedding), dtype=torch.int64) for which in ("rest", "first")}

    def __getstate__(self) -> dict[str, object]:
        # The embedding is the model's: what travels to another rank or a file is the counts.
        return {**self.__dict__, "_unit": None}

    def update(self, event: BlockEvent) -> None:
        """Ask the states of one block.

        Raises:
            ConfigError: the model reads no tokens, or the states have another width than the embedding.
        """
        ids, width = event.batch.token_ids, self._unit.shape[1]
        if ids is None or event.after.shape[-1] != width:
            raise ConfigError(
                f"The nearest of embeddings of width {width} was asked for; it needs token ids and states of "
                f"that width, and these are {list(event.after.shape)}."
            )
        for state, x in event.states():
            hits = self._hits.setdefault(state, [0, 0])
            for i, which in enumerate(("rest", "first")):
                places = event.batch.places(which, x.device, self.every)
                rows = x.detach().flatten(0, 1).index_select(0, places).to(self._unit.dtype)
                rows = rows.mean(1) if rows.dim() == 3 else rows
                tokens = ids.reshape(-1).to(x.device)[places]
                self._unit = self._unit.to(x.device)
                if len(tokens):
                    found = nearest_of(rows, self._unit, self.chunk_tokens)
                    hits[i] += int((found == tokens).sum())
                if state == 0:
                    counts = self._counts[which]
                    counts += torch.bincount(tokens, minlength=len(counts)).cpu()

    def merge(self, other: Self) -> None:
        """Add what ``other`` has seen."""
        for state, hits in other._hits.items():
            mine = self._hits.setdefault(state, [0, 0])
            self._hits[state] = [a + b for a, b in zip(mine, hits, strict=True)]
        for which, counts in other._counts.items():
            self._counts[which] += counts

    def result(self) -> IdentityResult:
        """The figures so far."""
        rest, first = self._counts["rest"], self._counts["first"]
        num_rest, num_first = int(rest.sum()), int(first.sum())

        def split(of_rest: int, of_first: int, of_all: int) -> Split:
            return Split(
                ratio(of_rest, num_rest), ratio(of_first, num_first), ratio(of_all, num_rest + num_first)
            )

        return IdentityResult(
            states=tuple(StateIdentity(s, split(a, b, a + b)) for s, (a, b) in sorted(self._hits.items())),
            majority=split(int(rest.max()), int(first.max()), int((rest + first).max())),
            every=self.every,
            num_tokens=num_rest + num_first,
        )
