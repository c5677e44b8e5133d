"""Who is trained how: groups against the model, one update against figures worked out by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mainstem.connections import Connection, parameter_groups
from mainstem.tower import Tower, TowerConfig
from mainstem.training import MuonWithAdamW, make_optimizer

SCHEMES = ["pre_norm", "mhc", "hyper_connections", "attention_residuals", "depth_scaled", "post_norm"]


def tower(connection: str = "pre_norm", depth: int = 3, **changes: Any) -> Tower:
    options = {"vocab_size": 23, "width": 8, "num_heads": 2, **changes}
    return Tower(TowerConfig(num_blocks=depth, connection=connection, **options))


def optimizer_of(model: nn.Module, kind: Any = "adamw", **changes: Any) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {
        "learning_rate": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, **changes,
    }  # fmt: skip
    return make_optimizer(model, kind, **settings)


def settings_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The group of each parameter, by the parameter's name."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("connection", SCHEMES)
def test_groups_partition_the_parameters(connection: str, kind: str) -> None:
    model = tower(connection)
    grouped = [id(p) for group in optimizer_of(model, kind).param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("connection", SCHEMES)
def test_multipliers_and_decay_are_the_connections(connection: str, kind: str) -> None:
    model = tower(connection)
    settings = settings_of(model, optimizer_of(model, kind))
    names = {id(p): name for name, p in model.named_parameters()}
    # depth_scaled at 6 sublayers, base 2 (arXiv 2505.01618, table 1, alpha = 1): hidden rates as they are.
    for group in parameter_groups(model):
        for p in group.parameters:
            assert settings[names[id(p)]]["lr"] == pytest.approx(1e-2 * group.lr_multiplier, rel=1e-12)
            assert settings[names[id(p)]]["weight_decay"] == (0.1 if group.weight_decay else 0.0)


def test_depth_mup_slows_hidden_matrices() -> None:
    """alpha = 1/2: rate and epsilon times (L / L_base)^-1/2 inside the blocks (2505.01618, table 1)."""
    model = tower("depth_scaled", 8, connection_options={"rule": "depth_mup", "base_num_sublayers": 4})
    optimizer = optimizer_of(model)
    settings = settings_of(model, optimizer)
    slower = 1e-2 * (16 / 4) ** -0.5
    assert settings["blocks.3.attn.q_proj.weight"]["lr"] == pytest.approx(slower, rel=1e-12)
    assert settings["token_embedding.weight"]["lr"] == 1e-2
    assert all(group["eps"] == pytest.approx(1e-8 * (16 / 4) ** -0.5) for group in optimizer.param_groups)


@pytest.mark.parametrize("connection", SCHEMES)
def test_muon_gets_the_matrices_of_branches(connection: str) -> None:
    model = tower(connection)
    optimizer = optimizer_of(model, "muon")
    assert isinstance(optimizer, MuonWithAdamW)
    muon = {id(p) for group in optimizer.parts[0].param_groups for p in group["params"]}
    connections = {id(p) for m in model.modules() if isinstance(m, Connection) for p in m.parameters()}
    for name, p in model.named_parameters():
        expected = name.startswith("blocks.") and p.ndim == 2 and id(p) not in connections
        assert (id(p) in muon) == expected, name


def newton_schulz(gradient: Tensor) -> Tensor:
    """Five steps of X <- aX + b(XX')X + c(XX')^2 X from X = G / ||G|| (Jordan et al. 2024), in fp64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient.double()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm()
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


def test_one_update_of_muon_and_of_adamw() -> None:
    """First update, from zero momentum: Nesterov's look-ahead is G (0.05 + 0.95 * 0.05)."""
    model = tower().double()
    optimizer = optimizer_of(model, "muon")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = gradients[name].clone()
    optimizer.step()
    after = dict(model.named_parameters())
    for name in (
        "blocks.1.attn.q_proj.weight",
        "blocks.0.mlp.down_proj.weight",
        "blocks.2.mlp.up_proj.weight",
    ):
        # arXiv 2502.16982, eq. 4: times 0.2 sqrt(max(rows, columns)), and decay of lr * wd.
        rows, columns = before[name].shape
        step = newton_schulz(gradients[name]) * 0.2 * max(rows, columns) ** 0.5
        expected = before[name] * (1 - 1e-2 * 0.1) - 1e-2 * step
        # torch orthogonalises in bf16: 5 steps of products of 8 bits.
        torch.testing.assert_close(after[name].detach(), expected, rtol=0, atol=1e-2 * 0.2 * 8**0.5 * 2**-5)
        assert (after[name] - before[name]).norm() > 0.5e-2 * step.norm()
    # AdamW's first step is the gradient's sign, bias-corrected (1711.05101).
    name = "token_embedding.weight"
    expected = before[name] * (1 - 1e-2 * 0.1) - 1e-2 * gradients[name] / (gradients[name].abs() + 1e-8)
    torch.testing.assert_close(after[name].detach(), expected, rtol=1e-9, atol=1e-12)


def test_a_schedule_reaches_both() -> None:
    model = tower("mhc")
    optimizer = optimizer_of(model, "muon")
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    schedule.step()
    for part in (optimizer, *optimizer.parts):  # type: ignore[attr-defined]
        assert {group["lr"] for group in part.param_groups} <= {rate / 2 for rate in rates}


def test_a_restored_optimiser_goes_on_as_the_first() -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            torch.manual_seed(seed)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()

    one = tower("mhc")
    first = optimizer_of(one, "muon")
    steps(one, first, range(3))
    two = tower("mhc")
    two.load_state_dict(one.state_dict())
    second = optimizer_of(two, "muon")
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # torch takes over the very tensors
    steps(one, first, range(3, 6))
    steps(two, second, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(next(one.parameters()), next(tower("mhc").parameters()))
