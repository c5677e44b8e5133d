"""Norm placement and nGPT against the blocks of ai2-olmo-core 3.0.0, around branches of ours."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agreement import Row
from around import WIDTH, build, copy_weights, draw, fp64, joins_of, side, some, stand_in, through
from families import AllInFloat64
from torch import Tensor, nn

from mainstem.connections import NormConfig, make_scheme

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

NORMS = ({"attention_norm": "norm"}, {"feed_forward_norm": "norm"})
CASES: dict[str, tuple[str, tuple[dict[str, str], dict[str, str]]]] = {
    "pre_norm": ("TransformerBlock", NORMS),
    "layer_norm_scaling": ("LayerNormScaledTransformerBlock", NORMS),
    "reordered_norm": ("ReorderedNormTransformerBlock", NORMS),
    "sandwich_norm": (
        "PeriNormTransformerBlock",
        (
            NORMS[0] | {"post_attention_norm": "write_norm"},
            NORMS[1] | {"post_feed_forward_norm": "write_norm"},
        ),
    ),
    "ngpt": ("NormalizedTransformerBlock", ({"attn_alpha": "stored_alpha"}, {"mlp_alpha": "stored_alpha"})),
}


def client(name: str) -> type:
    """What stands in for the clients of cloud storage that its files are read with."""
    return type(name, (), {"recoverable_errors": (), "__init__": lambda self, *_, **__: None})


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("cached_path", "cached_path.schemes"):
        stand_in(monkeypatch, name, client)
    return pytest.importorskip(
        "olmo_core.nn.transformer.block", reason="needs ai2-olmo-core; `make test-oracle` installs it"
    )


def branch(seed: int) -> nn.Module:
    with fp64():
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    draw(made, seed=seed)
    return made


@pytest.mark.parametrize("name", CASES)
def test_three_blocks(name: str, blocks: Any, agree: Callable[..., None]) -> None:
    from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType

    kind, places = CASES[name]
    rms = LayerNormConfig(name=LayerNormType.rms, eps=1e-6, bias=False)
    norm = {} if name == "ngpt" else {"layer_norm": rms}
    branches = [branch(i) for i in range(6)]
    theirs = [
        getattr(blocks, kind)(
            d_model=WIDTH,
            block_idx=i,
            n_layers=3,
            sequence_mixer=SimpleNamespace(build=lambda *_, i=i, **__: branches[2 * i]),
            feed_forward=SimpleNamespace(build=lambda *_, i=i, **__: branches[2 * i + 1]),
            **norm,
        ).double()
        for i in range(3)
    ]
    joins = joins_of(build(make_scheme(name), 6, NormConfig()))
    own: dict[str, Tensor] = {}
    for i, block in enumerate(theirs):
        draw(block, seed=10 + i)
        if name == "layer_norm_scaling":
            block.ln_scale = torch.tensor((i + 1) ** -0.5, dtype=torch.float64)
        for join, place in zip(joins[2 * i : 2 * i + 2], places, strict=True):
            suffix = "" if name == "ngpt" else ".weight"
            pairs = {
                f"{i}.{a}{suffix}": (block.get_parameter(a + suffix).detach(), join.get_parameter(b + suffix))
                for a, b in place.items()
            }
            copy_weights(pairs)
            own |= {key: ours for key, (_, ours) in pairs.items()}
    weights = {f"{i}.{k}": p for i, block in enumerate(theirs) for k, p in block.named_parameters()}
    x = some(2, 5, WIDTH).requires_grad_()
    reads = [(lambda r, b=b: b(r / WIDTH**0.5)) for b in branches] if name == "ngpt" else branches
    ours = side(through(joins, x, reads), x, **weights | own)
    with AllInFloat64():
        out = nn.functional.normalize(x, dim=-1) if name == "ngpt" else x
        for block in theirs:
            out = block(out)
    row = Row(name, "ai2-olmo-core", kind, "three blocks, every weight")
    agree(row, ours, side(out, x, **weights))
