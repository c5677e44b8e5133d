"""Planners and their judge: against really shortened models, brute force, and counted calls."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from mainstem.errors import ConfigError
from mainstem.intervene import Skip, intervening
from mainstem.measure import next_token_loss
from mainstem.observe import find_stream
from mainstem.surgery import PLANNERS, Beam, Greedy, Judge, Planner, Single, make_plan, planner_named
from mainstem.surgery.judge import PARTS

VOCAB, NUM_BLOCKS = 50, 6


@functools.cache
def llama() -> nn.Module:
    torch.manual_seed(4)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCAB, num_hidden_layers=NUM_BLOCKS, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():  # as drawn, blocks hardly write
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(8)
    return model


@functools.cache
def batches() -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = []
    for seed in (1, 2):
        ids = torch.randint(VOCAB, (3, 9), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        mask[1, 6:] = 0
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def judge(**options: Any) -> Judge:
    return Judge(llama(), batches(), find_stream(llama(), batches()[0]), **options)


@torch.no_grad()
def loss_of(model: Any) -> float:
    parts = [
        next_token_loss(model(**one).logits, one["input_ids"], one["attention_mask"].bool())
        for one in batches()
    ]
    return (parts[0] + parts[1]).nll


@functools.cache
def cut_loss(skipped: tuple[int, ...]) -> float:
    """The loss of a copy of the model from whose list of layers these are gone."""
    model: Any = copy.deepcopy(llama())
    model.model.layers = nn.ModuleList(b for i, b in enumerate(model.model.layers) if i not in skipped)
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
    model.config.num_hidden_layers = len(model.model.layers)
    return loss_of(model)


def brute(n: int) -> tuple[int, ...]:
    return min(itertools.combinations(range(NUM_BLOCKS), n), key=cut_loss)


@pytest.mark.parametrize("cache_bytes", [2**30, 15_000, 1], ids=["all held", "some held", "none held"])
def test_the_judged_loss_is_that_of_the_cut_model_to_the_bit(cache_bytes: int) -> None:
    judged = judge(cache_bytes=cache_bytes)
    for base in [(), (2, 4), (0,), (1, 2, 3)]:
        judged.rebase(base)
        assert judged.held_bytes <= cache_bytes
        for n in range(4):
            for chosen in itertools.combinations(range(NUM_BLOCKS), n):
                judged._known.clear()  # measure it anew from this base
                assert judged.loss(chosen) == cut_loss(chosen)
    assert len({cut_loss((n,)) for n in range(NUM_BLOCKS)}) == NUM_BLOCKS


@pytest.mark.parametrize("unit", ["attention", "feed_forward"])
def test_sublayers_are_judged_as_full_passes_without_them(unit: Any) -> None:
    judged = judge(unit=unit)
    found = find_stream(llama(), batches()[0])
    for base in [(), (1, 3)]:
        judged.rebase(base)
        for chosen in itertools.combinations(range(NUM_BLOCKS), 2):
            judged._known.clear()
            with intervening(llama(), Skip(blocks=chosen, part=PARTS[unit]), found):
                expected = loss_of(llama())
            assert judged.loss(chosen) == expected
            assert expected != cut_loss(())


def test_fewer_blocks_run_than_in_full_passes_and_what_ran_is_what_is_counted() -> None:
    runs: list[int] = []
    model: Any = llama()
    hooks = [
        layer.self_attn.register_forward_hook(lambda *_, n=n: runs.append(n))
        for n, layer in enumerate(model.model.layers)
    ]
    try:
        judged = judge()
        runs.clear()  # those of finding the way in
        make_plan(Greedy(), judged, 3)
    finally:
        for hook in hooks:
            hook.remove()
    cost = judged.cost
    assert len(runs) == cost.block_runs
    assert cost.block_runs < 0.75 * cost.naive_block_runs
    assert cost.num_sets == 1 + 6 + 5 + 4
    # Full passes of the cut models: 6 blocks once, 5 six times, 4 five times, 3 four times; two batches.
    assert cost.naive_block_runs == 2 * (6 + 30 + 20 + 12)


@pytest.mark.parametrize("planner", [Single(), Greedy()], ids=lambda p: p.name)
def test_passes_are_as_many_as_the_planner_says(planner: Planner) -> None:
    judged = judge()
    make_plan(planner, judged, 4)
    assert judged.cost.num_passes == 2 * planner.most_passes(NUM_BLOCKS, 4)


def test_a_beam_makes_no_more_passes_than_it_says() -> None:
    judged = judge()
    make_plan(Beam(), judged, 4)
    assert judged.cost.num_passes <= 2 * Beam().most_passes(NUM_BLOCKS, 4)


def test_greedy_is_brute_force_step_by_step() -> None:
    sets = make_plan(Greedy(), judge(), 4).sets
    chosen: tuple[int, ...] = ()
    for n in range(1, 5):
        rest = [u for u in range(NUM_BLOCKS) if u not in chosen]
        chosen = min((tuple(sorted((*chosen, u))) for u in rest), key=cut_loss)
        assert sets[n] == chosen


def test_single_is_the_order_of_the_losses_alone() -> None:
    order = sorted(range(NUM_BLOCKS), key=lambda n: cut_loss((n,)))
    assert make_plan(Single(), judge(), 3).sets == tuple(tuple(sorted(order[:n])) for n in range(4))


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_beam_is_never_worse_than_greedy(width: int) -> None:
    greedy, beam = (make_plan(p, judge(), 5).sets for p in (Greedy(), Beam(width=width)))
    assert all(cut_loss(b) <= cut_loss(g) for b, g in zip(beam, greedy, strict=True))


def test_a_beam_wide_enough_finds_the_best_sets_there_are() -> None:
    sets = make_plan(Beam(width=20), judge(), 4).sets
    assert [cut_loss(s) for s in sets[1:]] == [cut_loss(brute(n)) for n in range(1, 5)]


@torch.no_grad()
def states_of(one: dict[str, Tensor]) -> list[Tensor]:
    """Every state of the whole model in fp64, by plain hooks; the last one before the final norm."""
    model: Any = llama()
    states: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _m, args: states.append(args[0].double()))
        for module in (*model.model.layers, model.model.norm)
    ]
    model(**one)
    for hook in hooks:
        hook.remove()
    return states


def test_influence_is_the_order_of_the_turns_of_the_states() -> None:
    turns: list[list[Tensor]] = [[] for _ in range(NUM_BLOCKS)]
    for one in batches():
        states, mask = states_of(one), one["attention_mask"].bool()
        for n in range(NUM_BLOCKS):
            turns[n].append(1 - nn.functional.cosine_similarity(states[n], states[n + 1], dim=-1)[mask])
    order = sorted(range(NUM_BLOCKS), key=lambda n: float(torch.cat(turns[n]).mean()))
    plan = make_plan(planner_named("influence"), judge(), 3)
    assert plan.sets == tuple(tuple(sorted(order[:n])) for n in range(4))


def test_angular_proposes_the_run_whose_ends_are_nearest() -> None:
    ends: list[Tensor] = []
    for one in batches():
        last = one["attention_mask"].sum(1) - 1
        ends.append(torch.stack([state[torch.arange(3), last] for state in states_of(one)]))
    x = torch.cat(ends, 1)
    for n, chosen in enumerate(make_plan(planner_named("angular"), judge(), 4).sets[1:], 1):
        turns = [
            float(nn.functional.cosine_similarity(x[k], x[k + n], dim=-1).arccos().mean())
            for k in range(NUM_BLOCKS + 1 - n)
        ]
        start = turns.index(min(turns))
        assert chosen == tuple(range(start, start + n))


def test_ctrl_c_keeps_what_was_found() -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    whole = make_plan(Greedy(), judge(), 4)
    part = make_plan(Greedy(), judge(), 4, stop)
    assert whole.finished
    assert not part.finished
    assert part.sets == whole.sets[:3]


def test_an_interrupted_pass_leaves_no_mixed_states() -> None:
    judged = judge()
    judged.loss((3,))
    run, calls = judged._run, []

    def once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*args)

    judged._run = once  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        judged.rebase((1,))
    judged._run = run  # type: ignore[method-assign]
    assert judged.held_bytes == 0
    assert judged.loss((4,)) == cut_loss((4,))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: make_plan(Greedy(), judge(), 6), "6 of 6 units"),
        (lambda: make_plan(Greedy(), judge(), 0), "expected 1 to 5"),
        (lambda: planner_named("best"), "influence, angular, single, greedy, beam"),
        (lambda: judge(unit="head"), "block, attention, feed_forward"),
        (lambda: judge().loss([7]), "block 7 is not one of"),
        (lambda: Beam(width=0), "width is 0"),
        (lambda: make_plan(PLANNERS["influence"], judge(unit="attention"), 2), "single, greedy or beam"),
        (lambda: Judge(llama(), [], find_stream(llama(), batches()[0])), "at least one"),
    ],
    ids=["all", "none", "planner", "unit", "block", "width", "sublayers", "no batch"],
)
def test_refusals(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_model_without_a_prediction_is_refused() -> None:
    model: Any = llama()
    inner = model.model
    judged = Judge(inner, batches(), find_stream(inner, batches()[0]))
    with pytest.raises(ConfigError, match="causal language model"):
        judged.loss()
