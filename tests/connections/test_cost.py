"""Costs against closed forms: what a scheme adds to another is known to the byte."""

from __future__ import annotations

import pytest
import torch

from mainstem.connections import (
    DeepNorm,
    NoResidual,
    NormConfig,
    PostNorm,
    PreNorm,
    SandwichNorm,
    scheme_names,
)
from mainstem.connections.cost import Cost, count_cost
from mainstem.connections.table import scheme_row, scheme_rows

WIDTH, SUBLAYERS, TOKENS = 64, 6, 8
ENTRY = 4 * WIDTH
"""Bytes of one token's vector in fp32."""


def cost(scheme: object, **more: object) -> Cost:
    return count_cost(scheme, width=WIDTH, num_sublayers=SUBLAYERS, tokens=TOKENS, **more)


def test_a_plain_addition_is_three_vectors_and_one_operation_an_entry() -> None:
    plain, none = cost(PreNorm()), cost(NoResidual())
    assert plain.bytes_moved - none.bytes_moved == 3 * ENTRY
    assert plain.flops - none.flops == WIDTH
    assert plain.bytes_saved == none.bytes_saved  # an addition keeps nothing for backward
    assert plain.parameters == none.parameters == WIDTH


def test_deep_norm_adds_one_product_with_a_number() -> None:
    deep, post = cost(DeepNorm()), cost(PostNorm())
    assert deep.flops - post.flops == WIDTH
    assert deep.bytes_moved - post.bytes_moved == 2 * ENTRY + 4 / TOKENS
    assert deep.bytes_saved == post.bytes_saved  # d(ax)/dx = a, a buffer


def test_a_second_norm_costs_what_the_first_costs() -> None:
    plain, twice = cost(PreNorm()), cost(SandwichNorm())
    add = 3 * ENTRY
    assert twice.bytes_moved - add == 2 * (plain.bytes_moved - add)
    assert twice.flops - WIDTH == 2 * (plain.flops - WIDTH)
    assert twice.bytes_saved == 2 * plain.bytes_saved
    assert twice.parameters == 2 * plain.parameters


def test_a_layer_norm_has_a_bias_to_read_and_to_learn() -> None:
    plain = cost(PreNorm(), norm=NormConfig(kind="layer"))
    assert plain.parameters == 2 * WIDTH


def test_counting_leaves_random_state_alone() -> None:
    state = torch.get_rng_state()
    cost(PreNorm())
    assert torch.equal(torch.get_rng_state(), state)


def test_every_scheme_has_a_row() -> None:
    rows = {row.name: row for row in scheme_rows()}
    assert sorted(rows) == scheme_names()
    for row in rows.values():
        assert row.paper, row.name
        assert row.formula, row.name
        assert 1950 < row.year < 2100, row.name
        assert row.exact_start in ("always", "option", "no"), row.name
        assert (row.exact_start == "always") == (row.start_distance == 0.0), row.name


@pytest.mark.parametrize(("scheme", "start"), [(PreNorm(), "always"), (PostNorm(), "no")])
def test_how_a_scheme_starts(scheme: object, start: str) -> None:
    assert scheme_row(scheme).exact_start == start
