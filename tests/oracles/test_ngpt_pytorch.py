"""nGPT's residual against nGPT-pytorch 0.2.16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from agreement import Row
from around import WIDTH, build, fp64, joins_of, side, some, through

from mainstem.connections import NormConfig, make_scheme

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


def test_two_layers(agree: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their attention and feed-forward, matrices normed by parametrisation, read a vector of length 1.

    Ours are handed ``sqrt(width)`` times it. Their factor is signed, ours ``|alpha|`` as the authors'; it is
    positive here.
    """
    package = pytest.importorskip(
        "nGPT_pytorch.nGPT", reason="needs nGPT-pytorch; `make test-oracle` installs it"
    )
    for kind in vars(package).values():  # its modules compare by their sizes, and so have lost their hash
        if isinstance(kind, type) and kind.__hash__ is None:
            monkeypatch.setattr(kind, "__hash__", object.__hash__)
    torch.manual_seed(0)
    with fp64():
        parts = [
            part
            for _ in range(2)
            for part in (
                package.Attention(WIDTH, dim_head=8, heads=2, flash_kwargs={"enable_math": True}),
                package.FeedForward(WIDTH, expand_factor=2),
            )
        ]
        layers = [package.Residual(part, WIDTH, 0.2) for part in parts]
    joins = joins_of(build(make_scheme("ngpt", alpha_start=0.2), 4, NormConfig()))
    own, weights = {}, {}
    for i, (layer, join) in enumerate(zip(layers, joins, strict=True)):
        alpha = layer.branch_scale.scale
        with torch.no_grad():
            alpha.mul_(0.5 + torch.rand(WIDTH, generator=torch.Generator().manual_seed(i), dtype=alpha.dtype))
            join.get_parameter("stored_alpha").copy_(alpha)
        own[f"{i}.branch_scale.scale"] = join.get_parameter("stored_alpha")
        weights |= {f"{i}.{k}": p for k, p in layer.named_parameters()}
    x = some(2, 5, WIDTH).requires_grad_()
    branches = [lambda r, part=part: part(r / WIDTH**0.5) for part in parts]
    ours = side(through(joins, x, branches), x, **weights | own)
    out = F.normalize(x, dim=-1)
    for layer in layers:
        out = layer(out)
    agree(Row("ngpt", "nGPT-pytorch", "Residual", "two layers, every weight"), ours, side(out, x, **weights))
