"""Pre-LN and Post-LN against torch's own encoder layers, and the GRU gate against its cell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import Row
from around import WIDTH, build, copy_weights, draw, fp64, joins_of, side, some, through
from torch import nn

from mainstem.connections import GRUGateConnection, NormConfig, make_scheme


@pytest.mark.parametrize("name", ["pre_norm", "post_norm"])
def test_encoder_layers(name: str, agree: Callable[..., None]) -> None:
    with fp64():
        layers = [
            nn.TransformerEncoderLayer(
                WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=name == "pre_norm"
            )
            for _ in range(3)
        ]
    for seed, layer in enumerate(layers):
        draw(layer, seed=seed)
    joins = joins_of(build(make_scheme(name), 6, NormConfig(kind="layer", eps=1e-5)))
    weights = {}
    for i, layer in enumerate(layers):
        for norm, join in zip((layer.norm1, layer.norm2), joins[2 * i : 2 * i + 2], strict=True):
            join.get_submodule("norm").load_state_dict(norm.state_dict())
        weights |= {f"{i}.{k}": p for k, p in layer.named_parameters()}
    branches = [f for b in layers for f in ((lambda s, b=b: b._sa_block(s, None, None)), b._ff_block)]
    x = some(2, 5, WIDTH).requires_grad_()
    own = {
        f"{i}.norm{k + 1}.{p}": w for i in range(3) for k in range(2) for p, w in norm_of(joins[2 * i + k])
    }
    ours = side(through(joins, x, branches), x, **weights | own)
    out = x
    for layer in layers:
        out = layer(out)
    theirs = side(out, x, **weights)
    agree(Row(name, "torch", "nn.TransformerEncoderLayer", "three layers, every weight"), ours, theirs)


def norm_of(join: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(join.get_submodule("norm").named_parameters())


GRU_DEPARTS = "resets after the matrix, GTrXL before: the same where that matrix is diagonal, as here"


def gru_pair(cell: nn.GRUCell, ours: GRUGateConnection) -> dict[str, object]:
    """Give the cell our weights; return where they agree. The map of the candidate is made diagonal."""
    width = cell.hidden_size
    draw(ours)
    with torch.no_grad():
        ours.state_maps[2 * width :] = torch.diag(ours.state_maps[2 * width :].diagonal())
        for bias in (cell.bias_ih, cell.bias_hh):
            bias.zero_()
    sign = torch.ones(3, 1, 1, dtype=torch.float64)
    sign[1] = -1

    def turned(maps: torch.Tensor) -> torch.Tensor:
        return (maps.unflatten(0, (3, width)) * sign).flatten(0, 1)

    maps = {
        "weight_ih": (turned(ours.update_maps.detach()), cell.weight_ih),
        "weight_hh": (turned(ours.state_maps.detach()), cell.weight_hh),
        "bias": (ours.carry_bias.detach(), cell.bias_ih[width : 2 * width]),
    }
    copy_weights(maps)
    return {"turned": turned}


def held_to_a_cell(cell: nn.GRUCell, run: Callable[..., torch.Tensor]) -> tuple[object, object]:
    """Both sides of one step ``run(update, stream)`` of something that holds ``cell``, and of ours."""
    width = cell.hidden_size
    ours = GRUGateConnection(nn.Identity(), width=width, bias_start=2.0, relu=False).double()
    turned = gru_pair(cell, ours)["turned"]
    x, u = some(2, 5, width).requires_grad_(), some(2, 5, width, seed=3).requires_grad_()
    new = ours.write(x, u, None)
    assert isinstance(new, torch.Tensor)
    inputs = {"input": x, "update": u}
    mine = side(new, inputs, ih=ours.update_maps, hh=ours.state_maps, bias=ours.carry_bias)
    theirs = side(run(u, x), inputs, ih=cell.weight_ih, hh=cell.weight_hh, bias=cell.bias_ih)
    for one in (mine, theirs):
        assert isinstance(one.gradients, dict)
        # Off the diagonal the candidate's map is another function of the weights.
        full = one.gradients.pop("hh")
        full = turned(full) if one is mine else full
        one.gradients["gates' maps"] = full[: 2 * width]
        one.gradients["candidate's diagonal"] = full[2 * width :].diagonal()
    mine.gradients["ih"] = turned(mine.gradients["ih"])
    theirs.gradients["bias"] = theirs.gradients["bias"][width : 2 * width]
    return mine, theirs


def test_gru_cell(agree: Callable[..., None]) -> None:
    with fp64():
        cell = nn.GRUCell(WIDTH, WIDTH)
    step = held_to_a_cell(cell, lambda u, x: cell(u.flatten(0, 1), x.flatten(0, 1)).reshape(x.shape))
    agree(Row("gru_gate", "torch", "nn.GRUCell", "one step, every weight", GRU_DEPARTS), *step)
