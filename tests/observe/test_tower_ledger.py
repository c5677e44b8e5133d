"""The ledger of towers: two independent ways to the same rows, for every connection, at 96 blocks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mainstem.connections import NormConfig, make_scheme, scheme_names
from mainstem.errors import BooksError, StreamNotFoundError
from mainstem.observe import Ledger, find_stream, ledger, tower_ledger
from mainstem.tower import Tower, TowerConfig

# fp32: 192 carries through norms, each rounding at 6e-8 of a row that may be 30 times the sum; measured
# 2.5e-6.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
SINGLE_CARRIED = {
    "depth_scaled",
    "layer_norm_scaling",
    "layer_scale",
    "orthogonal_update",
    "pre_norm",
    "reordered_norm",
    "rezero",
    "sandwich_norm",
    "stochastic_depth",
    "sub_norm",
}
# Streams that start as copies and are mixed with weights that sum to one stay copies of what they started as.
MIXED_WHOLE = {
    "frac_connections",
    "gated_streams",
    "hyper_connections",
    "identity_hc",
    "independent_hc",
    "mhc",
}
# A learned sum of n streams weighs them at the bottom a little otherwise than at the top; a gate that is the
# final norm too also divides by another size.
LEARNED_SUMS = {"independent_hc": 1e-2, "gated_streams": 1e-1}


def make_tower(
    connection: str, dtype: torch.dtype, *, kind: str = "rms", num_blocks: int = 96, **more: object
) -> Tower:
    torch.manual_seed(0)
    config = TowerConfig(
        vocab_size=50,
        width=16,
        num_blocks=num_blocks,
        num_heads=2,
        ffn_width=32,
        connection=connection,
        norm=NormConfig(kind=kind),
        **more,
    )
    tower = Tower(config).to(dtype).eval()
    for parameter in tower.parameters():
        if parameter.ndim == 1:  # norms that are not the identity
            parameter.data += 0.1 * torch.randn_like(parameter)
    return tower


# A gate, an erasure, an interpolation, a matrix on what is carried, or a norm over two states: no sum of one
# stream and its writes, which data flow says instead of a map.
NOT_BY_DATA_FLOW = {
    "b2t": "is no sum",
    "deep_delta": "is no sum",
    "gru_gate": "is no sum",
    "highway": "is no sum",
    "laurel": "multiplied by a matrix",
    "ngpt": "is no sum",
}
# Up to the block whose output is kept there is one state, and beyond it there are two.
HALF_BY_DATA_FLOW = {"backout"}


def by_data_flow(connection: str) -> bool:
    """Whether the tower has states that every path passes, each an addition away from the one before.

    A history has none between its blocks, and a gate is no addition.
    """
    return not make_scheme(connection).properties.has_history and connection not in NOT_BY_DATA_FLOW


def both(tower: Tower) -> tuple[Ledger, Ledger]:
    """The ledger by linearization, and the one by data flow; the first twice where data flow must refuse."""
    ids = torch.randint(0, 50, (2, 7))
    inputs = {"token_ids": ids}
    linearized = tower_ledger(tower, ids)
    connection = tower.config.connection
    if connection in HALF_BY_DATA_FLOW:
        return linearized, linearized
    if not by_data_flow(connection):
        reason = NOT_BY_DATA_FLOW.get(connection, "no residual stream was found")
        with pytest.raises(StreamNotFoundError, match=f"{reason}.*tower_ledger"):
            find_stream(tower, inputs)
        return linearized, linearized
    return linearized, ledger(tower, inputs, find_stream(tower, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("connection", scheme_names())
def test_rows_sum_to_the_final_stream_at_96_blocks(connection: str, dtype: torch.dtype) -> None:
    linearized, followed = both(make_tower(connection, dtype))
    for found in (linearized, followed):
        assert len([label for label in found.labels if label.endswith("_out")]) == 192
        assert found.error <= TOLERANCE[dtype]
        assert found.check(TOLERANCE[dtype]) is found


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("connection", scheme_names())
def test_linearization_and_data_flow_agree_row_by_row(connection: str, kind: str) -> None:
    tower = make_tower(
        connection, torch.float64, kind=kind, num_blocks=6, positions="learned", max_positions=8
    )
    linearized, followed = both(tower)
    if followed.final.ndim == 4:  # n streams: data flow stops before they are made one again
        collapse = tower.trunk.linearize_collapse(followed.final)
        rows = torch.stack([collapse(row) for row in followed.rows])
        followed = dataclasses.replace(followed, rows=rows, final=tower.trunk.collapse(followed.final))
    size = followed.final.norm()
    # A LayerNorm on a write has a bias, which the data flow counts with the write and linearize with the bias
    # row.
    biased_writes = kind == "layer" and connection in ("sandwich_norm", "reordered_norm")
    for label in followed.labels:
        if not (biased_writes and label.endswith("_out")):
            assert (linearized[label] - followed[label]).norm() <= 1e-12 * size, label
    if biased_writes:
        writes = [label for label in followed.labels if label.endswith("_out")]
        difference = sum(followed[label] - linearized[label] for label in writes)
        assert (difference - linearized["bias"]).norm() <= 1e-12 * size
    else:
        assert set(linearized.labels) == set(followed.labels)


@pytest.mark.parametrize("connection", scheme_names())
def test_carried_share_of_the_embedding(connection: str) -> None:
    linearized, followed = both(make_tower(connection, torch.float64, num_blocks=12))
    share = linearized.carried_share()
    close = LEARNED_SUMS.get(connection, 1e-10)
    torch.testing.assert_close(share, followed.carried_share(), rtol=close, atol=1e-12)
    if connection in SINGLE_CARRIED:
        assert torch.equal(share, torch.ones_like(share))
    elif connection == "no_residual":
        assert torch.equal(share, torch.zeros_like(share))
    elif connection in MIXED_WHOLE:
        torch.testing.assert_close(share, torch.ones_like(share), rtol=close, atol=0)
    elif not by_data_flow(connection):  # coefficients of its own, moved at random: any finite share
        assert bool(share.isfinite().all())
    else:  # Post-LN and DeepNorm: neither kept whole nor lost
        assert bool((share > 0).all())
        assert not torch.allclose(share, torch.ones_like(share), atol=1e-2)


def test_a_parallel_block_has_a_row_for_each_branch() -> None:
    linearized, followed = both(make_tower("pre_norm", torch.float64, num_blocks=4, parallel=True))
    assert linearized.labels == ("embed", *(f"{i}_{kind}_out" for i in range(4) for kind in ("attn", "mlp")))
    for label in linearized.labels:
        torch.testing.assert_close(linearized[label], followed[label], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("num_blocks", [6, 96])
def test_a_map_that_ends_below_the_last_block_says_so(num_blocks: int) -> None:
    tower = make_tower("backout", torch.float64, num_blocks=num_blocks)
    inputs = {"token_ids": torch.randint(0, 50, (2, 7))}
    stream_map = find_stream(tower, inputs)
    kept = 2 * num_blocks // 3
    assert [block.module for block in stream_map.blocks] == [f"blocks.{i}" for i in range(kept + 1)]
    (note,) = stream_map.notes
    assert note.startswith(f"{num_blocks - kept - 1} blocks are left out, from blocks.{kept + 1} on:")
    followed = ledger(tower, inputs, stream_map)
    assert followed.error <= TOLERANCE[torch.float64]
    # What the lower blocks wrote comes out less the share that is taken out again at the end.
    linearized = tower_ledger(tower, inputs["token_ids"])
    share = 1 - tower.get_parameter("trunk.difference.backout_weight")
    for label in followed.labels:
        torch.testing.assert_close(linearized[label], share * followed[label], rtol=1e-10, atol=1e-14)


def test_a_ledger_that_does_not_balance_is_refused() -> None:
    linearized, _ = both(make_tower("pre_norm", torch.float32, num_blocks=2))
    linearized.rows[1] *= 1.01
    with pytest.raises(BooksError, match="does not balance"):
        linearized.check(1e-5)
