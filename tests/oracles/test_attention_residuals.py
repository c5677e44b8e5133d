"""Attention residuals against fla-core 0.6.0's plain function and whole models of attn-res 0.1.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import Row
from around import WIDTH, build, copy_weights, draw, joins_of, one_file, side, some
from families import AllInFloat64
from torch import Tensor

from mainstem.connections import NormConfig, make_scheme

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("num_sources", [2, 9])
def test_fla(num_sources: int, agree: Callable[..., None]) -> None:
    """The read of one sublayer with its norm, of sources of any size; gradients of each source."""
    naive_attnres = one_file("fla", "ops/attnres/naive.py").naive_attnres
    join: Any = joins_of(build(make_scheme("attention_residuals"), 4, NormConfig()))[2]
    draw(join)
    sources = [some(2, 5, WIDTH, seed=i).mul(i + 1).requires_grad_() for i in range(num_sources)]
    inputs = {str(i): v for i, v in enumerate(sources)}
    weights = {
        "query": join.depth_query.query,
        "gain": join.depth_query.key_gain,
        "norm": join.norm.weight,
    }
    read, _ = join.read(tuple(sources))
    with AllInFloat64():
        expected = naive_attnres(weights["query"], sources, weights["gain"], weights["norm"], 1e-6)
    what = f"the read of {num_sources} sources, every weight"
    row = Row("attention_residuals", "fla-core", "naive_attnres", what)
    agree(row, side(read, inputs, **weights), side(expected, inputs, **weights))


@pytest.mark.parametrize(("mode", "num_blocks"), [("FULL", 1), ("BLOCK", 2), ("BLOCK", 4)])
def test_attn_res(mode: str, num_blocks: int, agree: Callable[..., None]) -> None:
    """Whole models with ours around their attention and feed-forward.

    Full, they are the paper's but for the end, where they add the sources up instead of reading them once
    more; so are ours here. By block, theirs add a finished block to the sources only after the sublayer that
    begins the next has read, which sees it as the partial block all the same: the same sources.
    """
    package = pytest.importorskip("attn_res", reason="needs attn-res; `make test-oracle` installs it")
    config = package.TransformerConfig(
        d_model=WIDTH,
        n_layers=8,
        n_heads=2,
        n_kv_heads=1,
        vocab_size=20,
        max_seq_len=16,
        attn_res_mode=package.AttnResMode[mode],
        n_blocks=num_blocks,
    )
    torch.manual_seed(0)
    theirs = package.AttnResTransformer(config).double()
    draw(theirs)
    theirs.rope_freqs = theirs.rope_freqs.to(torch.complex128)
    block_size = 1 if mode == "FULL" else 8 // num_blocks
    joins: Any = joins_of(build(make_scheme("attention_residuals", block_size=block_size), 8, NormConfig()))
    own: dict[str, Tensor] = {}
    for i, (join, layer) in enumerate(zip(joins, theirs.layers, strict=True)):
        pairs = {f"layers.{i}.norm.weight": (layer.norm.weight.detach(), join.norm.weight)}
        if i:
            query = join.depth_query
            query.key_gain.requires_grad_(False)
            pairs[f"layers.{i}.attn_res.pseudo_query"] = (layer.attn_res.pseudo_query.detach(), query.query)
        copy_weights(pairs)
        own |= {name: ours for name, (_, ours) in pairs.items()}
    tokens = torch.randint(0, 20, (2, 7), generator=torch.Generator().manual_seed(5))
    # Of the first sublayer, which has one source.
    weights = {k: p for k, p in theirs.named_parameters() if k != "layers.0.attn_res.pseudo_query"}
    with AllInFloat64():
        expected = theirs(tokens)
        embedded = theirs.token_emb(tokens)
        mask = theirs._build_causal_mask(7, tokens.device).double()
        stream: Any = (embedded,)
        for i, (join, layer) in enumerate(zip(joins, theirs.layers, strict=True)):
            more = (theirs.rope_freqs[:7], mask) if i % 2 == 0 else ()
            stream = join(stream, layer.fn, *more)
        logits = theirs.lm_head(theirs.out_norm(sum(stream)))
    row = Row(
        "attention_residuals",
        "attn-res",
        f"AttnResTransformer({mode.lower()}, {8 // block_size} blocks)",
        "logits of the whole model, every weight",
        "its keys have no gain, and its last read is a sum: so here",
    )
    agree(row, run_of(logits, weights | own), run_of(expected, weights))


def run_of(logits: Tensor, weights: dict[str, Tensor]) -> Any:
    return side(logits, {}, **weights)
