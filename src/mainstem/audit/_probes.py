"""What an audit finds out of a part of the text: token identity, and gradients down the stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mainstem.audit._provenance import speaks
from mainstem.audit.config import AuditConfig
from mainstem.errors import MainstemError
from mainstem.measure import Batch, GradientResult, IdentityResult, NearestEmbedding, StreamGradients
from mainstem.observe import StreamMap, ledger, record


@dataclasses.dataclass
class Probed:
    """What was found, None where it was not asked for or is not to be had; ``notes`` say why."""

    identity: IdentityResult | None = None
    carried_share: float | None = None
    gradients: GradientResult | None = None
    notes: list[str] = dataclasses.field(default_factory=list[str])


class Probes:
    """Ask the questions that a config wants.

    Attributes:
        nearest: a reducer to record every batch with, None where question 4 is not asked or the embedding
            does not fit the stream.
        found: what was found so far.
    """

    def __init__(self, model: Any, kind: str, stream_map: StreamMap, config: AuditConfig):
        self._model, self._asks = model, config.asks
        self._has_loss = kind == "causal" and speaks(stream_map)
        self.found = Probed()
        self.nearest = self._nearest(stream_map, config) if config.asks("identity") else None
        if config.asks("signals") and not self._has_loss:
            self.found.notes.append("gradient figures are null: there is no loss of a next token")

    def _nearest(self, stream_map: StreamMap, config: AuditConfig) -> NearestEmbedding | None:
        weight = getattr(self._model.get_input_embeddings(), "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == stream_map.width:
            return NearestEmbedding(weight, every=config.identity_every)
        self.found.notes.append(
            "identity figures are null: the input embedding is no matrix of the stream's width "
            f"({stream_map.width}), so no row of it can be near a state"
        )
        return None

    def window(
        self, inputs: Mapping[str, Any], stream_map: StreamMap, batch: Batch, tolerance: float
    ) -> None:
        """Ask one window what the ledger carries of the embedding and what gradient gets down."""
        if self.nearest is not None:
            try:
                share = ledger(self._model, inputs, stream_map).check(10 * tolerance).carried_share()
                self.found.carried_share = float(share[batch.mask].double().mean())
            except MainstemError as error:
                self.found.notes.append(f"carried_share is null: {error}")
        if self._asks("signals") and self._has_loss:
            try:
                self.found.gradients = self._gradients(inputs, stream_map, batch)
            except MainstemError as error:
                self.found.notes.append(f"gradient figures are null: {error}")

    def close(self) -> Probed:
        """Return what was found."""
        self.found.identity = None if self.nearest is None else self.nearest.result()
        return self.found

    def _gradients(self, inputs: Mapping[str, Any], stream_map: StreamMap, batch: Batch) -> GradientResult:
        reducer = StreamGradients()
        handle = self._model.get_input_embeddings().register_forward_hook(_let_gradients_in)
        try:
            with torch.enable_grad():
                seen = record(self._model, inputs, stream_map, [reducer], batch=batch)
                reducer.backward(_summed_loss(seen.output[stream_map.output], batch), batch)
        finally:
            handle.remove()
        return reducer.result()


def _let_gradients_in(module: Any, given: Any, out: Any) -> None:
    """Make the embedding's output the root of a graph where all parameters are frozen."""
    if isinstance(out, Tensor) and not out.requires_grad:
        out.requires_grad_()


def _summed_loss(logits: Tensor, batch: Batch) -> Tensor:
    assert batch.token_ids is not None
    scored = (batch.mask[:, 1:] & batch.mask[:, :-1]).to(logits.device)
    targets = batch.token_ids[:, 1:].to(logits.device)[scored]
    return functional.cross_entropy(logits[:, :-1][scored].float(), targets, reduction="sum")
