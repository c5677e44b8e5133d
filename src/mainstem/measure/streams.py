"""Several streams, or a history: each stream, the whole, what is read, and how they are mixed."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import torch
from torch import Tensor

from mainstem.measure._host import SplitSums
from mainstem.measure._results import Result
from mainstem.measure.events import Batch


@dataclasses.dataclass(frozen=True)
class Joined:
    """One join of one tensor: ``after = carried + written``; all of one shape."""

    before: Tensor
    carried: Tensor
    written: Tensor
    after: Tensor


@dataclasses.dataclass(frozen=True)
class StreamsEvent:
    """One sublayer of a stream that is more than one tensor ``[batch, pos, width]``.

    Attributes:
        block: its block, 0-based; ``ends_block``: whether it is the block's last sublayer.
        kind: ``"attn"``, ``"mlp"``, ``"attn+mlp"``, ...
        whole: ``[batch, pos, width]``: the mean of the streams, the stream itself where its streams are
            fractions of it, what the scheme's way out makes of a history.
        streams: ``[batch, pos, n, width]``; None for a history.
        read: ``[batch, pos, width]``: what the sublayer reads, before its norm where it has one; or None.
        mix: ``[batch, pos, out, in]``: the matrix by which parts of the stream are carried into one another;
            None where it is no such matrix.
        inject: ``[batch, pos, out]``: with what weight the update enters each part; or None.
        read_weights: ``[batch, pos, in]``: ``read = sum_i read_weights_i part_i``; or None.
        expanded: ``[batch, pos, in]``: with what weight the embedding is in each part before this sublayer;
            given with the first one, None where it is not known.
        batch: the tokens.
    """

    block: int
    ends_block: bool
    kind: str
    whole: Joined
    streams: Joined | None
    read: Tensor | None
    mix: Tensor | None
    inject: Tensor | None
    read_weights: Tensor | None
    expanded: Tensor | None
    batch: Batch


@dataclasses.dataclass(frozen=True)
class StreamWrite(Result):
    """What one kind of sublayer writes in one block.

    Attributes:
        kind: of the sublayer.
        ratio: for each stream, mean over tokens of ``|w_i| / max(|c_i|, 1e-6)``, ``c`` what was carried;
            empty for a history.
        whole_ratio: the same for the whole.
    """

    kind: str
    ratio: tuple[float, ...]
    whole_ratio: float


@dataclasses.dataclass(frozen=True)
class StreamRead(Result):
    """What one kind of sublayer reads in one block, before its norm.

    Attributes:
        kind: of the sublayer.
        norm: mean over tokens of its norm; None where it is not known.
        cosine: mean of its cosine with the whole before the sublayer.
        embed_share: of the absolute weights on the embedding and on every earlier update, what is on the
            embedding, mean over tokens; None where the weights are not known exactly.
        effective_sources: mean over tokens of ``1 / sum_s p_s^2``, ``p`` those shares.
        shares: of the embedding, then of the updates of block 0, 1, ..., up to this block.
    """

    kind: str
    norm: float | None
    cosine: float | None
    embed_share: float | None
    effective_sources: float | None
    shares: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class StreamsState(Result):
    """One state. Means over all tokens but padding and the first of each window.

    Attributes:
        norm: of each stream; empty for a history.
        whole_norm: of the whole.
        similarity: mean cosine of two different streams; None for a history and for fractions,
            where no channel of one stream is a channel of another.
        effective_streams: ``(tr G)^2 / tr(G^2)``, ``G`` the streams' Gram matrix: 1 where all point one way,
            n where they are orthogonal and of one size; None likewise.
    """

    norm: tuple[float, ...]
    whole_norm: float
    similarity: float | None
    effective_streams: float | None


@dataclasses.dataclass(frozen=True)
class BlockStreams(Result):
    """One block.

    Attributes:
        block: its number.
        state: after it.
        writes, reads: one entry a sublayer.
        mix_distance: mean over tokens of ``|M - I|_F / sqrt(n)``, ``M`` the product of the block's mixing
            matrices; ``product_distance``: of the product of all blocks' up to here. None for a history, and
            where the matrices could not be read exactly.
        product_gain: largest singular value of that product.
        embed_weight: mean over streams of the weight with which the embedding is in the stream.
    """

    block: int
    state: StreamsState
    writes: tuple[StreamWrite, ...]
    reads: tuple[StreamRead, ...]
    mix_distance: float | None
    product_distance: float | None
    product_gain: float | None
    embed_weight: float | None


@dataclasses.dataclass(frozen=True)
class StreamsResult(Result):
    """Several streams, or a history.

    Attributes:
        num_streams: n; 1 for a history.
        tokens: real tokens looked at.
        before: the state before block 0.
        blocks: one entry a block.
    """

    num_streams: int
    tokens: int
    before: StreamsState
    blocks: tuple[BlockStreams, ...]


class StreamFigures:
    """Figures of several streams or a history, from `StreamsEvent`. See `StreamsResult`.

    Mixing matrices are those of hyper-connections (arXiv 2409.19606, eq. 2; 2512.24880, eq. 3). All in fp64,
    on the host. A pass holds the product of the matrices and the weight of every part on every update,
    ``[tokens, parts, updates]``: for a window or a few, not for a corpus.
    """

    def __init__(self) -> None:
        self._sums = SplitSums()
        self._num_tokens = 0
        self._num_streams = 1
        self._kinds: dict[int, dict[str, None]] = {}
        self._origin: list[int] = []  # of the embedding and every update so far, the block; -1 the first
        self._weights: Tensor | None = None
        self._expanded: Tensor | None = None
        self._product: Tensor | None = None
        self._inside: Tensor | None = None

    def update(self, event: StreamsEvent) -> None:
        """Take in one sublayer."""
        if not self._origin:
            self._begin(event)
        self._kinds.setdefault(event.block, {})[event.kind] = None
        self._write(event)
        self._read(event)
        self._mix(event)
        self._origin.append(event.block)
        if event.ends_block:
            streams = None if event.streams is None else event.streams.after
            self._state(event.block + 1, event.whole.after, streams, event.batch)
            self._matrices(event.block)

    def end_pass(self, batch: Batch) -> None:
        """Take in that a pass is complete."""
        self._num_tokens += int(batch.mask.sum())
        self._weights = self._expanded = self._product = self._inside = None
        self._origin = []

    def merge(self, other: StreamFigures) -> None:
        """Add what ``other`` has seen."""
        self._sums.merge(other._sums)
        self._num_tokens += other._num_tokens
        self._num_streams = max(self._num_streams, other._num_streams)
        self._kinds = other._kinds | self._kinds

    def _begin(self, event: StreamsEvent) -> None:
        streams = None if event.streams is None else event.streams.before
        self._num_streams = 1 if streams is None else streams.shape[-2]
        self._state(0, event.whole.before, streams, event.batch)
        self._origin = [-1]
        if event.expanded is not None:
            self._expanded = self._weights = _rows(event.expanded, event.batch)[..., None]
        if event.mix is not None and streams is not None:
            eye = torch.eye(self._num_streams, dtype=torch.float64)
            self._product = eye.expand(len(_rows(event.mix, event.batch)), -1, -1)
            self._inside = self._product

    def _state(self, state: int, whole: Tensor, streams: Tensor | None, batch: Batch) -> None:
        self._add((state, "whole_norm"), _rows(whole, batch).norm(dim=-1))
        if streams is None:
            return
        rows = _rows(streams, batch)
        norms, n = rows.norm(dim=-1), self._num_streams
        self._add((state, "norm"), norms)
        if (
            n == 1 or streams.shape[-1] < whole.shape[-1]
        ):  # fractions: no channel of one is a channel of another
            return
        gram = rows @ rows.mT
        size = (norms[:, :, None] * norms[:, None, :]).clamp_min(torch.finfo(rows.dtype).tiny)
        others = ~torch.eye(n, dtype=torch.bool)
        self._add((state, "similarity"), (gram / size)[:, others].mean(-1))
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        self._add((state, "effective_streams"), trace**2 / gram.square().sum((-2, -1)))

    def _write(self, event: StreamsEvent) -> None:
        key = (event.block, event.kind)
        whole = event.whole
        self._add(
            (*key, "whole_ratio"),
            _ratio(_rows(whole.written, event.batch), _rows(whole.carried, event.batch)),
        )
        if event.streams is not None:
            written, carried = (_rows(t, event.batch) for t in (event.streams.written, event.streams.carried))
            self._add((*key, "ratio"), _ratio(written, carried))

    def _read(self, event: StreamsEvent) -> None:
        key = (event.block, event.kind)
        if event.read is not None:
            read, whole = _rows(event.read, event.batch), _rows(event.whole.before, event.batch)
            self._add((*key, "read_norm"), read.norm(dim=-1))
            self._add((*key, "read_cosine"), torch.cosine_similarity(read, whole, dim=-1))
        if event.read_weights is None or self._weights is None:
            return
        weights = (_rows(event.read_weights, event.batch)[:, None, :] @ self._weights)[:, 0].abs()
        shares = weights / weights.sum(-1, keepdim=True)
        self._add((*key, "effective_sources"), 1 / shares.square().sum(-1))
        origin = torch.tensor(self._origin)
        by_block = [shares[:, origin == block].sum(-1) for block in range(-1, max(self._origin) + 1)]
        self._add((*key, "shares"), torch.stack(by_block, -1))

    def _mix(self, event: StreamsEvent) -> None:
        """Carry weights and product over the sublayer; without a matrix there are none from here on."""
        mix = None if event.mix is None else _rows(event.mix, event.batch)
        if mix is None or event.inject is None or self._weights is None:
            self._weights = None
        else:
            update = _rows(event.inject, event.batch)[..., None]
            self._weights = torch.cat([mix @ self._weights, update], -1)
        if mix is None or self._product is None or self._inside is None:
            self._product = self._inside = None
        else:
            self._product, self._inside = mix @ self._product, mix @ self._inside

    def _matrices(self, block: int) -> None:
        if self._product is None or self._inside is None:
            return
        if self._expanded is not None:
            self._add((block, "embed_weight"), (self._product @ self._expanded)[..., 0].mean(-1))
        eye = torch.eye(self._num_streams, dtype=torch.float64)
        for name, matrix in (("mix_distance", self._inside), ("product_distance", self._product)):
            distance = torch.linalg.matrix_norm(matrix - eye) / self._num_streams**0.5
            self._add((block, name), distance)
        self._add((block, "product_gain"), torch.linalg.matrix_norm(self._product, 2))
        self._inside = eye.expand_as(self._product)

    def _add(self, key: tuple[Hashable, ...], values: Tensor) -> None:
        """Add ``[tokens]``, or ``[tokens, k]`` as k figures ``(*key, i)``."""
        columns = values[:, None] if values.ndim == 1 else values
        for i, total in enumerate(columns.sum(0).tolist()):
            self._sums.add_sums((*key, i), total, len(values), 0.0, 0)

    def result(self) -> StreamsResult:
        """The figures so far."""
        return StreamsResult(
            num_streams=self._num_streams,
            tokens=self._num_tokens,
            before=self._state_result(0),
            blocks=tuple(self._block(block) for block in sorted(self._kinds)),
        )

    def _all(self, *key: Hashable) -> tuple[float, ...]:
        found: list[float] = []
        names = set(self._sums.names)
        while (*key, len(found)) in names:
            found.append(self._sums.mean((*key, len(found))).rest)
        return tuple(found)

    def _one(self, *key: Hashable) -> float | None:
        return next(iter(self._all(*key)), None)

    def _state_result(self, state: int) -> StreamsState:
        return StreamsState(
            norm=self._all(state, "norm"),
            whole_norm=self._all(state, "whole_norm")[0],
            similarity=self._one(state, "similarity"),
            effective_streams=self._one(state, "effective_streams"),
        )

    def _block(self, block: int) -> BlockStreams:
        return BlockStreams(
            block=block,
            state=self._state_result(block + 1),
            writes=tuple(
                StreamWrite(kind, self._all(block, kind, "ratio"), self._all(block, kind, "whole_ratio")[0])
                for kind in self._kinds[block]
            ),
            reads=tuple(self._read_result(block, kind) for kind in self._kinds[block]),
            mix_distance=self._one(block, "mix_distance"),
            product_distance=self._one(block, "product_distance"),
            product_gain=self._one(block, "product_gain"),
            embed_weight=self._one(block, "embed_weight"),
        )

    def _read_result(self, block: int, kind: str) -> StreamRead:
        shares = self._all(block, kind, "shares")
        return StreamRead(
            kind=kind,
            norm=self._one(block, kind, "read_norm"),
            cosine=self._one(block, kind, "read_cosine"),
            embed_share=shares[0] if shares else None,
            effective_sources=self._one(block, kind, "effective_sources"),
            shares=shares,
        )


def _rows(x: Tensor, batch: Batch) -> Tensor:
    """Return ``[tokens, ...]`` in fp64 on the host, of the tokens that figures are of."""
    rows = x.detach().flatten(0, 1)
    return rows.index_select(0, batch.places("rest", rows.device)).cpu().double()


def _ratio(written: Tensor, carried: Tensor) -> Tensor:
    return written.norm(dim=-1) / carried.norm(dim=-1).clamp_min(1e-6)
