"""One sentence through one model, kept whole: every state, every write, the ledger and the way out."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.audit._checks import clear_failures, num_positions
from mainstem.audit._passes import TOLERANCE
from mainstem.audit._placement import device_of
from mainstem.audit._provenance import speaks
from mainstem.audit._stream import ledger_of
from mainstem.errors import BooksError, ConfigError, MainstemError
from mainstem.intervene import Intervention, intervening
from mainstem.measure import BlockEvent, Reducer
from mainstem.observe import Books, Ledger, Recording, StreamMap, TowerMap, batch_of, recorded, stream_of
from mainstem.sources import LoadedModel, encode

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class WriteName:
    """One write of a pass: its place among all writes, its block, kind, and label in the ledger."""

    index: int
    block: int
    kind: str
    label: str
    sublayer: int


class Subject:
    """A loaded model whose stream is known, ready to be looked at sentence by sentence.

    Attributes:
        loaded: the model and its tokenizer; ``stream_map``: where its stream is, found on a few made-up
            tokens.
        max_tokens: the longest sentence, no longer than the model's positions.
        tolerance: what the books may be off, by dtype.

    Raises:
        MainstemError: it has no tokenizer, or its stream cannot be found.
    """

    def __init__(self, loaded: LoadedModel, *, max_tokens: int = 64):
        if loaded.tokenizer is None:
            raise ConfigError("the model has no tokenizer, so it cannot read a sentence; give one that has.")
        self.loaded, self.model, self.tokenizer = loaded, loaded.model, loaded.tokenizer
        limit = num_positions(self.model)
        self.max_tokens = max_tokens if limit is None else min(max_tokens, limit)
        known = int(getattr(self.model.get_input_embeddings(), "num_embeddings", 2))
        with torch.no_grad(), clear_failures(self.model):
            self.stream_map: StreamMap = stream_of(
                self.model, self.inputs_of([i % known for i in range(min(7, self.max_tokens))])
            )
        dtypes = {p.dtype for p in self.model.parameters()} & TOLERANCE.keys()
        self.tolerance = max(TOLERANCE[dtype] for dtype in dtypes or {torch.bfloat16})

    @property
    def kind(self) -> str:
        """``"causal"``, ``"masked"`` or ``"encoder"``."""
        return str(self.loaded.provenance.get("kind"))

    @property
    def can_break(self) -> bool:
        """Whether its data flow shows what a block leaves, so that it can be changed there."""
        return not isinstance(self.stream_map, TowerMap)

    @property
    def speaks(self) -> bool:
        """Whether the stream leads to a prediction of words."""
        return speaks(self.stream_map)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a sentence, no special token added.

        Raises:
            ConfigError: there are fewer than 2 tokens or more than ``max_tokens``, or one that the model has
                no embedding for.
        """
        ids = encode(self.tokenizer, text)
        if not 2 <= len(ids) <= self.max_tokens:
            raise ConfigError(
                f"the sentence has {len(ids)} token(s); write one of 2 to {self.max_tokens} tokens."
            )
        known = getattr(self.model.get_input_embeddings(), "num_embeddings", None)
        if isinstance(known, int) and max(ids) >= known:
            raise ConfigError(
                f"the tokenizer gives token {max(ids)}, but the model knows {known}: they do not belong "
                "together."
            )
        return ids

    def inputs_of(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return the model's arguments for one sentence."""
        tokens = torch.tensor([list(ids)], device=device_of(self.model))
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if hasattr(self.model.config, "use_cache"):
            inputs["use_cache"] = False
        return inputs

    def text_of(self, token: int) -> str:
        """Return a token as text; one that is a part of a letter shows as the replacement character."""
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def breaking(self, broken: Intervention | None) -> AbstractContextManager[None]:
        """Return the context in which passes are changed by ``broken``, or are as they are.

        Raises:
            ConfigError: the data flow does not show where the stream could be changed.
        """
        if broken is None:
            return nullcontext()
        if not self.can_break:
            raise ConfigError(
                "this tower's stream is known by its connections alone, so no block of it can be broken here."
            )
        return intervening(self.model, broken, self.stream_map)

    def changed_sites(self, one: Intervention) -> list[int]:
        """Return the numbers of the sublayers at whose end an intervention shows."""
        found: list[int] = []
        for block in one.blocks:
            if not 0 <= block < len(self.stream_map.blocks):
                continue  # `intervening` says so
            own = self.stream_map.blocks[block]
            sites = self.stream_map.sites[own.first_site : own.end_site]
            if one.part in ("block", "state"):
                found.append(sites[-1].index)
            else:
                kinds = [s.index for s in sites if one.part in ("writes", *(w.kind for w in s.writes))]
                found.extend(kinds)
        return found


class Film(Reducer):
    """Keeps a copy of every state and of every term that joins the stream, for one pass of a few tokens."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.carried: list[Tensor | None] = []
        self.after: list[Tensor] = []
        self.writes: list[Tensor] = []
        self.names: list[WriteName] = []
        self.sublayers: list[int] = []

    def update(self, event: BlockEvent) -> None:
        """Copy one block."""
        if event.block == 0:
            self.__init__()
        self.states.extend(state.detach().clone() for _, state in event.states())
        for sublayer in event.sublayers:
            carried = None if sublayer.carried is None else sublayer.carried.detach().clone()
            after = sublayer.after.detach().clone()
            for write in sublayer.writes:
                label = f"{event.block}_{write.kind}_out"
                while any(label == name.label for name in self.names[-4:]):
                    label += "'"
                self.names.append(WriteName(len(self.names), event.block, write.kind, label, sublayer.index))
                self.writes.append(write.value.detach().clone())
                self.carried.append(carried)
                self.after.append(after)

    def merge(self, other: Self) -> None:
        """Refuse: tensors of two passes do not add up.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a Film holds the tensors of one pass and cannot be merged.")

    def result(self) -> list[Tensor]:
        """Return the states."""
        return self.states


@dataclasses.dataclass(frozen=True)
class Seen:
    """One pass of one sentence.

    Attributes:
        subject: whose; ``text`` and ``ids``: what was read; ``broken``: what was changed, if anything.
        film: states and writes.
        logits: ``[pos, vocab]``, None where the model predicts no words.
        recording: its books and its way out; ``ledger``: None where there is none, and ``why_no_ledger``.
        seconds: the pass took, recording counted.
    """

    subject: Subject
    text: str
    ids: tuple[int, ...]
    broken: Intervention | None
    film: Film
    logits: Tensor | None
    recording: Recording
    ledger: Ledger | None
    why_no_ledger: str
    seconds: float

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return len(self.subject.stream_map.blocks)

    @functools.cached_property
    def states(self) -> Tensor:
        """``[state, pos, width]``, several streams as one vector; fp32, or fp64 of an fp64 model."""
        return _stacked(self.film.states)

    @functools.cached_property
    def writes(self) -> Tensor:
        """``[write, pos, width]``."""
        return _stacked(self.film.writes)

    @functools.cached_property
    def carried(self) -> Tensor:
        """``[write, pos, width]``: what was kept of the stream where it joined; nan where nothing was."""
        like = self.film.after[0]
        filled = [torch.full_like(like, torch.nan) if c is None else c for c in self.film.carried]
        return _stacked(filled)

    @functools.cached_property
    def after(self) -> Tensor:
        """``[write, pos, width]``: the sum that the write went into."""
        return _stacked(self.film.after)

    @property
    def num_bytes(self) -> int:
        """What is held, about."""
        held = [*self.film.states, *self.film.writes, *self.film.after, *self.film.after]
        tensors = [*held, *held]  # as they came, and stacked
        size = sum(t.numel() * t.element_size() for t in tensors)
        size += 0 if self.ledger is None else self.ledger.rows.numel() * self.ledger.rows.element_size()
        return size + (0 if self.logits is None else 4 * self.logits.numel() * self.logits.element_size())

    @property
    def additivity(self) -> float:
        """Largest relative error of a sum: of every sublayer, or, where one was changed, of the ledger."""
        if self.broken is None:
            return self.recording.books.additivity
        return float("nan") if self.ledger is None else self.ledger.error

    def place(self, position: int | None) -> int:
        """Return a position counted from 0; the last one for None.

        Raises:
            ConfigError: it is outside the sentence.
        """
        length = len(self.ids)
        chosen = length - 1 if position is None else position
        if not -length <= chosen < length:
            raise ConfigError(
                f"position {chosen} is outside the sentence of {length} tokens; give 0 to {length - 1}."
            )
        return chosen % length


def see(subject: Subject, text: str, broken: Intervention | None = None) -> Seen:
    """Run a model on a sentence and keep all of its stream.

    Holds every state, every write and a row of the ledger for each: a few sentences' worth of tokens.

    Args:
        subject: the model.
        text: the sentence, no special token added.
        broken: what is changed meanwhile.

    Raises:
        ConfigError: the sentence is too short or too long, or the model has no place for the change.
        BooksError: the books do not balance.
    """
    ids = subject.encode(text)
    inputs, film = subject.inputs_of(ids), Film()
    begin = time.perf_counter()
    with torch.no_grad(), clear_failures(subject.model), subject.breaking(broken):
        ledger, recording, why = _pass(subject, inputs, film, broken)
    seconds = time.perf_counter() - begin
    seen = Seen(
        subject=subject,
        text=text,
        ids=tuple(ids),
        broken=broken,
        film=film,
        logits=_logits(subject, recording.output),
        recording=recording,
        ledger=ledger,
        why_no_ledger=why,
        seconds=seconds,
    )
    check_books(recording.books, subject.tolerance, changed=broken is not None)
    return seen


def check_books(books: Books, tolerance: float, *, changed: bool) -> None:
    """Refuse a pass whose books do not balance; a sublayer that was changed does not add up, and must not.

    Raises:
        BooksError: they do not.
    """
    worst = books.continuity if changed else max(books.continuity, books.additivity)
    if not worst <= tolerance:
        raise BooksError(
            f"the books do not balance: a sum is off by {worst:.2e} of its size, more than the "
            f"{tolerance:.0e} allowed; no figure is given."
        )


def _pass(
    subject: Subject, inputs: dict[str, Any], film: Film, broken: Intervention | None
) -> tuple[Ledger | None, Recording, str]:
    """Run once for the ledger and all else; again without it where the model has none."""
    changed = [] if broken is None else subject.changed_sites(broken)
    try:
        ledger, recording = ledger_of(
            subject.model, inputs, subject.stream_map, keep_tail=True, reducers=[film], changed=changed
        )
        return ledger.check(10 * subject.tolerance), recording, ""
    except MainstemError as error:
        recording = recorded(
            subject.model, inputs, subject.stream_map, [film], batch=batch_of(inputs), keep_tail=True
        )
        return None, recording, str(error)


def _logits(subject: Subject, output: Any) -> Tensor | None:
    found = output.get(subject.stream_map.output) if subject.speaks else None
    return found[0].detach() if isinstance(found, Tensor) and found.ndim == 3 else None


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    whole = torch.stack([t[0].flatten(1) for t in tensors])
    return whole if whole.dtype == torch.float64 else whole.float()
