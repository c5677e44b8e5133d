"""The GRU gate against DI-engine 0.5.3, whose gate is GTrXL's as published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import Row
from around import WIDTH, build, copy_weights, draw, fp64, joins_of, one_file, side, some, stand_in

from mainstem.connections import NormConfig, make_scheme

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


def test_gru_gating_unit(agree: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One step after a relu, as its layer has it. Its matrices are six, ours two with three in each."""
    stand_in(monkeypatch, "ding.torch_utils.network.nn_module", lambda _: None)
    with fp64():
        theirs = one_file("ding", "torch_utils/network/gtrxl.py").GRUGatingUnit(WIDTH)
    draw(theirs)
    join = joins_of(build(make_scheme("gru_gate"), 1, NormConfig()))[0]
    own = dict(join.named_parameters())
    weights = dict(theirs.named_parameters())
    for ours, names in (("update_maps", ("Wr", "Wz", "Wg")), ("state_maps", ("Ur", "Uz", "Ug"))):
        copy_weights({ours: (torch.cat([weights[f"{n}.weight"].detach() for n in names]), own[ours])})
    copy_weights({"bias": (theirs.bg.detach(), own["carry_bias"])})
    x, u = some(2, 5, WIDTH).requires_grad_(), some(2, 5, WIDTH, seed=3).requires_grad_()
    inputs = {"input": x, "update": u}
    new: Any = join.write(x, u, None)
    ours = side(new, inputs, w=own["update_maps"], u=own["state_maps"], bg=own["carry_bias"])
    gradients: Any = dict(ours.gradients)
    for letter in "wu":
        parts = gradients.pop(letter).chunk(3)
        gradients |= {f"{letter.upper()}{n}.weight": part for n, part in zip("rzg", parts, strict=True)}
    row = Row("gru_gate", "DI-engine", "GRUGatingUnit", "one step, every weight")
    agree(row, ours._replace(gradients=gradients), side(theirs(x, u.relu()), inputs, **weights))
