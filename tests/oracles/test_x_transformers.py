"""Whole decoders of x-transformers 2.12.2 with our connections around their attention and feed-forward.

Of releases 2.14.0 to 2.31.10 the hyper-connections mix by a constant matrix of ones; 2.12.2 is the paper's.
Not compared: its ``orthog_residual`` and ``mv_split_residual`` (not there yet in 2.12.2, and leak the future
where they are), ``integrate_layers``, ``add_value_residual``, ``unet_skips`` and ``reinject_input``, which
change what attention reads and not how a write joins the stream: no scheme of ours does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import Row
from around import WIDTH, build, copy_weights, draw, fp64, joins_of, side, some, through
from test_torch import GRU_DEPARTS, held_to_a_cell
from torch import Tensor

from mainstem.connections import Connection, NormConfig, Scheme, make_scheme

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

LAYER_NORM = NormConfig(kind="layer", eps=1e-5, bias=False)
STREAMS = 4

CASES: dict[str, tuple[dict[str, Any], Scheme]] = {
    "plain": ({}, make_scheme("pre_norm")),
    "pre_norm=False": ({"pre_norm": False}, make_scheme("post_norm")),
    "sandwich_norm": ({"sandwich_norm": True}, make_scheme("sandwich_norm")),
    "use_layerscale": ({"use_layerscale": True}, make_scheme("layer_scale")),
    "num_residual_streams": (
        {"num_residual_streams": STREAMS},
        make_scheme("hyper_connections", num_streams=STREAMS),
    ),
}


def package() -> Any:
    return pytest.importorskip(
        "x_transformers.x_transformers", reason="needs x-transformers; `make test-oracle` installs it"
    )


def decoder(options: dict[str, Any]) -> Any:
    with fp64():
        made = (
            package()
            .Decoder(dim=WIDTH, depth=2, heads=2, attn_dim_head=8, norm_add_unit_offset=False, **options)
            .eval()
        )
    draw(made)
    return made


def pairs_of(join: Connection, layer: Any, options: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Name of theirs below a layer -> (theirs, ours)."""
    (pre, after_branch, after), block, residual = layer
    own = dict(join.named_parameters())
    norm = pre if pre is not None else after
    place = "0.0" if pre is not None else "0.2"
    found = {f"{place}.gamma": (norm.gamma, own.pop("norm.weight"))}
    if after_branch is not None:
        found["0.1.gamma"] = (after_branch.gamma, own.pop("write_norm.weight"))
    if "use_layerscale" in options:
        found["1.gamma"] = (block.gamma, own.pop("write_weight"))
    if "num_residual_streams" in options:
        names = {
            "norm.weight": "stream_norm.weight",
            "static_alpha": "static_mix",
            "static_beta": "static_write",
            "dynamic_alpha_fn": "dynamic_mix",
            "dynamic_beta_fn": "dynamic_write",
            "dynamic_alpha_scale": "mix_scale",
            "dynamic_beta_scale": "write_scale",
        }
        for theirs, ours in names.items():
            found[f"2.{theirs}"] = (residual.get_parameter(theirs), own.pop(ours))
    assert not own
    return found


def as_ours(name: str, weight: Tensor) -> Tensor:
    """Their dynamic matrices have the width first; ours of the write has a row, and scales are vectors."""
    if name.endswith("dynamic_alpha_fn"):
        return weight.T
    return weight[None] if name.endswith(("dynamic_beta_fn", "_scale")) else weight


def as_theirs(name: str, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    if name.endswith("dynamic_alpha_fn"):
        return gradient.T
    return gradient[0] if name.endswith(("dynamic_beta_fn", "_scale")) else gradient


@pytest.mark.parametrize("name", CASES)
def test_decoders(name: str, agree: Callable[..., None]) -> None:
    options, scheme = CASES[name]
    theirs = decoder(options)
    norm = LAYER_NORM
    trunk = build(scheme, 4, norm)
    joins = joins_of(trunk)
    own: dict[str, Tensor] = {}
    for i, (join, layer) in enumerate(zip(joins, theirs.layers, strict=True)):
        pairs = pairs_of(join, layer, options)
        copy_weights({k: (as_ours(k, a.detach()), b) for k, (a, b) in pairs.items()})
        own |= {f"layers.{i}.{k}": b for k, (_, b) in pairs.items()}
    if name != "pre_norm=False":
        copy_weights({"final": (theirs.final_norm.gamma.detach(), trunk.get_parameter("final_norm.weight"))})
        own["final_norm.gamma"] = trunk.get_parameter("final_norm.weight")
    blocks = [layer[1].fn if "use_layerscale" in options else layer[1] for layer in theirs.layers]
    branches = [(lambda s, b=b: out[0] if isinstance(out := b(s), tuple) else out) for b in blocks]
    x = some(2, 5, WIDTH).requires_grad_()
    weights = dict(theirs.named_parameters())
    stream = trunk.expand(x)
    if "num_residual_streams" in options:
        stream = stream + theirs.stream_emb
    out = trunk.final_norm(trunk.collapse(through(joins, stream, branches)))
    ours = side(out, x, **weights | own)
    ours = ours._replace(gradients={k: as_theirs(k, g) for k, g in ours.gradients.items()})
    departs = "adds a learned vector to each stream at the start" if "num_residual_streams" in options else ""
    row = Row(scheme.name, "x-transformers", f"Decoder({name})", "two blocks, every weight", departs)
    agree(row, ours, side(theirs(x), x, **weights))


def test_gru_gating(agree: Callable[..., None]) -> None:
    with fp64():
        theirs = package().GRUGating(WIDTH)
    row = Row("gru_gate", "x-transformers", "GRUGating", "one step, every weight", GRU_DEPARTS)
    agree(row, *held_to_a_cell(theirs.gru, lambda u, x: theirs(u, x)))


def test_a_scaled_residual_is_admins_before_its_norm(agree: Callable[..., None]) -> None:
    """``scale_residual`` multiplies the stream by a vector, as Admin does; Admin norms the sum."""
    with fp64():
        theirs = package().Residual(WIDTH, scale_residual=True)
    draw(theirs)
    join = joins_of(build(make_scheme("admin", trained=True), 4, NormConfig()))[1]
    copy_weights({"scale": (theirs.residual_scale.detach(), join.get_parameter("carry_weight"))})
    norm: Any = join.get_submodule("norm")
    x, u = some(2, 5, WIDTH).requires_grad_(), some(2, 5, WIDTH, seed=3).requires_grad_()
    inputs = {"input": x, "update": u}
    new = join.write(x, u, None)
    assert isinstance(new, torch.Tensor)
    ours = side(new, inputs, scale=join.get_parameter("carry_weight"), norm=norm.weight)
    expected = side(norm(theirs(u, x)), inputs, scale=theirs.residual_scale, norm=norm.weight)
    row = Row("admin", "x-transformers", "Residual(scale_residual)", "one step, every weight")
    agree(row, ours, expected)
