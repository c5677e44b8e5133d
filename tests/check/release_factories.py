"""Small modules of published packages, for `mainstem check` in the environment of each (see releases.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from mainstem.check import ResidualStack

WIDTH = 32


def x_transformers(depth: int, **options: Any) -> nn.Module:
    """x-transformers' causal decoder with its residual options."""
    from x_transformers import Decoder, TransformerWrapper

    sizes = {"dim": WIDTH, "depth": depth, "heads": 2, "attn_dim_head": 32}
    layers = Decoder(**sizes, rotary_pos_emb=True, **options)
    return TransformerWrapper(num_tokens=61, max_seq_len=64, attn_layers=layers)


x_transformers_plain = x_transformers
x_transformers_4_streams = partial(x_transformers, num_residual_streams=4)
x_transformers_orthogonal = partial(x_transformers, orthog_residual=True)
x_transformers_mv_split = partial(x_transformers, mv_split_residual=True)


class Around(nn.Module):
    """A connection of hyper-connections, which gives what the branch reads and a function that takes what it
    wrote, called with the branch."""

    def __init__(self, connection: nn.Module):
        super().__init__()
        self.connection = connection

    def forward(self, stream: Tensor, branch: Any) -> Tensor:
        read, write = self.connection(stream)
        return write(branch(read))


def mhc_v1(depth: int, num_fracs: int = 1) -> ResidualStack:
    """hyper-connections' manifold-constrained connection, 4 streams, around our branches."""
    from hyper_connections import mc_get_init_and_expand_reduce_stream_functions as build

    init, expand, collapse = build(4, num_fracs=num_fracs, dim=WIDTH)
    connections = [Around(init(layer_index=i)) for i in range(depth)]
    return ResidualStack(connections, width=WIDTH, expand=expand, collapse=collapse)


mhc_v1_4_fractions = partial(mhc_v1, num_fracs=4)


def hyper_connections(depth: int) -> ResidualStack:
    """hyper-connections' classic connection, 4 streams, around our branches."""
    from hyper_connections import get_init_and_expand_reduce_stream_functions as build

    init, expand, collapse = build(4, dim=WIDTH)
    connections = [Around(init(layer_index=i)) for i in range(depth)]
    return ResidualStack(connections, width=WIDTH, expand=expand, collapse=collapse)
