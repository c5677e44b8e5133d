"""U-net skips and backout against plain loops over blocks, written out in fp64."""

from __future__ import annotations

from typing import Any

import pytest
from reference_stack import NUM_SUBLAYERS, Stack, make_input, make_stack
from torch import Tensor
from written_out import RMS, check, final, random_stack, rms_norm

from mainstem.connections import Backout, UNetSkips
from mainstem.errors import ConfigError


def run_block(stack: Stack, block: int, x: Tensor, size: int) -> Tensor:
    for i in range(block * size, (block + 1) * size):
        connection: Any = stack.trunk.connections[i]
        x = x + stack.branches[i](rms_norm(x, connection.norm.weight))
    return x


def skip_weights(stack: Stack) -> list[Tensor]:
    return [p for name, p in stack.named_parameters() if name.endswith("skip_weight")]


@pytest.mark.parametrize(("num_blocks", "size"), [(12, 2), (7, 2), (24, 1), (2, 3), (1, 2)])
def test_mirrored_skips_are_a_stack_of_outputs(num_blocks: int, size: int) -> None:
    """The first half pushes its outputs, the second half pops them before it reads."""
    stack = random_stack(UNetSkips(sublayers_per_block=size), num_blocks * size)
    weights = skip_weights(stack)
    assert len(weights) == num_blocks // 2

    def expected(x: Tensor, stack: Stack) -> Tensor:
        pushed: list[Tensor] = []
        left = list(weights)
        for block in range(num_blocks):
            if block >= num_blocks - num_blocks // 2:
                x = x + left.pop(0) * pushed.pop()
            x = run_block(stack, block, x, size)
            if block < num_blocks // 2:
                pushed.append(x)
        assert not pushed
        return final(stack, x)

    check(stack, expected)


@pytest.mark.parametrize(
    "skips", [((4, 7),), ((0, 3), (2, 4), (3, 5), (1, 6)), ((2, 11), (4, 10), (6, 9)), ((0, 1), (1, 2))]
)
def test_given_skips_may_cross_and_touch(skips: tuple[tuple[int, int], ...]) -> None:
    stack = random_stack(UNetSkips(skips=skips))
    weight_at = dict(zip(sorted(upper for _, upper in skips), skip_weights(stack), strict=True))

    def expected(x: Tensor, stack: Stack) -> Tensor:
        outputs: list[Tensor] = []
        for block in range(NUM_SUBLAYERS // 2):
            for lower, upper in skips:
                if upper == block:
                    x = x + weight_at[upper] * outputs[lower]
            x = run_block(stack, block, x, 2)
            outputs.append(x)
        return final(stack, x)

    check(stack, expected)
    assert len(stack.states(make_input(0))[-1]) == 1


@pytest.mark.parametrize(
    ("block", "size", "kept"), [(None, 2, 8), (0, 2, 0), (10, 2, 10), (None, 1, 16), (3, 3, 3)]
)
def test_backout_takes_the_output_of_a_block_out_of_the_last(block: int | None, size: int, kept: int) -> None:
    stack = random_stack(Backout(block=block, sublayers_per_block=size))
    weight: Any = stack.trunk.get_parameter("difference.backout_weight")
    assert weight.item() != 0.5  # moved

    def expected(x: Tensor, stack: Stack) -> Tensor:
        outputs: list[Tensor] = []
        for each in range(NUM_SUBLAYERS // size):
            x = run_block(stack, each, x, size)
            outputs.append(x)
        return final(stack, x - weight * outputs[kept])

    check(stack, expected)


def test_published_and_exact_starts() -> None:
    published, exact = make_stack(UNetSkips(), RMS), make_stack(UNetSkips(exact_start=True), RMS)
    assert all(w.item() == 1.0 for w in skip_weights(published))
    assert all(w.item() == 0.0 for w in skip_weights(exact))
    backed: Any = make_stack(Backout(), RMS).trunk
    kept: Any = make_stack(Backout(exact_start=True), RMS).trunk
    assert backed.difference.backout_weight.item() == 0.5
    assert kept.difference.backout_weight.item() == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skips": ((3, 1),)}, r"must be pairs of blocks \(lower, upper\)"),
        ({"skips": ((-1, 1),)}, r"must be pairs of blocks"),
        ({"skips": ((0, 3), (0, 4))}, r"begins at most one skip and ends at most one"),
        ({"skips": ((0, 3), (1, 3))}, r"begins at most one skip and ends at most one"),
        ({"skips": ((0, 12),)}, r"end at block 12 of a stack of 12 blocks"),
        ({"sublayers_per_block": 0}, r"sublayers_per_block=0 must be at least 1"),
    ],
)
def test_wrong_skips_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UNetSkips(**options).build(width=8, num_sublayers=24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": -1}, r"block=-1 must be at least 0"),
        ({"block": 12}, r"block=12 is not one of the stack's 12"),
        ({"sublayers_per_block": 0}, r"sublayers_per_block=0 must be at least 1"),
    ],
)
def test_wrong_backouts_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Backout(**options).build(width=8, num_sublayers=24)
