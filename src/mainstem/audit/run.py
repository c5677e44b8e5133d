"""The main job: load, find the stream, read the text once, and say what was found."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mainstem
from mainstem.audit._assemble import assemble
from mainstem.audit.config import AuditConfig
from mainstem.audit.result import AuditResult
from mainstem.errors import BooksError, MainstemError
from mainstem.measure import Batch, LogitLens, LossSums, Reducer, default_reducers, next_token_loss
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
        window=_window_that_fits(loaded.model, config.window),
        batch_size=config.batch_size,
        first_token=config.first_token,
        pad_side=config.pad_side,
    )
    return audit_windows(loaded, windows, config, tell)


def audit_windows(
    loaded: LoadedModel, windows: Windows, config: AuditConfig, progress: Progress | None = None
) -> AuditResult:
    """Audit a model that is loaded on windows that are cut; see :func:`run_audit`."""
    tell = progress or _silent
    job = _Job(loaded, windows, config, tell)
    with torch.no_grad():
        job.run()
    return assemble(
        provenance=_provenance(config, loaded, windows, job.stream_map),
        stream_map=job.stream_map,
        reducers={r.name: r.result() for r in job.reducers},
        lens=job.lens.result() if job.lens is not None else None,
        loss=job.loss if job.predicts_next else None,
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
        self.stream_map = find_stream(self.model, self._inputs(next(iter(windows))))
        self.reducers: list[Reducer] = default_reducers(rounding_every=config.rounding_every)
        speaks = self.stream_map.output in ("logits", "prediction_logits")
        self.lens = LogitLens() if config.lens and speaks else None
        self.loss = LossSums()
        self.books = Books()
        self.tolerance = TOLERANCE[next(self.model.parameters()).dtype]

    def run(self) -> None:
        """Read the text."""
        total = len(self.windows)
        for done, window in enumerate(self.windows):
            self.tell("reading the stream", done, total)
            self._batch(window.to(self.model.device))
        self.tell("reading the stream", total, total)

    def _batch(self, window: WindowBatch) -> None:
        inputs = self._inputs(window)
        mask = window.attention_mask.bool()
        batch = Batch(mask=mask, token_ids=window.input_ids, first_sequence=window.first_sequence)
        seen = record(
            self.model, inputs, self.stream_map, self.reducers, batch=batch, keep_tail=self.lens is not None
        )
        self._check(seen.books)
        logits = seen.output.get(self.stream_map.output)
        if self.predicts_next and isinstance(logits, Tensor):
            self.loss += next_token_loss(logits, window.input_ids, mask)
        if self.lens is not None and seen.tail is not None and isinstance(logits, Tensor):
            self.lens.begin_pass(logits, seen.tail)
            del seen
            again = record(self.model, inputs, self.stream_map, [self.lens], batch=batch)
            self._check(again.books)

    def _check(self, books: Books) -> None:
        self.books.merge(books)
        worst = max(self.books.additivity, self.books.continuity)
        if not worst <= self.tolerance:
            kind = "additivity" if not self.books.additivity <= self.tolerance else "continuity"
            site = self.books.additivity_site if kind == "additivity" else self.books.continuity_site
            block = self.stream_map.sites[site].block if site >= 0 else -1
            error = getattr(self.books, kind)
            raise BooksError(
                f"the books of this model do not balance: {kind} is off by {error:.2e} at block {block} "
                f"(sublayer {site}), more than the {self.tolerance:.0e} allowed for its dtype. No figure "
                "is given. NaN activations or a hook that changes the stream can cause this; "
                "try --dtype float32."
            )

    def _inputs(self, window: WindowBatch) -> dict[str, Any]:
        inputs: dict[str, Any] = window.to(self.model.device).inputs_for(self.model)
        if hasattr(self.model.config, "use_cache"):
            inputs["use_cache"] = False
        return inputs


def _window_that_fits(model: Any, window: int) -> int:
    """Refuse a window longer than the model's positions.

    Raises:
        MainstemError: it is longer.
    """
    limit = getattr(model.config, "max_position_embeddings", None) or getattr(
        model.config, "n_positions", None
    )
    if isinstance(limit, int) and window > limit:
        raise MainstemError(
            f"a window of {window} tokens is longer than the model's {limit} positions; use --window {limit}."
        )
    return window


def _decoder(tokenizer: Any) -> Callable[[int], str]:
    return lambda token: str(tokenizer.decode([token]))


def _silent(what: str, done: int, total: int) -> None:
    return None


def _provenance(
    config: AuditConfig, loaded: LoadedModel, windows: Windows, stream_map: StreamMap
) -> dict[str, Any]:
    return {
        "mainstem": mainstem.__version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "options": config.to_dict(),
        "model": loaded.provenance,
        "text": windows.provenance,
        "stream": {
            "num_blocks": len(stream_map.blocks),
            "num_sublayers": len(stream_map.sites),
            "num_streams": stream_map.num_streams,
            "width": stream_map.width,
            "output": stream_map.output,
            "carry": sorted({s.carry for s in stream_map.sites}),
            "then": sorted({s.then for s in stream_map.sites}),
            "points": stream_map.names(),
            "notes": list(stream_map.notes),
        },
        "exclusions": {
            "padding": "left out everywhere, by mask",
            "first": "the first token of each window is left out of block figures and given apart; "
            "the lens, the largest activation and the loss include it",
        },
        "seed": None,
        "machine": {
            "python": platform.python_version(),
            "system": platform.system(),
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
        },
    }
