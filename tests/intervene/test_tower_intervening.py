"""Interventions through a tower's connections, for every scheme there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mainstem.connections import scheme_names
from mainstem.errors import ConfigError
from mainstem.intervene import Replace, Scale, Skip, Zero, intervening
from mainstem.observe import find_stream
from mainstem.tower import Tower, TowerConfig

X = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(0))


def tower(connection: str, **changes: Any) -> Tower:
    torch.manual_seed(1)
    sizes = {"vocab_size": 50, "width": 16, "num_blocks": 4, "num_heads": 2, "ffn_width": 24}
    built = Tower(TowerConfig(**{**sizes, "connection": connection, **changes})).double().eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return built.requires_grad_(False)


class _PassOn(nn.Module):
    def forward(self, stream: Any, *args: Any) -> Any:
        return stream


@pytest.mark.parametrize("name", scheme_names())
def test_a_block_that_writes_nothing_or_is_not_there(name: str) -> None:
    model = tower(name)
    plain = model(X)
    with intervening(model, Zero(blocks=[2], part="writes")):
        silent = model(X)
    refused = model.config.scheme().properties.has_history
    if refused:
        with pytest.raises(ConfigError, match="history"), intervening(model, Skip(blocks=[2])):
            pass
    else:
        with intervening(model, Skip(blocks=[2])):
            skipped = model(X)
    assert torch.equal(model(X), plain)
    block: Any = model.blocks[2]
    for matrix in (block.attn.out_proj, block.mlp.down_proj):
        for parameter in matrix.parameters():
            parameter.zero_()
    torch.testing.assert_close(silent, model(X), rtol=1e-12, atol=1e-13)
    assert not torch.allclose(silent, plain)
    if not refused:
        model.blocks[2] = _PassOn()
        assert torch.equal(skipped, model(X))


def test_with_a_map_and_without_are_the_same_for_pre_norm() -> None:
    model = tower("pre_norm")
    found = find_stream(model, {"token_ids": X})
    chosen = [Scale(blocks=[1], part="mlp", factor=-0.5, positions=[3]), Skip(blocks=[2], part="attn")]
    with intervening(model, chosen, found):
        by_map = model(X)
    with intervening(model, chosen):
        by_connections = model(X)
    torch.testing.assert_close(by_map, by_connections, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(by_map, model(X))


def test_a_parallel_block_and_a_value_residual() -> None:
    model = tower("pre_norm", parallel=True)
    with pytest.raises(ConfigError, match="one sum"), intervening(model, Skip(blocks=[0], part="mlp")):
        pass
    with intervening(model, Zero(blocks=[0], part="mlp")):
        ours = model(X)
    block: Any = model.blocks[0]
    for parameter in block.mlp.down_proj.parameters():
        parameter.zero_()
    torch.testing.assert_close(ours, model(X), rtol=1e-12, atol=1e-13)

    passing = tower("pre_norm", value_residual="learned")
    state: dict[str, Tensor] = {}

    def keep(_m: nn.Module, _a: Any, out: Any) -> None:
        state["after"] = out[0]

    hook = passing.blocks[1].register_forward_hook(keep)
    plain = passing(X)
    hook.remove()
    with intervening(passing, Replace(blocks=[1], part="state", values={1: state["after"]})):
        assert torch.equal(passing(X), plain)
    with intervening(passing, Zero(blocks=[1], part="state")):
        assert not torch.allclose(passing(X), plain)
    assert all(not m._forward_hooks for m in passing.modules())
