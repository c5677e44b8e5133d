"""A block: attention and feed-forward, each joined to the stream by its own connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from mainstem.connections import Connection, Stream
from mainstem.tower._attention import Attention
from mainstem.tower._cache import Cache
from mainstem.tower._checkpointing import Checkpointing, run_checkpointed
from mainstem.tower._config import TowerConfig
from mainstem.tower._feed_forward import FeedForward
from mainstem.tower._places import Place

Passed: TypeAlias = Stream | tuple[Stream, Tensor]
"""What a block passes on: the stream, or in a tower with a value residual the stream and the first block's
values."""


class Connections(nn.ModuleList):
    """A block's connections, which are around all that happens in the block.

    A module that is called, so that FSDP can gather them in the stream's dtype while the block gathers its
    branches in another.
    """

    def forward(self, run: Callable[..., Passed], *args: Any) -> Passed:
        """Return ``run(*args)``."""
        return run(*args)


class Block(nn.Module):
    """Attention, then feed-forward; each reads the stream that the other has written.

        stream ─► connections[0](attn) ─► connections[1](mlp) ─► stream'

    Takes the stream, the block's :class:`Place` and a cache, and returns the stream alone. In a tower with a
    value residual it takes the first block's values too and returns the pair of stream and values; the first
    block is given none and makes them.

    Attributes:
        checkpointing: what is kept for the backward pass; set by :meth:`Tower.checkpoint_activations`.
        compiled: :meth:`run` as `torch.compile` made it, or None; set by :func:`compile_blocks`.
    """

    def __init__(self, config: TowerConfig, index: int, connections: Sequence[Connection]):
        super().__init__()
        self.connections = Connections(connections)
        self.attn = Attention(config, index)
        self.mlp = FeedForward(config)
        self.passes_values = config.value_residual != "none"
        self.checkpointing: Checkpointing = "none"
        self.compiled: Callable[..., Passed] | None = None

    def forward(
        self, stream: Stream, place: Place, cache: Cache | None = None, first_values: Tensor | None = None
    ) -> Passed:
        """Run the block as it is set up: compiled or not, checkpointed or not."""
        # A cache is not part of a graph: its size is another at every token.
        run = self.run if self.compiled is None or cache is not None else self.compiled
        return self.connections(run, stream, place, cache, first_values)

    def run(
        self, stream: Stream, place: Place, cache: Cache | None, first_values: Tensor | None = None
    ) -> Passed:
        """Run the sublayers, checkpointed in training."""
        mode = self.checkpointing if self.training else "none"
        return run_checkpointed(self.run_sublayers, mode, stream, place, cache, first_values)

    def run_sublayers(
        self, stream: Stream, place: Place, cache: Cache | None, first_values: Tensor | None
    ) -> Passed:
        """Run the sublayers, and pass the first block's values on where there are any."""
        if not self.passes_values:
            return self.join(stream, place, cache, None)
        if first_values is None:
            first_values = self._make_values(stream)
        return self.join(stream, place, cache, first_values), first_values

    def _make_values(self, stream: Stream) -> Tensor:
        """Return what the attention's value matrix makes of the stream, ``[batch, pos, kv_width]``."""
        connection = self.connections[0]
        assert isinstance(connection, Connection)
        # Read once more, not taken out of the branch: what a branch returns is all that leaves it.
        read, _ = connection.read(stream)
        return self.attn.v_proj(connection.branch_of(read))

    def join(self, stream: Stream, place: Place, cache: Cache | None, first_values: Tensor | None) -> Stream:
        """Run both sublayers."""
        stream = self.connections[0](stream, self.attn, place, cache, first_values)
        return self.connections[1](stream, self.mlp)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are not compiled, as with `torch.nn.Module.compile`."""
        return super().__getstate__() | {"compiled": None}

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

    def join(self, stream: Stream, place: Place, cache: Cache | None, first_values: Tensor | None) -> Stream:
        """Run the one sublayer."""
        (connection,) = self.connections
        assert isinstance(connection, Connection)
        return connection(stream, self._both, place, cache, first_values)

    def _both(self, read: Tensor, place: Place, cache: Cache | None, first_values: Tensor | None) -> Tensor:
        return self.attn(read, place, cache, first_values) + self.mlp(read)

    def sublayers(self) -> Iterator[tuple[Connection, dict[str, nn.Module]]]:
        """Yield the connection with both branches; its update is the sum of their outputs."""
        (connection,) = self.connections
        assert isinstance(connection, Connection)
        yield connection, {"attn": self.attn, "mlp": self.mlp}
