"""Windows cut while the text is read: what is held does not grow with the text."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import torch

from ._texts import TextSource
from ._tokens import TokenStream
from ._windows import (
    PadSide,
    WindowBatch,
    check_choices,
    first_token_id_of,
    pad_id_of,
    pad_rows,
    provenance_of,
    too_short,
)


class WindowStream:
    """The batches of `make_windows` without its tensor of all tokens; iterate as often as wanted.

    Args:
        tokenizer: of ``transformers``.
        source: the text.
        num_tokens: tokens of the text to use, None for all.
        window: tokens in a window, the first one included.
        batch_size: windows in a batch.
        first_token: as for `make_windows`.
        pad_side: where a shorter last window is padded.

    Raises:
        SourceError: as `make_windows` does; too short a text, or one that cannot be read, while iterating.
    """

    def __init__(
        self,
        tokenizer: Any,
        source: TextSource,
        *,
        num_tokens: int | None = 2048,
        window: int = 256,
        batch_size: int = 4,
        first_token: str = "none",
        pad_side: PadSide = "right",
    ):
        check_choices(tokenizer, num_tokens, window, batch_size, pad_side)
        self._tokenizer, self._source, self._limit = tokenizer, source, num_tokens
        self._window, self.batch_size = window, batch_size
        self._pad_side: PadSide = pad_side
        self._first_token, self._first_id = first_token, first_token_id_of(tokenizer, first_token)
        self._pad_id = pad_id_of(tokenizer)
        self._tokens = TokenStream(tokenizer, source, num_tokens)
        self._first_ids: list[int] = []

    @property
    def _step(self) -> int:
        return self._window - (self._first_id is not None)

    @property
    def expected_batches(self) -> int | None:
        """Batches in all, as far as can be told now: exact once the text's end or the limit was reached.

        Of a text whose length in bytes is known, from the tokens that its beginning gave; else None.
        """
        read, limit = self._tokens, self._limit
        tokens: float | None = limit
        if read.whole_text or (limit is not None and read.num_tokens == limit):
            tokens = read.num_tokens
        elif read.num_tokens and self._source.num_bytes is not None:
            likely = self._source.num_bytes * read.num_tokens / read.num_bytes_read
            tokens = likely if limit is None else min(limit, likely)
        return None if tokens is None else -(-int(tokens) // (self._step * self.batch_size)) or 1

    @property
    def provenance(self) -> dict[str, Any]:
        """JSON-ready facts about what the last iteration went through, as those of `Windows`."""
        num_tokens = self._tokens.num_tokens
        return provenance_of(
            self._source,
            self._tokenizer,
            self._tokens,
            num_tokens=num_tokens,
            num_windows=-(-num_tokens // self._step),
            first_ids=self._first_ids,
            requested_tokens=self._limit,
            window=self._window,
            batch_size=self.batch_size,
            first_token=self._first_token,
            first_token_id=self._first_id,
            pad_side=self._pad_side,
            pad_id=self._pad_id,
        )

    def __iter__(self) -> Iterator[WindowBatch]:
        """Yield the batches in the order of the text."""
        held: array[int] = array("q")
        first, size = 0, self._step * self.batch_size
        for piece in self._tokens:
            held.extend(piece)
            if not first:
                self._first_ids = held[:6].tolist()
            start = 0
            while len(held) - start > size:  # one token more, to know that this batch is not the last
                yield self._batch(held[start : start + size], first)
                first, start = first + self.batch_size, start + size
            held = held[start:]
        if self._tokens.num_tokens < 2:
            raise too_short(self._source.name, self._tokens.num_tokens)
        yield self._batch(held, first)

    def _batch(self, ids: array[int], first: int) -> WindowBatch:
        rows = list(torch.tensor(ids, dtype=torch.int64).split(self._step))
        return pad_rows(rows, first, self._first_id, self._pad_side, self._pad_id)
