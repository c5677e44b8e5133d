"""What an audit finds out of a part of the text: token identity, and gradients down the stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mainstem.audit._attribution import Attributed, attributed, tokens_of
from mainstem.audit._placement import weight_of
from mainstem.audit._provenance import speaks
from mainstem.audit._stream import ledger_of
from mainstem.audit.config import AuditConfig
from mainstem.connections import make_scheme
from mainstem.errors import MainstemError
from mainstem.measure import (
    Batch,
    GradientResult,
    IdentityResult,
    LinearProbe,
    NearestEmbedding,
    ProbeResult,
    Reducer,
    SpectraResult,
    Split,
    StreamGradients,
    StreamSpectra,
    StreamsResult,
)
from mainstem.measure.probe import TEXT_EVERY
from mainstem.observe import (
    Ledger,
    Recording,
    StreamMap,
    TowerMap,
    recorded,
    streams_of,
    tower_streams,
)
from mainstem.sources import LoadedModel
from mainstem.tower import Tower

SPECTRA_STATES = {1024: 9, 2048: 5, 4096: 3}
"""How many states' spectra are looked at in a stream of up to so many entries."""


@dataclasses.dataclass
class Probed:
    """What was found, None where it was not asked for or is not to be had; ``notes`` say why."""

    identity: IdentityResult | None = None
    carried_share: Split | None = None
    final_share: Split | None = None
    attributed: Attributed | None = None
    spectra: SpectraResult | None = None
    probe: ProbeResult | None = None
    gradients: GradientResult | None = None
    streams: StreamsResult | None = None
    notes: list[str] = dataclasses.field(default_factory=list[str])


