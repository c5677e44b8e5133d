"""Every intervention against the same change written into a hand-made forward pass, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bare import Bare, bare, by_hand, ids
from handmade import HANDMADE, WIDTH, PreBlock, feed_forward
from torch import Tensor, nn

from mainstem.errors import ConfigError
from mainstem.intervene import (
    Intervention,
    Mean,
    Noise,
    Place,
    Replace,
    Resample,
    Scale,
    Skip,
    WriteMeans,
    Zero,
    intervening,
)
from mainstem.measure import BlockEvent
from mainstem.observe import KeepStream, find_stream, ledger_and_tail, record

CLOSE: dict[str, float] = {"rtol": 1e-11, "atol": 1e-12}


def run(model: nn.Module, x: Tensor, *interventions: Intervention) -> Tensor:
    stream_map = find_stream(model, {"input_ids": x})
    with torch.no_grad(), intervening(model, interventions, stream_map):
        return model(input_ids=x)


def test_skip_is_the_model_without_the_block() -> None:
    model, x = bare(), ids()
    for block in range(4):
        shorter = bare()
        shorter.blocks = nn.ModuleList(b for i, b in enumerate(shorter.blocks) if i != block)
        assert torch.equal(run(model, x, Skip(blocks=[block])), shorter(x))
    shorter = bare()
    shorter.blocks = shorter.blocks[::3]
    assert torch.equal(run(model, x, Skip(blocks=range(1, 3))), shorter(x))


@pytest.mark.parametrize("part", ["attn", "mlp", "block", "state"])
def test_scale_and_zero_at_some_positions_and_rows(part: str) -> None:
    model, x = bare(), ids()

    def change(block: int, where: str, before: Tensor, value: Tensor) -> Tensor:
        if where != part or block not in (1, 2):
            return value
        value = value.clone()
        value[1:, 4] *= -2.5 if block == 1 else 0.0
        value[1:, -1] *= -2.5 if block == 1 else 0.0
        return value

    places: dict[str, Any] = {"part": part, "positions": [4, -1], "rows": range(1, 3)}
    ours = run(model, x, Scale(blocks=[1], factor=-2.5, **places), Zero(blocks=[2], **places))
    expected, _ = by_hand(model, x, change)
    torch.testing.assert_close(ours, expected, **CLOSE)
    assert torch.equal(ours[0], model(x)[0])
    assert torch.equal(ours[:, :4], model(x)[:, :4])
    assert not torch.allclose(ours[1:, 4:], model(x)[1:, 4:])


def test_noise_has_the_stated_size_at_every_token_and_is_seeded() -> None:
    model, x = bare(), ids()
    stream_map = find_stream(model, {"input_ids": x})
    seen: dict[str, Tensor] = {}

    def keep(_m: Any, _a: Any, out: Tensor) -> None:
        seen["write"] = out

    def enters(_m: Any, args: Any) -> None:
        seen["after"] = args[0]

    block: Any = model.blocks[1]
    hooks = [
        block.feed_forward.register_forward_hook(keep),
        model.blocks[2].register_forward_pre_hook(enters),
    ]
    model(x)
    plain = seen["after"]
    outs: list[Tensor] = []
    for seed in (0, 0, 1):
        with intervening(model, Noise(blocks=[1], part="mlp", size=0.3, seed=seed), stream_map):
            outs.append(model(x))
        size = (seen["after"] - plain).norm(dim=-1) / seen["write"].norm(dim=-1)
        torch.testing.assert_close(size, torch.full_like(size, 0.3), rtol=1e-9, atol=0)
    for hook in hooks:
        hook.remove()
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[2])


def test_resample_gives_every_sequence_another_ones_write() -> None:
    model, x = bare(), ids(rows=5)
    record_of: dict[str, Tensor] = {}

    def change(block: int, where: str, before: Tensor, value: Tensor) -> Tensor:
        if (block, where) == (2, "attn"):
            record_of["clean"] = value
        return value

    by_hand(model, x, change)
    clean, one = record_of["clean"], Resample(blocks=[2], part="attn", seed=4)
    got = one.apply(clean, Place(2, "attn"))
    sources = [next(j for j in range(5) if torch.equal(got[i], clean[j])) for i in range(5)]
    assert sorted(sources) == list(range(5))
    assert all(i != j for i, j in enumerate(sources))
    expected, _ = by_hand(
        model, x, lambda b, w, _, v: v[torch.tensor(sources)] if (b, w) == (2, "attn") else v
    )
    torch.testing.assert_close(run(model, x, one), expected, **CLOSE)
    donors = Resample(blocks=[2], part="attn", donors={2: clean[:1]})
    expected, _ = by_hand(model, x, lambda b, w, _, v: clean[:1].expand_as(v) if (b, w) == (2, "attn") else v)
    torch.testing.assert_close(run(model, x, donors), expected, **CLOSE)


def test_mean_of_a_corpus_of_two_batches_with_padding() -> None:
    model, x = bare(), ids()
    found = find_stream(model, {"input_ids": x})
    batches = [ids(seed=1), ids(rows=2, positions=6, seed=2)]
    reducers = [WriteMeans(), WriteMeans()]
    for batch, reducer in zip(batches, reducers, strict=True):
        record(model, {"input_ids": batch}, found, [reducer])
    reducers[0].merge(reducers[1])
    tokens: dict[tuple[int, str], list[Tensor]] = {}

    def note(block: int, where: str, before: Tensor, value: Tensor) -> Tensor:
        tokens.setdefault((block, where), []).append(value.flatten(0, 1))
        return value

    for batch in batches:
        by_hand(model, batch, note)
    means = reducers[0].result()
    assert {(b, part, int(part == "mlp")) for b, part in tokens} == set(means)
    for place, mean in means.items():
        torch.testing.assert_close(mean, torch.cat(tokens[place.block, place.part]).mean(0), **CLOSE)
    ours = run(model, x, Mean(blocks=[1, 3], part="mlp", means=means))
    expected, _ = by_hand(
        model, x, lambda b, w, _, v: means[Place(b, w, 1)].expand_as(v) if w == "mlp" and b in (1, 3) else v
    )
    torch.testing.assert_close(ours, expected, **CLOSE)


class _TwoFeedForwards(PreBlock):
    def __init__(self) -> None:
        super().__init__()
        self.third, self.extra = nn.LayerNorm(WIDTH), feed_forward()

    def writes(self, x: Tensor) -> list[Tensor]:
        attn = self.attention(self.first(x))
        mlp = self.feed_forward(self.second(x + attn))
        return [attn, mlp, self.extra(self.third(x + attn + mlp))]

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.extra(self.third(x))


def test_two_sublayers_of_a_kind_in_one_block_are_told_apart() -> None:
    torch.manual_seed(6)
    model, x = bare(), ids()
    block = _TwoFeedForwards().double()
    model.blocks[1] = block
    found = find_stream(model, {"input_ids": x})
    reducer = WriteMeans()
    record(model, {"input_ids": x}, found, [reducer])
    means = reducer.result()
    before = model.blocks[0](model.embedding(x))
    attn, mlp, extra = block.writes(before)
    for number, write in enumerate((attn, mlp, extra)):
        place = Place(1, "attn" if number == 0 else "mlp", number)
        torch.testing.assert_close(means[place], write.flatten(0, 1).mean(0), **CLOSE)
    after = before + attn + means[Place(1, "mlp", 1)] + means[Place(1, "mlp", 2)]
    expected = model.head(model.norm(model.blocks[3](model.blocks[2](after))))
    torch.testing.assert_close(run(model, x, Mean(blocks=[1], part="mlp", means=means)), expected, **CLOSE)
    values = {Place(1, "mlp", 1): mlp + 1.0, Place(1, "mlp", 2): -mlp}
    after = before + attn + 1.0
    expected = model.head(model.norm(model.blocks[3](model.blocks[2](after))))
    torch.testing.assert_close(
        run(model, x, Replace(blocks=[1], part="mlp", values=values)), expected, **CLOSE
    )
    noise, ones = Noise(blocks=[1], part="mlp", size=1.0), torch.ones_like(mlp)
    first, second = (noise.change(ones, Place(1, "mlp", n)) - ones for n in (1, 2))
    assert abs(float(torch.cosine_similarity(first, second, -1).mean())) < 0.1


def test_a_patched_state_gives_the_other_texts_logits() -> None:
    model, x, y = bare(), ids(), ids(seed=6)
    _, states = by_hand(model, y)
    patched = run(model, x, Replace(blocks=[1], part="state", values={1: states[2]}))
    assert torch.equal(patched, model(y))
    with pytest.raises(ConfigError, match="block 1 is \\[2, 9, 64\\]; expected \\[3, 9, 64\\]"):
        run(model, x, Replace(blocks=[1], part="state", values={1: states[2][:2]}))


@pytest.mark.parametrize("part", ["attn", "mlp", "block", "state"])
def test_a_recording_inside_sees_the_changed_stream(part: str) -> None:
    """And a pass inside that recording, of a reducer, is nobody's business but its own."""
    model, x = bare(), ids()
    one, found = Noise(blocks=[1], part=part, size=0.5), find_stream(model, {"input_ids": x})
    clean, kept, within = run(model, x, Noise(blocks=[1], part=part, size=0.0)), KeepStream(), list[Tensor]()

    class Inner(KeepStream):
        def update(self, event: BlockEvent) -> None:
            if event.block == 2:
                within.append(record(model, {"input_ids": x}, found).output)

    with torch.no_grad(), intervening(model, one, found):
        plain = model(input_ids=x)
        seen = record(model, {"input_ids": x}, found, [kept, Inner()])
    assert not torch.allclose(plain, clean)
    assert torch.equal(seen.output, plain)
    assert torch.equal(model.head(model.norm(kept["resid_post", -1])), plain)
    assert [torch.allclose(out, clean, **CLOSE) for out in within] == [True]
    assert seen.books.continuity == 0.0


