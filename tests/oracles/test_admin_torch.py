"""Admin against admin-torch 0.1.0, its authors' code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from agreement import Row
from around import WIDTH, build, draw, fp64, joins_of, side, some
from torch import Tensor, nn

from mainstem.connections import NormConfig, make_scheme

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize(("change", "theirs"), [("log", "O(logn)"), ("constant", "O(1)"), ("linear", "O(n)")])
def test_one_step(change: str, theirs: str, agree: Callable[..., None]) -> None:
    """Their module is the sum; the norm that follows it is ours on both sides."""
    admin_torch = pytest.importorskip(
        "admin_torch", reason="needs admin-torch; `make test-oracle` installs it"
    )
    with fp64():
        module = admin_torch.as_module(24, theirs, as_parameter=True, embed_dim=WIDTH)
    join = joins_of(build(make_scheme("admin", output_change=change, trained=True), 24, NormConfig()))[3]
    norm, own = join.get_submodule("norm"), join.get_parameter("carry_weight")
    draw(norm)
    x, u = some(2, 5, WIDTH).requires_grad_(), some(2, 5, WIDTH, seed=3).requires_grad_()
    new = join.write(x, u, None)
    assert isinstance(new, Tensor)
    assert isinstance(norm, nn.RMSNorm)
    inputs = {"input": x, "update": u}
    ours = side(new, inputs, omega=own, norm=norm.weight)
    expected = side(norm(module(x, u)), inputs, omega=module.omega, norm=norm.weight)
    agree(
        Row("admin", "admin-torch", f"as_module({theirs})", "one step from its start, omega"), ours, expected
    )