class Probes:
    """Ask the questions that a config wants.

    Attributes:
        nearest: None where question 4 is not asked or the embedding does not fit the stream; ``probe``:
            likewise, or where it was not asked for.
        spectra: None where neither question 2 nor 3 is asked, or the stream is too wide.
        found: what was found so far.

    Raises:
        ConfigError: a word whose logit is asked for is not one token.
    """

    def __init__(self, loaded: LoadedModel, stream_map: StreamMap, config: AuditConfig):
        self._model, self._asks = loaded.model, config.asks
        self._speaks = speaks(stream_map)
        self._has_loss = loaded.provenance.get("kind") == "causal" and self._speaks
        self._tokens = tokens_of(config.attribute, loaded.tokenizer)
        self.found = Probed()
        self.nearest: NearestEmbedding | None = None
        self.probe: LinearProbe | None = None
        if config.asks("identity"):
            self._ask_identity(stream_map, config)
        asks_spectra = config.asks("growth") or config.asks("writes")
        self.spectra = self._spectra(stream_map) if asks_spectra else None
        if config.asks("signals") and not self._has_loss:
            self.found.notes.append("gradient figures are null: there is no loss of a next token")
        if config.asks("answer") and not self._speaks:
            self.found.notes.append("attribution is null: the model has no output head")

    @property
    def reducers(self) -> list[Reducer]:
        """What every batch is to be recorded with."""
        return [r for r in (self.nearest, self.probe, self.spectra) if r is not None]

    def _spectra(self, stream_map: StreamMap) -> StreamSpectra | None:
        """Look at fewer states the wider they are: a covariance of each is held, and solved."""
        width = stream_map.num_streams * stream_map.width
        for widest, num_states in SPECTRA_STATES.items():
            if width <= widest:
                return StreamSpectra(num_states)
        self.found.notes.append(f"spectra are null: covariances of a stream of {width} entries are too large")
        return None

    def _ask_identity(self, stream_map: StreamMap, config: AuditConfig) -> None:
        weight = weight_of(self._model.get_input_embeddings())
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == stream_map.width:
            self.nearest = NearestEmbedding(weight, every=config.identity_every)
            self.probe = LinearProbe(weight) if config.probe else None
            return
        self.found.notes.append(
            "identity figures are null: the input embedding is no matrix of the stream's width "
            f"({stream_map.width}), so no row of it can be near a state"
        )

    def window(
        self, inputs: Mapping[str, Any], stream_map: StreamMap, batch: Batch, tolerance: float
    ) -> None:
        """Ask one window what the ledger says of its embedding and of a token, and what gradient gets
        down."""
        attributes = self._asks("answer") and self._speaks
        if self._asks("writes"):
            self.found.streams = self._streams(inputs, stream_map)
        if self.nearest is not None or attributes:
            try:
                books, seen = ledger_of(self._model, inputs, stream_map, keep_tail=attributes)
                books.check(10 * tolerance)
            except MainstemError as error:
                self.found.notes.append(f"carried_share, final_share and attribution are null: {error}")
            else:
                if self.nearest is not None:
                    self._shares(books, stream_map, batch)
                if attributes:
                    self._attribute(books, seen, stream_map, batch, tolerance)
        if self._asks("signals") and self._has_loss:
            if isinstance(stream_map, TowerMap) and not stream_map.hands_on:
                self.found.notes.append(
                    "gradient figures are null: the blocks hand on more than a state, or another thing, so "
                    "that the gradient does not go through states alone"
                )
                return
            try:
                self.found.gradients = self._gradients(inputs, stream_map, batch)
            except MainstemError as error:
                self.found.notes.append(f"gradient figures are null: {error}")

    def _streams(self, inputs: Mapping[str, Any], stream_map: StreamMap) -> StreamsResult | None:
        """Return the figures of several streams, None for one; of a tower, as its connections have them."""
        tower = getattr(self._model, "tower", None)
        has_history = isinstance(stream_map, TowerMap) and stream_map.has_history
        is_wide = isinstance(tower, Tower) and make_scheme(tower.config.connection).family == "wider streams"
        if isinstance(tower, Tower) and (has_history or is_wide):
            return tower_streams(tower, inputs["input_ids"], inputs.get("attention_mask"))
        if stream_map.num_streams == 1:
            return None
        self.found.notes.append(
            "streams.blocks[].reads has no figure: a map found by data flow says what joins the streams, not "
            "what is read from them"
        )
        return streams_of(self._model, inputs, stream_map)

    def _shares(self, books: Ledger, stream_map: StreamMap, batch: Batch) -> None:
        self.found.final_share = _split(books.final_share("embed"), batch)
        if any("norm" in (site.carry, site.then) for site in stream_map.sites):
            self.found.notes.append(
                "carried_share is null: norms on the stream itself set its size anew, so what is carried of "
                "the embedding has no size to be compared with; see final_share"
            )
        else:
            self.found.carried_share = _split(books.carried_share(), batch)

    def _attribute(
        self, books: Ledger, seen: Recording, stream_map: StreamMap, batch: Batch, tolerance: float
    ) -> None:
        try:
            found = attributed(books, seen, seen.output[stream_map.output], batch, self._tokens)
            found.found.check(tolerance)
            self.found.attributed = found
        except MainstemError as error:
            self.found.notes.append(f"attribution is null: {error}")

    def close(self) -> Probed:
        """Return what was found."""
        self.found.identity = None if self.nearest is None else self.nearest.result()
        if self.probe is not None:
            self.found.probe = self.probe.result()
            if self.found.probe.num_train < 2 or self.found.probe.num_text + self.found.probe.num_types < 1:
                self.found.probe = None
                self.found.notes.append(
                    f"probe is null: every {TEXT_EVERY}. window is held out, and there are too few tokens to "
                    "train on or to judge by; use more --tokens"
                )
        self.found.spectra = None if self.spectra is None else self.spectra.result()
        return self.found

    def _gradients(self, inputs: Mapping[str, Any], stream_map: StreamMap, batch: Batch) -> GradientResult:
        reducer = StreamGradients()
        handle = self._model.get_input_embeddings().register_forward_hook(let_gradients_in)
        try:
            with torch.enable_grad():
                seen = recorded(self._model, inputs, stream_map, [reducer], batch=batch)
                reducer.backward(_summed_loss(seen.output[stream_map.output], batch), batch)
        finally:
            handle.remove()
        return reducer.result()


def _split(values: Tensor, batch: Batch) -> Split:
    """Mean of ``[batch, pos]`` over real tokens, the first of each sequence apart."""
    return Split(*(float(values[m].double().mean()) for m in (batch.is_rest, batch.is_first, batch.mask)))


def let_gradients_in(module: Any, given: Any, out: Any) -> None:
    """Make the embedding's output the root of a graph where all parameters are frozen."""
    if isinstance(out, Tensor) and not out.requires_grad:
        out.requires_grad_()


def _summed_loss(logits: Tensor, batch: Batch) -> Tensor:
    assert batch.token_ids is not None
    scored = (batch.mask[:, 1:] & batch.mask[:, :-1]).to(logits.device)
    targets = batch.token_ids[:, 1:].to(logits.device)[scored]
    return functional.cross_entropy(logits[:, :-1][scored].float(), targets, reduction="sum")