@pytest.mark.parametrize(
    ("one", "sites"),
    [
        (Noise(blocks=[1], part="attn", size=0.5), [2]),
        (Scale(blocks=[1], part="mlp", factor=-1.0), [3]),
        (Zero(blocks=[1, 2], part="writes"), [2, 3, 4, 5]),
        (Skip(blocks=[1]), [3]),
        (Noise(blocks=[1], size=0.5), [3]),
    ],
)
def test_a_ledger_inside_has_a_row_of_what_was_changed(one: Intervention, sites: list[int]) -> None:
    """Rows: what the sublayers wrote, and what was put there instead of it, less it."""
    model, x = bare(), ids()
    found = find_stream(model, {"input_ids": x})
    wrote: dict[str, Tensor] = {}

    def change(block: int, where: str, before: Tensor, value: Tensor) -> Tensor:
        wrote[f"{block}_{where}_out"] = value
        if block not in one.blocks or where not in ({"attn", "mlp"} if one.part == "writes" else {one.part}):
            return value
        return one.apply(value, Place(block, where, int(where == "mlp")))

    logits, states = by_hand(model, x, change)
    with intervening(model, one, found):
        books, seen = ledger_and_tail(model, {"input_ids": x}, found, changed=sites)
        unsaid, _ = ledger_and_tail(model, {"input_ids": x}, found)
    assert books.error < 1e-14
    assert unsaid.error > 1e-3
    torch.testing.assert_close(seen.output, logits, **CLOSE)
    torch.testing.assert_close(books.final, states[-1], **CLOSE)
    assert set(books.labels) - {"embed", "intervention"} == {
        n for n in wrote if n.endswith(("attn_out", "mlp_out"))
    }
    rest = states[-1] - states[0]
    for label in books.labels:
        if label not in ("embed", "intervention"):
            torch.testing.assert_close(books[label], wrote[label], **CLOSE)
            rest = rest - wrote[label]
    torch.testing.assert_close(books["intervention"], rest, **CLOSE)


