"""Sweeps of towers through their connections, against towers whose block is gone or writes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_tower_intervening import _PassOn, tower
from torch import Tensor, nn
from torch.nn import functional

from mainstem.connections import scheme_names
from mainstem.errors import ConfigError
from mainstem.intervene import (
    Intervention,
    Noise,
    Skip,
    SweepConfig,
    intervening,
    left_out,
    plan_sweep,
    removal_loss,
    sweep,
)
from mainstem.observe import tower_map
from mainstem.tower import Tower

GENERATOR = torch.Generator().manual_seed(5)
BATCHES = [{"token_ids": torch.randint(50, (rows, 7), generator=GENERATOR)} for rows in (3, 2)]


def without(model: Tower, blocks: tuple[int, ...]) -> Tower:
    """Return the tower whose blocks are gone or, of a history, have zeros for their last weights."""
    changed = copy.deepcopy(model)
    for number in blocks:
        block: Any = changed.blocks[number]
        if not model.config.scheme().properties.has_history:
            changed.blocks[number] = _PassOn()
            continue
        for matrix in (block.attn.out_proj, block.mlp.down_proj):
            for parameter in matrix.parameters():
                parameter.zero_()
    return changed


def run(model: Tower, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits, and the state before the final norm."""
    seen: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])

    hook = model.trunk.final_norm.register_forward_pre_hook(keep)
    logits = model(**batch)
    hook.remove()
    return logits, seen[0]


def figures(model: Tower, blocks: tuple[int, ...]) -> dict[str, float]:
    """KL, agreement, loss and change of the last state, over all tokens of all batches."""
    columns: dict[str, list[Tensor]] = {name: [] for name in ("kl", "top1", "nll_delta", "change")}
    other = without(model, blocks)
    for batch in BATCHES:
        (logits, state), (changed, moved) = run(model, batch), run(other, batch)
        p, q = logits.log_softmax(-1), changed.log_softmax(-1)
        columns["kl"].append((p.exp() * (p - q)).sum(-1).flatten())
        columns["top1"].append((logits.argmax(-1) == changed.argmax(-1)).double().flatten())
        targets = batch["token_ids"][:, 1:].flatten()
        losses = [
            functional.cross_entropy(x[:, :-1].flatten(0, 1), targets, reduction="none")
            for x in (changed, logits)
        ]
        columns["nll_delta"].append(losses[0] - losses[1])
        columns["change"].append(((moved - state).norm(dim=-1) / state.norm(dim=-1)).flatten())
    return {name: float(torch.cat(values).mean()) for name, values in columns.items()}


@pytest.mark.parametrize("name", scheme_names())
def test_every_block_left_out_of_a_tower(name: str) -> None:
    model = tower(name)
    found = sweep(model, BATCHES, tower_map(model, BATCHES[0]["token_ids"]))
    assert [f.floor for f in found.floors] == [0, 1, 2, 3]
    assert [[s.state for s in f.states] for f in found.floors] == [[1, 2, 3, 4], [2, 3, 4], [3, 4], [4]]
    for floor in found.floors:
        wanted = figures(model, (floor.floor,))
        ours = {
            "kl": floor.kl.all,
            "top1": floor.top1.all,
            "nll_delta": floor.nll_delta,
            "change": floor.states[-1].change.all,
        }
        assert ours == pytest.approx(wanted, rel=1e-9, abs=1e-13)
    assert max(f.kl.all for f in found.floors) > 1e-8
    assert all(not vars(b).get("forward") and not b._forward_hooks for b in model.blocks)


@pytest.mark.parametrize("name", ["attention_residuals", "mudd", "reversible", "ngpt", "highway", "pre_norm"])
@pytest.mark.parametrize("what", ["left out", "two of them", "noise on mlp"])
def test_restarted_equals_full_passes_to_the_bit(name: str, what: str) -> None:
    model = tower(name, value_residual="learned")
    found = tower_map(model, BATCHES[0]["token_ids"])

    def broken(block: int) -> Intervention:
        if what == "noise on mlp":
            return Noise(blocks=[block], part="mlp", size=0.7, seed=2)
        return left_out([block] if what == "left out" else [block, (block + 2) % 4], found)

    one = sweep(model, BATCHES, found, SweepConfig(broken=broken))
    other = sweep(model, BATCHES, found, SweepConfig(broken=broken, restart=False))
    assert (one.restarted, other.restarted, other.why_not) == (True, False, "restart=False")
    assert one.to_dict()["floors"] == other.to_dict()["floors"]


@pytest.mark.parametrize("name", ["dense_former", "delta_attention_residuals", "gru_gate"])
def test_blocks_that_share_a_pass(name: str) -> None:
    model = tower(name, value_residual="learned")
    found = tower_map(model, BATCHES[0]["token_ids"])
    one = sweep(model, BATCHES, found)
    other = sweep(model, BATCHES, found, SweepConfig(together=3))
    assert other.num_passes == 6
    for a, b in zip(one.floors, other.floors, strict=True):
        assert (a.kl.all, a.nll_delta) == pytest.approx((b.kl.all, b.nll_delta), rel=1e-9, abs=1e-12)
        for s, t in zip(a.states, b.states, strict=True):
            assert s.change.rest == pytest.approx(t.change.rest, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["unet_skips", "highway"])
def test_removing_several(name: str) -> None:
    model = tower(name)
    sets = [(0, 2), (1, 2, 3)]
    for found in removal_loss(model, BATCHES, tower_map(model, BATCHES[0]["token_ids"]), sets):
        wanted = figures(model, found.blocks)
        assert (found.kl.all, found.nll_delta) == pytest.approx((wanted["kl"], wanted["nll_delta"]), rel=1e-9)


def test_the_plan_is_what_happens() -> None:
    model = tower("attention_residuals")
    found = tower_map(model, BATCHES[0]["token_ids"])
    plan = plan_sweep(model, BATCHES, found)
    runs: list[int] = []

    def count(_module: nn.Module, _args: Any, _out: Any) -> None:
        runs.append(1)

    hooks = [block.attn.register_forward_hook(count) for block in model.blocks]
    swept = sweep(model, BATCHES, found)
    for hook in hooks:
        hook.remove()
    assert plan.num_passes == swept.num_passes == 2 * (1 + 4)
    assert plan.block_runs == len(runs) == 2 * (4 + 4 + 3 + 2 + 1)
    assert plan.restarts
    # Before each block and after the last: the history of 1 to 9 sources, held once, and what comes out.
    one = BATCHES[0]["token_ids"].numel() * 16 * 8
    assert plan.state_bytes == (9 + 5) * one


def test_a_map_of_a_tower_is_no_hindrance_to_intervening() -> None:
    model = tower("mudd")
    ids = BATCHES[0]["token_ids"]
    found = tower_map(model, ids)
    with intervening(model, left_out([1], found), found):
        changed = model(ids)
    assert torch.equal(changed, without(model, (1,))(ids))
    with pytest.raises(ConfigError, match="history"):
        sweep(model, BATCHES, found, SweepConfig(broken=lambda b: Skip(blocks=[b])))
