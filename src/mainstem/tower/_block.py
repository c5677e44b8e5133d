"""A block: attention and feed-forward, each joined to the stream by its own connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from mainstem.connections import Connection, Stream
from mainstem.tower._attention import Attention
from mainstem.tower._cache import Cache
from mainstem.tower._config import TowerConfig
from mainstem.tower._feed_forward import FeedForward
from mainstem.tower._places import Place


class Block(nn.Module):
    """Attention, then feed-forward; each reads the stream that the other has written.

        stream ─► connections[0](attn) ─► connections[1](mlp) ─► stream'

    Takes the stream, the block's :class:`Place` and a cache, and returns the stream alone.
    """

    def __init__(self, config: TowerConfig, index: int, connections: Sequence[Connection]):
        super().__init__()
        self.connections = nn.ModuleList(connections)
        self.attn = Attention(config, index)
        self.mlp = FeedForward(config)

    def forward(self, stream: Stream, place: Place, cache: Cache | None = None) -> Stream:
        """Run both sublayers."""
        stream = self.connections[0](stream, self.attn, place, cache)
        return self.connections[1](stream, self.mlp)

    def sublayers(self) -> Iterator[tuple[Connection, dict[str, nn.Module]]]:
        """Yield each connection with the branches whose outputs it writes."""
        for connection, (name, branch) in zip(
            self.connections, (("attn", self.attn), ("mlp", self.mlp)), strict=True
        ):
            assert isinstance(connection, Connection)
            yield connection, {name: branch}


class ParallelBlock(Block):
    """Attention and feed-forward read the same stream and their updates are written as one sum.

        stream ─► connections[0](attn + mlp) ─► stream'

    Source: GPT-J (Wang and Komatsuzaki 2021); PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 2).
    """

    def forward(self, stream: Stream, place: Place, cache: Cache | None = None) -> Stream:
        """Run the one sublayer."""
        (connection,) = self.connections
        assert isinstance(connection, Connection)
        return connection(stream, self._both, place, cache)

    def _both(self, read: Tensor, place: Place, cache: Cache | None) -> Tensor:
        return self.attn(read, place, cache) + self.mlp(read)

    def sublayers(self) -> Iterator[tuple[Connection, dict[str, nn.Module]]]:
        """Yield the connection with both branches; its update is the sum of their outputs."""
        (connection,) = self.connections
        assert isinstance(connection, Connection)
        yield connection, {"attn": self.attn, "mlp": self.mlp}