def test_gradients_flow_through_what_is_left() -> None:
    model, x = bare(), ids(rows=1, positions=5)
    found = find_stream(model, {"input_ids": x})
    chosen = [Scale(blocks=[0], part="attn", factor=0.5), Noise(blocks=[1], size=0.2), Skip(blocks=[2])]

    def loss() -> Tensor:
        with intervening(model, chosen, found):
            return model(input_ids=x).logsumexp(-1).sum()

    block: Any = model.blocks[0]
    weight = block.attention.project.weight
    loss().backward()
    skipped: Any = model.blocks[2]
    assert skipped.attention.project.weight.grad is None or not skipped.attention.project.weight.grad.any()
    for place in ((0, 0), (7, 31)):
        with torch.no_grad():
            step = 1e-6
            weight[place] += step
            up = loss()
            weight[place] -= 2 * step
            down = loss()
            weight[place] += step
        torch.testing.assert_close(weight.grad[place], (up - down) / (2 * step), rtol=1e-6, atol=1e-8)


def test_everything_is_restored_after_an_exception_too() -> None:
    model, x = bare(), ids()
    before, found = model(x), find_stream(model, {"input_ids": x})

    def broken_off() -> None:
        with intervening(model, Zero(blocks=[0]), found):
            assert not torch.equal(model(x), before)
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        broken_off()
    with pytest.raises(ConfigError, match="outside a pass of 9"):
        run(model, x, Zero(blocks=[0], positions=[9]))
    assert torch.equal(model(x), before)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all("forward" not in vars(m) for m in model.modules())


