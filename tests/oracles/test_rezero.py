"""ReZero against rezero 0.1.0, its authors' code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from agreement import Row
from around import WIDTH, build, draw, fp64, joins_of, side, some, through

from mainstem.connections import NormConfig, ReZero

pytestmark = pytest.mark.oracle


def test_encoder_layer(agree: Callable[..., None]) -> None:
    """Their layer is PyTorch's encoder layer without norms and one scalar for both branches."""
    rezero = pytest.importorskip("rezero.transformer", reason="needs rezero; `make test-oracle` installs it")
    with fp64():
        theirs = rezero.RZTXEncoderLayer(WIDTH, 2, dim_feedforward=32, dropout=0.0)
    draw(theirs)
    joins = joins_of(build(ReZero(initial_value=theirs.resweight.item()), 2, NormConfig()))
    x = some(5, 2, WIDTH).requires_grad_()
    branches = (lambda s: theirs.self_attn(s, s, s)[0], lambda s: theirs.linear2(theirs.linear1(s).relu()))
    shared = {k: p for k, p in theirs.named_parameters() if k != "resweight"}
    own = {str(i): join.get_parameter("write_weight") for i, join in enumerate(joins)}
    ours = side(through(joins, x, branches), x, **shared | own)
    gradients = dict(ours.gradients)
    first, second = gradients.pop("0"), gradients.pop("1")
    assert first is not None
    assert second is not None
    gradients["resweight"] = (first + second).reshape(theirs.resweight.shape)
    row = Row(
        "rezero",
        "rezero",
        "RZTXEncoderLayer",
        "one layer, every weight",
        "one scalar for both branches: its gradient is the sum of our two",
    )
    agree(row, ours._replace(gradients=gradients), side(theirs(x), x, **dict(theirs.named_parameters())))
