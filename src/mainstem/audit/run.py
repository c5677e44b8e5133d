"""The main job: load, find the stream, read the text once, and say what was found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mainstem.audit._assemble import assemble
from mainstem.audit._checks import check_device, check_vocabulary, clear_failures, window_that_fits
from mainstem.audit._probes import Probes
from mainstem.audit._provenance import provenance_of, speaks
from mainstem.audit._sweep import Skips
from mainstem.audit.config import AuditConfig
from mainstem.audit.result import AuditResult
from mainstem.errors import BooksError, StreamNotFoundError
from mainstem.measure import (
    Batch,
    FirstNonFinite,
    LogitLens,
    LossSums,
    Reducer,
    default_reducers,
    next_token_loss,
)
from mainstem.observe import Books, StreamMap, find_stream, record
from mainstem.sources import LoadedModel, WindowBatch, Windows, load_model, load_text, make_windows

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how far it is, and how far it goes."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error the books may have, by the stream's dtype: a few units of its rounding, for sums of a few
terms."""


def run_audit(config: AuditConfig, progress: Progress | None = None) -> AuditResult:
    """Audit a model on a text.

    Args:
        config: what to do.
        progress: told of every step.

    Raises:
        MainstemError: a mistake in the model, the text or the options; no stream was found; or the books do
            not balance, in which case no figure is given.
    """
    tell = progress or _silent
    check_device(config.device)
    tell("reading the text", 0, 1)
    text = load_text(config.text)
    tell("loading the model", 0, 1)
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        device=config.device,
    )
    windows = make_windows(
        loaded.tokenizer,
        text,
        num_tokens=config.tokens,
        window=window_that_fits(loaded.model, config.window),
        batch_size=config.batch_size,
        first_token=config.first_token,
        pad_side=config.pad_side,
    )
    return audit_windows(loaded, windows, config, tell)


def map_of(
    name: str,
    *,
    dtype: str = "float32",
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> StreamMap:
    """Load a model and find its stream on a few made-up tokens.

    Raises:
        MainstemError: a mistake in the model or the options, or no stream was found.
    """
    check_device(device)
    loaded = load_model(
        name, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code, device=device
    )
    known = getattr(loaded.model.get_input_embeddings(), "num_embeddings", 2)
    ids = torch.arange(2 * 7, device=loaded.model.device).reshape(2, 7) % known
    with clear_failures(loaded.model):
        return find_stream(loaded.model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def audit_windows(
    loaded: LoadedModel, windows: Windows, config: AuditConfig, progress: Progress | None = None
) -> AuditResult:
    """Audit a model that is loaded on windows that are cut; see :func:`run_audit`."""
    tell = progress or _silent
    check_vocabulary(loaded.model, windows)
    with torch.no_grad(), clear_failures(loaded.model):
        job = _Job(loaded, windows, config, tell)
        job.run()
        results = {r.name: r.result() for r in job.reducers}
        swept = job.skips.run(windows, results)
    return assemble(
        provenance=provenance_of(config, loaded, windows, job.stream_map),
        stream_map=job.stream_map,
        reducers=results,
        lens=job.lens.result() if job.lens is not None else None,
        loss=job.loss if job.predicts_next else None,
        probed=job.probes.close(),
        swept=swept,
        books=job.books,
        tolerance=job.tolerance,
        decode=_decoder(loaded.tokenizer),
    )


class _Job:
    """The passes over the text."""

    def __init__(self, loaded: LoadedModel, windows: Windows, config: AuditConfig, tell: Progress):
        self.loaded, self.windows, self.tell = loaded, windows, tell
        self.model = loaded.model
        self.predicts_next = loaded.provenance.get("kind") == "causal"
        tell("finding the stream", 0, 1)
        self._maps: dict[tuple[Any, ...], StreamMap] = {}
        self.stream_map = self._map_for(next(iter(windows)))
        self.reducers: list[Reducer] = default_reducers(rounding_every=config.rounding_every)
        self.lens = LogitLens() if config.lens and config.asks("answer") and speaks(self.stream_map) else None
        self.probes = Probes(self.model, str(loaded.provenance.get("kind")), self.stream_map, config)
        kind = str(loaded.provenance.get("kind"))
        self.skips = Skips(self.model, kind, config, self._inputs, self._map_for, tell)
        self.loss = LossSums()
        self.books = Books()
        dtypes = {p.dtype for p in self.model.parameters()} & TOLERANCE.keys()
        self.tolerance = max(TOLERANCE[dtype] for dtype in dtypes or {torch.bfloat16})

    def run(self) -> None:
        """Read the text."""
        total = len(self.windows)
        for done, window in enumerate(self.windows):
            if done == 0:
                self._first_window(window.to(self.model.device))
            self.tell("reading the stream", done, total)
            self._batch(window.to(self.model.device))
        self.tell("reading the stream", total, total)

    def _first_window(self, window: WindowBatch) -> None:
        one = dataclasses.replace(
            window,
            input_ids=window.input_ids[:1],
            attention_mask=window.attention_mask[:1],
            position_ids=window.position_ids[:1],
        )
        batch = Batch(mask=one.attention_mask.bool(), token_ids=one.input_ids)
        self.probes.window(self._inputs(one), self._map_for(one), batch, self.tolerance)

    def _batch(self, window: WindowBatch) -> None:
        inputs, stream_map = self._inputs(window), self._map_for(window)
        mask = window.attention_mask.bool()
        batch = Batch(mask=mask, token_ids=window.input_ids, first_sequence=window.first_sequence)
        reducers = [*self.reducers, *([self.probes.nearest] if self.probes.nearest is not None else [])]
        seen = record(self.model, inputs, stream_map, reducers, batch=batch, keep_tail=self.lens is not None)
        self._check(seen.books)
        logits = seen.output.get(self.stream_map.output)
        if self.predicts_next and isinstance(logits, Tensor):
            self.loss += next_token_loss(logits, window.input_ids, mask)
        if self.lens is not None and seen.tail is not None and isinstance(logits, Tensor):
            self.lens.begin_pass(logits, seen.tail)
            del seen
            again = record(self.model, inputs, stream_map, [self.lens], batch=batch)
            self._check(again.books)

    def _map_for(self, window: WindowBatch) -> StreamMap:
        """Return the map for inputs like these: with padding or positions a model may take another path.

        Raises:
            StreamNotFoundError: the stream is not the one that the other windows have.
        """
        inputs = self._inputs(window)
        kind = (*sorted(inputs), bool(window.attention_mask.all()))
        if kind not in self._maps:
            found = find_stream(self.model, inputs)
            if any(found.blocks != known.blocks for known in self._maps.values()):
                raise StreamNotFoundError(
                    f"{type(self.model).__name__} has {len(found.sites)} sublayers for some windows and "
                    f"{len(self.stream_map.sites)} for others. Choose --tokens so that no window is padded."
                )
            self._maps[kind] = found
        return self._maps[kind]

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

    def _inputs(self, window: WindowBatch) -> dict[str, Any]:
        inputs: dict[str, Any] = window.to(self.model.device).inputs_for(self.model)
        if hasattr(self.model.config, "use_cache"):
            inputs["use_cache"] = False
        return inputs


def _decoder(tokenizer: Any) -> Callable[[int], str]:
    return lambda token: str(tokenizer.decode([token]))


def _silent(what: str, done: int, total: int) -> None:
    return None
