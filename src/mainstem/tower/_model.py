"""The tower: embedding, blocks, head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from mainstem.connections import Connection, StreamModule, UnitOffsetRMSNorm
from mainstem.errors import ConfigError
from mainstem.tower._attention import ValueMix
from mainstem.tower._block import Block, ParallelBlock
from mainstem.tower._cache import Cache
from mainstem.tower._checkpointing import Checkpointing
from mainstem.tower._config import BlockType, TowerConfig
from mainstem.tower._places import Place, make_mask, make_rotation, positions_from_mask


class Tower(nn.Module):
    """A decoder-only transformer whose blocks are joined to the stream by any connection.

    Each block registers its own connections, so that FSDP and per-block compile wrap them together; the trunk
    keeps the way into the stream, the way out, and the final norm. No line here asks which scheme it is.

    Initial values: matrices and embeddings N(0, init_std), biases 0, norms 1. The attention's output and the
    feed-forward's down matrix are further scaled by the scheme's ``output_init_scale`` (GPT-2's ``1 /
    sqrt(2L)`` where writes add up), and value, output and feed-forward matrices by its ``branch_init_scale``
    (DeepNorm).

    Attributes:
        config: what it was built from.
    """

    def __init__(self, config: TowerConfig):
        super().__init__()
        self.config = config
        scheme = config.scheme()
        self.passes_values = config.value_residual != "none"
        self.refuses_cache = scheme.refuses.get("kv_cache")
        self.refuses_left_padding = scheme.refuses.get("left_padding")
        self.trunk = scheme.build(
            width=config.width,
            num_sublayers=config.num_sublayers,
            norm=config.norm,
            stream_dtype=None if config.stream_dtype is None else getattr(torch, config.stream_dtype),
            recompute=(1 if config.parallel else 2) if config.recompute_connections else 0,
        )
        connections = self.trunk.release_connections()
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.max_positions, config.width)
        self.dropout = nn.Dropout(config.dropout)
        block, size = (ParallelBlock, 1) if config.parallel else (Block, 2)
        self.blocks = nn.ModuleList(
            block(config, i, connections[size * i : size * (i + 1)]) for i in range(config.num_blocks)
        )
        self.head = nn.Linear(config.width, config.vocab_size, bias=config.head_bias)
        self.tie_weights()
        self.reset_parameters()

    def forward(
        self,
        token_ids: Tensor,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        keep_last: int = 0,
    ) -> Tensor:
        """Return the logits of the next token.

        Args:
            token_ids: ``[batch, pos]``, int64.
            attention_mask: ``[batch, past + pos]``, true or 1 for real tokens; padding may be on either side.
            positions: ``[batch or 1, pos]``, int64; by default the real tokens are numbered from 0.
            cache: keys and values of what was read before; what is read now is appended.
            keep_last: logits of that many last positions only; 0 for all.

        Returns:
            ``[batch, pos, vocab_size]`` in the weights' dtype.

        Raises:
            ConfigError: more positions than a learned table has rows, a mask of another size, or a cache or
                padding that the connection refuses.
        """
        self._check_cache(cache)
        self._match_dtypes()
        self._check_padding(attention_mask)
        num_past = 0 if cache is None else cache.get_seq_length()
        positions = self._positions(token_ids, attention_mask, positions, num_past)
        places = self.places(positions, attention_mask, num_past)

        stream = self.trunk.enter(self.embed(token_ids, positions))
        first_values: Tensor | None = None
        for block, block_type in zip(self.blocks, self.config.block_types, strict=True):
            passed = block(stream, places[block_type], cache, first_values)
            stream, first_values = passed if self.passes_values else (passed, None)
        out = self.trunk.leave(stream, keep_last)

        logits = self.head(out)
        cap = self.config.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return what enters the stream, ``[batch, pos, width]``: scaled tokens plus learned positions, if
        any."""
        x = self.token_embedding(token_ids)
        if self.config.embed_scale != 1.0:
            # Rounded to the weights' dtype first, as Gemma was trained: 55.43 is 55.5 in bf16.
            x = x * torch.tensor(self.config.embed_scale, dtype=x.dtype, device=x.device)
        if self.config.positions == "learned":
            x = x + self.position_embedding(positions)
        return self.dropout(x)

    def places(
        self, positions: Tensor, attention_mask: Tensor | None = None, num_past: int = 0
    ) -> dict[BlockType, Place]:
        """Return, for each type of block, its rotary angles and its mask."""
        config, num_queries = self.config, positions.shape[-1]
        places: dict[BlockType, Place] = {}
        for block_type in sorted(set(config.block_types)):
            sliding = block_type == "sliding"
            mask = make_mask(
                num_queries,
                num_past,
                window=config.sliding_window if sliding else None,
                padding=attention_mask,
                device=positions.device,
            )
            rotation = None
            if config.positions == "rope":
                rope = config.local_rope if sliding and config.local_rope else config.rope
                dtype = self.token_embedding.weight.dtype
                rotation = make_rotation(rope, config.head_dim, positions, dtype)
            places[block_type] = Place(rotation, mask)
        return places

    def sublayers(self) -> Iterator[tuple[int, Connection, dict[str, nn.Module]]]:
        """Yield ``(block index, connection, branches)`` in the order in which the stream meets them.

        ``branches`` is ``{"attn": module}``, ``{"mlp": module}``, or both in a parallel block; the update
        that the connection writes is the sum of those modules' outputs.
        """
        for index, block in enumerate(self.blocks):
            for connection, branches in cast(Block, block).sublayers():
                yield index, connection, branches

    def checkpoint_activations(self, mode: Checkpointing, *, every: int = 1) -> None:
        """Choose what is kept for the backward pass in training; the rest is computed again.

        The numbers are the same in every mode, dropout's included. A setting of this run: it is not part of
        the config, nor of a checkpoint.

        Args:
            mode: ``"none"`` keeps all that autograd asks for; ``"block"`` only the stream between blocks, for
                one more forward pass; ``"selective"`` also what matrix products and attention kernels have
                made, so that only what is cheap runs again.
            every: for every so many-th block; the others keep everything.

        Raises:
            ConfigError: there is no such mode, ``every`` is below 1, or the connection refuses.
        """
        if mode not in ("none", "block", "selective"):
            raise ConfigError(
                f"activation checkpointing {mode!r} is not known; choose 'none', 'block' or 'selective'."
            )
        if every < 1:
            raise ConfigError(f"every={every!r} must be at least 1: a block in so many is checkpointed.")
        if mode != "none":
            self.config.check_served("activation_checkpointing", "be checkpointed", "Choose 'none'.")
        for index, block in enumerate(self.blocks):
            cast(Block, block).checkpointing = "none" if index % every else mode

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether any block is checkpointed, by the name under which ``transformers`` asks."""
        return any(cast(Block, block).checkpointing != "none" for block in self.blocks)

    def tie_weights(self) -> None:
        """Make the head use the embedding's matrix, if the config says so; call it after assigning
        weights."""
        if self.config.tied:
            self.head.weight = self.token_embedding.weight

    def reset_parameters(self) -> None:
        """Draw the initial values that the class describes."""
        for name, _ in self.named_modules():
            self.reset_module(name)

    @torch.no_grad()
    def reset_module(self, name: str) -> None:
        """Draw the initial values of the module called ``name``, without those inside it.

        A connection draws its own, those of all modules inside it included.
        """
        config, scheme, module = self.config, self.config.scheme(), self.get_submodule(name)
        if (owner := self._connection_around(name)) is not None:
            owner.reset_parameters()
            return
        branch = scheme.branch_init_scale(config.num_sublayers)
        output = branch * scheme.output_init_scale(2 * config.num_blocks)
        scales = {
            "v_proj": branch,
            "gate_proj": branch,
            "up_proj": branch,
            "out_proj": output,
            "down_proj": output,
        }
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=config.init_std * scales.get(name.rpartition(".")[2], 1.0))
            if module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=config.init_std)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm | UnitOffsetRMSNorm | ValueMix):
            module.reset_parameters()
        elif name.startswith("trunk."):  # a learned way out of several streams
            getattr(module, "reset_parameters", lambda: None)()

    def _connection_around(self, name: str) -> Connection | None:
        """Return the connection that the module called ``name`` is or belongs to."""
        parts = name.split(".")
        outer = (self.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1))
        return next((module for module in outer if isinstance(module, Connection)), None)

    def _check_cache(self, cache: Cache | None) -> None:
        if cache is None:
            return
        if self.refuses_cache is not None:
            raise ConfigError(
                f"connection {self.config.connection!r} cannot read token by token: {self.refuses_cache} "
                "Pass cache=None (use_cache=False)."
            )
        if self.training and self.gradient_checkpointing:
            raise ConfigError("a cache cannot be filled under gradient checkpointing; pass cache=None.")

    def _check_padding(self, attention_mask: Tensor | None) -> None:
        if self.refuses_left_padding is None or attention_mask is None or bool(attention_mask[:, 0].all()):
            return
        raise ConfigError(
            f"connection {self.config.connection!r} cannot take padding on the left: "
            f"{self.refuses_left_padding} Pad on the right."
        )

    def _match_dtypes(self) -> None:
        """Tell the connections what the branches compute in, after weights were put in place of others."""
        dtype = self.token_embedding.weight.dtype
        if self.trunk.branch_dtype != dtype:
            for module in self.modules():
                if isinstance(module, StreamModule):
                    module.keep_stream_in(module.stream_dtype, dtype)

    def _positions(
        self, token_ids: Tensor, attention_mask: Tensor | None, positions: Tensor | None, num_past: int
    ) -> Tensor:
        num_queries = token_ids.shape[1]
        num_slots = num_past + num_queries
        expected = (token_ids.shape[0], num_slots)
        if attention_mask is not None and attention_mask.shape != expected:
            raise ConfigError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; expected {expected}: "
                f"batch by {num_past} cached and {num_queries} new tokens."
            )
        if positions is None and attention_mask is not None:
            positions = positions_from_mask(attention_mask, num_queries)
        if positions is None:
            positions = torch.arange(num_past, num_slots, device=token_ids.device)[None]
            if self.config.positions == "learned" and num_slots > self.config.max_positions:
                raise ConfigError(
                    f"{num_slots} tokens, but the learned table has {self.config.max_positions} positions; "
                    "shorten the text or build with a larger max_positions."
                )
        return positions
