"""The ledger: the final state as an exact sum over everything that was ever written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mainstem.connections import Connection, Stream, Trunk
from mainstem.errors import BooksError
from mainstem.measure.events import Batch
from mainstem.observe._frozen import apply_frozen
from mainstem.observe.map import PathCall, Site, StreamMap
from mainstem.observe.record import RowKeeper, batch_of, relative_error, run_watched


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Every contribution to the final state, with all coefficients frozen at the values of one pass.

    Attributes:
        labels: ``embed``, ``pos_embed``, ``0_attn_out``, ``0_mlp_out``, ..., ``bias``; in the order of writing.
        rows: ``[component, batch, pos, (n,) width]``: what is left at the top of each contribution.
        final: ``[batch, pos, (n,) width]``: the final state, before the final norm.
    """

    labels: tuple[str, ...]
    rows: Tensor
    final: Tensor
    mask: Tensor

    @property
    def error(self) -> float:
        """Largest ``|sum of rows - final| / |final|`` over real tokens."""
        return relative_error(self.rows.sum(0), self.final, self.mask)

    def check(self, tolerance: float) -> Ledger:
        """Return the ledger itself.

        Raises:
            BooksError: the rows do not add up to the final state within ``tolerance``.
        """
        if not self.error <= tolerance:
            raise BooksError(
                f"the ledger does not balance: its {len(self.labels)} rows differ from the final state by "
                f"{self.error:.2e} of its size, more than the {tolerance:.0e} allowed; no attribution is given."
            )
        return self

    def __getitem__(self, label: str) -> Tensor:
        """Return the row called ``label``."""
        return self.rows[self.labels.index(label)]

    def carried_share(self, label: str = "embed", *, reference: Tensor | None = None) -> Tensor:
        """Return how much of a contribution is still there: ``<row, reference> / <reference, reference>``.

        Args:
            label: the row.
            reference: what was written, ``[batch, pos, (n,) width]``; the embedding's own row when it is the identity.

        Returns:
            ``[batch, pos]``; 1 where it is carried whole (Pre-LN), 0 where nothing is (no residual).
        """
        row = self[label].flatten(2)
        given = row if reference is None else reference.flatten(2)
        return (row * given).sum(-1) / (given * given).sum(-1).clamp_min(torch.finfo(row.dtype).tiny)