def test_several_passes_and_parts_of_the_model_in_one_context() -> None:
    model, x, y = bare(), ids(), ids(rows=2, positions=4)
    found = find_stream(model, {"input_ids": x})
    expected = [run(model, x, Skip(blocks=[1])), run(model, y, Skip(blocks=[1]))]
    with torch.no_grad(), intervening(model, Skip(blocks=[1]), found):
        model.norm(model.embedding(x))  # a pass of a part only
        got = [model(x), model(y), model(x)]
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert torch.equal(got[2], expected[0])


@pytest.mark.parametrize("name", sorted(HANDMADE))
def test_skip_on_stacks_as_people_write_them(name: str) -> None:
    """The state after a skipped block is the one before it, however it is joined, in place or not."""
    case = HANDMADE[name]
    torch.manual_seed(2)
    model, x = case.model().double().eval(), ids(rows=2, positions=7)
    found = find_stream(model, {"input_ids": x})
    skipped: dict[int, Tensor] = {}
    kept = KeepStream(lambda point: "resid" in point)
    with torch.no_grad():
        record(model, {"input_ids": x}, found, [kept])
    for block in range(1, len(found.blocks)):
        skipped[block] = kept["resid_pre", block]
        with torch.no_grad():
            ours = run(model, x, Skip(blocks=[block]))
            patch = run(model, x, Replace(blocks=[block], part="state", values={block: skipped[block]}))
        assert torch.equal(ours, patch)
        assert not torch.equal(ours, model(input_ids=x))


def test_what_is_refused() -> None:
    model, x = bare(), ids()
    with pytest.raises(ConfigError, match="block 4 is not one of the model's 4"):
        run(model, x, Zero(blocks=[4]))
    with pytest.raises(ConfigError, match="no 'mixer'; it has attn, mlp"):
        run(model, x, Zero(blocks=[0], part="mixer"))
    with pytest.raises(ConfigError, match="two sequences"):
        run(model, x[:1], Resample(blocks=[0]))
    with pytest.raises(ConfigError, match="names no block"):
        Zero(blocks=[])
    with pytest.raises(ConfigError, match="cannot be skipped"):
        Skip(blocks=[0], part="state")
    with pytest.raises(ConfigError, match="expected one of block, writes"):
        Zero(blocks=[0], part="head")
    with pytest.raises(ConfigError, match="no mean was recorded for 'mlp' of block 0"):
        run(model, x, Mean(blocks=[0], part="mlp", means={}))
    with pytest.raises(ConfigError, match="is no mainstem tower"), intervening(Bare(), Zero(blocks=[0])):
        pass
