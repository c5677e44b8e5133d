"""The passes over the text: they hold sums, never the text."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mainstem.audit._checks import check_vocabulary
from mainstem.audit._placement import device_of, kept_activations
from mainstem.audit._probes import Probes
from mainstem.audit._provenance import speaks
from mainstem.audit._ranks import Ranks
from mainstem.audit._resume import Resume
from mainstem.audit.config import AuditConfig
from mainstem.errors import BooksError, MainstemError, StreamNotFoundError
from mainstem.measure import (
    Batch,
    FirstNonFinite,
    LogitLens,
    LossSums,
    Reducer,
    RoundingAbsorption,
    default_reducers,
    next_token_loss,
    state_from_bytes,
    state_to_bytes,
)
from mainstem.observe import Books, StreamMap, TowerMap, recorded, stream_of
from mainstem.sources import LoadedModel, WindowBatch, Windows, WindowStream

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how far it is, and how far it goes."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error the books may have, by the stream's dtype: a few units of its rounding, for sums of a few
terms."""


class Passes:
    """Reads a text once, its batches shared with other processes and gone on with after an interruption.

    Attributes:
        stream_map: of the text's first batch.
        reducers, lens, loss, books: what they hold after `run` is of the whole text, on every process.
        predicts_next: whether there is a loss of a next token.
        probes: what is asked of the first window, on every process.
        tolerance: largest error that the books may have.
    """

    def __init__(
        self, loaded: LoadedModel, windows: Windows | WindowStream, config: AuditConfig, tell: Progress
    ):
        self.windows, self.tell = windows, tell
        self.model = loaded.model
        self.device = device_of(self.model)
        self.predicts_next = loaded.provenance.get("kind") == "causal"
        tell("finding the stream", 0, 1)
        self._maps: dict[tuple[Any, ...], StreamMap] = {}
        self.stream_map = self.map_for(next(self._batches()))
        self.reducers: list[Reducer] = default_reducers(rounding_every=config.rounding_every)
        self.lens = LogitLens() if config.lens and config.asks("answer") and speaks(self.stream_map) else None
        self.probes = Probes(loaded, self.stream_map, config)
        self.loss = LossSums()
        self.books = Books()
        dtypes = {p.dtype for p in self.model.parameters()} & TOLERANCE.keys()
        self.tolerance = max(TOLERANCE[dtype] for dtype in dtypes or {torch.bfloat16})

    def run(self, ranks: Ranks, resume: Resume | None = None, kept: Mapping[str, Any] | None = None) -> None:
        """Read the text and put together what all processes have found.

        Args:
            ranks: which process this is.
            resume: keeps what was summed so far; ``kept`` is what it kept of an earlier run.
        """
        skip = 0
        if kept is not None:
            self.load_state_dict(kept["state"])
            skip = kept["done"]
        digest, saved = hashlib.sha256(), skip
        for number, window in enumerate(self._batches()):
            if number == 0:
                self._first_window(window.to(self.device))
            digest.update(window.input_ids.numpy().tobytes())
            if number < skip:
                if number + 1 == skip and kept is not None and kept["tokens"] != digest.hexdigest():
                    raise MainstemError(
                        "The text is not what it was when this audit was interrupted: its first "
                        f"{skip} batches hold other tokens. Begin again with --fresh."
                    )
                continue
            self.tell("reading the stream", number, self.windows.expected_batches or number + 1)
            if ranks.takes(number):
                self._batch(window.to(self.device))
            if resume is not None and (number + 1 - saved) * self.windows.batch_size >= resume.every:
                resume.save(number + 1, digest.hexdigest(), self.state_dict())
                saved = number + 1
        total = self.windows.expected_batches or 1
        if resume is not None and 0 < saved < total:
            resume.save(total, digest.hexdigest(), self.state_dict())
        self.tell("reading the stream", total, total)
        self._share(ranks)

    # ---- sums ----

    def _parts(self) -> dict[str, Reducer]:
        lens = [] if self.lens is None else [self.lens]
        return {r.name: r for r in (*self.reducers, *self.probes.reducers, *lens)}

    def state_dict(self) -> dict[str, Any]:
        """Return all sums so far, between two batches."""
        return {
            "reducers": {name: reducer.state_dict() for name, reducer in self._parts().items()},
            "loss": dataclasses.asdict(self.loss),
            "books": dataclasses.asdict(self.books),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the sums by what ``state_dict`` gave."""
        for name, reducer in self._parts().items():
            reducer.load_state_dict(state["reducers"][name])
        self.loss, self.books = LossSums(**state["loss"]), Books(**state["books"])

    def _share(self, ranks: Ranks) -> None:
        """Add up what all processes have, in the order of their numbers, so that all hold the same."""
        if ranks.size == 1 or ranks.weights:
            return
        first, *others = (state_from_bytes(d) for d in ranks.gather(state_to_bytes(self.state_dict())))
        self.load_state_dict(first)
        for state in others:
            for name, reducer in self._parts().items():
                other = copy.copy(reducer)
                other.load_state_dict(state["reducers"][name])
                reducer.merge(other)
            self.loss += LossSums(**state["loss"])
            self.books.merge(Books(**state["books"]))

    # ---- one batch ----

    def _batches(self) -> Iterator[WindowBatch]:
        for window in self.windows:
            check_vocabulary(self.model, window)
            yield window

    def _first_window(self, window: WindowBatch) -> None:
        one = dataclasses.replace(
            window,
            input_ids=window.input_ids[:1],
            attention_mask=window.attention_mask[:1],
            position_ids=window.position_ids[:1],
        )
        batch = Batch(mask=one.attention_mask.bool(), token_ids=one.input_ids)
        with kept_activations(self.model):
            self.probes.window(self.inputs_of(one), self.map_for(one), batch, self.tolerance)

    def _batch(self, window: WindowBatch) -> None:
        inputs, stream_map = self.inputs_of(window), self.map_for(window)
        mask = window.attention_mask.bool()
        batch = Batch(mask=mask, token_ids=window.input_ids, first_sequence=window.first_sequence)
        reducers = [*self.reducers, *self.probes.reducers]
        if isinstance(self.stream_map, TowerMap) and not self.stream_map.adds:
            reducers = [r for r in reducers if not isinstance(r, RoundingAbsorption)]
        seen = recorded(
            self.model, inputs, stream_map, reducers, batch=batch, keep_tail=self.lens is not None
        )
        self._check(seen.books)
        logits = seen.output.get(self.stream_map.output)
        if self.predicts_next and isinstance(logits, Tensor):
            self.loss += next_token_loss(logits, window.input_ids, mask)
        if self.lens is not None and seen.tail is not None and isinstance(logits, Tensor):
            self.lens.begin_pass(logits, seen.tail)
            del seen
            again = recorded(self.model, inputs, stream_map, [self.lens], batch=batch)
            self._check(again.books)

    def map_for(self, window: WindowBatch) -> StreamMap:
        """Return the map for inputs like these: with padding or positions a model may take another path.

        Raises:
            StreamNotFoundError: the stream is not the one that the other windows have.
        """
        inputs = self.inputs_of(window)
        kind = (*sorted(inputs), bool(window.attention_mask.all()))
        if kind not in self._maps:
            found = stream_of(self.model, inputs)
            if any(found.blocks != known.blocks for known in self._maps.values()):
                raise StreamNotFoundError(
                    f"{type(self.model).__name__} has {len(found.sites)} sublayers for some windows and "
                    f"{len(self.stream_map.sites)} for others. Choose --tokens so that no window is padded."
                )
            self._maps[kind] = found
        return self._maps[kind]

    def inputs_of(self, window: WindowBatch) -> dict[str, Any]:
        """Return the model's arguments for some windows."""
        inputs: dict[str, Any] = window.to(self.device).inputs_for(self.model)
        if hasattr(self.model.config, "use_cache"):
            inputs["use_cache"] = False
        return inputs

    # ---- the books ----

    def _check(self, books: Books) -> None:
        self.books.merge(books)
        errors = {"additivity": self.books.additivity, "continuity": self.books.continuity}
        worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
        if errors[worst] <= self.tolerance:
            return
        site = self.books.additivity_site if worst == "additivity" else self.books.continuity_site
        raise BooksError(
            f"The books of this model do not balance: {worst} is off by {errors[worst]:.2e} "
            f"{self._place(site)}, more than the {self.tolerance:.0e} allowed for its dtype. No "
            f"figure is given. {self._likely_cause()}"
        )

    def _place(self, site: int) -> str:
        if not 0 <= site < len(self.stream_map.sites):
            return "after the last block"
        return f"at block {self.stream_map.sites[site].block} (sublayer {site})"

    def _likely_cause(self) -> str:
        nonfinite = next(r for r in self.reducers if isinstance(r, FirstNonFinite)).result().first
        if nonfinite is None:
            return "A hook or a module that changes the stream in place can cause this."
        return (
            f"Its activations are not finite from block {nonfinite.block} ({nonfinite.site}), token "
            f"{nonfinite.position} of window {nonfinite.sequence} on; a wider --dtype may help."
        )
