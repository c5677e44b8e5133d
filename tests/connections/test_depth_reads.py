"""Depth reads against their formulas, written out in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_stack import NUM_SUBLAYERS, Stack, make_input, make_stack, plain_distance
from torch import Tensor, nn
from written_out import RMS, check, final, random_stack, rms_norm

from mainstem.connections import (
    MUDD,
    AttentionResiduals,
    DeltaAttentionResiduals,
    DenseFormer,
    Scheme,
)
from mainstem.connections._depth import depth_scores, weighted_sum


def pairs(stack: Stack) -> list[tuple[Any, nn.Module]]:
    return list(zip(stack.trunk.connections, stack.branches, strict=True))


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (2, 1), (1, 3), (4, 5), (3, 2)])
def test_dense_former_mixes_the_outputs_of_blocks(dilation: int, period: int) -> None:
    stack = random_stack(DenseFormer(dilation=dilation, period=period))

    def expected(x: Tensor, stack: Stack) -> Tensor:
        outputs = [x]
        for i, (c, branch) in enumerate(pairs(stack)):
            x = x + branch(rms_norm(x, c.norm.weight))
            if i % 2 == 1:
                outputs.append(x)
                block = i // 2 + 1
                group = [y for j, y in enumerate(outputs) if (block - j) % dilation == 0]
                if block % period == 0 and len(group) > 1:
                    x = sum(w * y for w, y in zip(c.depth_weights, group, strict=True))
                else:
                    assert c.depth_weights is None
        return final(stack, x)

    check(stack, expected)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("separate_read", [True, False])
def test_mudd_lets_every_token_weigh_the_blocks(dynamic: bool, separate_read: bool) -> None:
    stack = random_stack(MUDD(dynamic=dynamic, separate_read=separate_read))

    def expected(x: Tensor, stack: Stack) -> Tensor:
        outputs, carried, read = [x], x, x
        for i, (c, branch) in enumerate(pairs(stack)):
            carried = carried + branch(rms_norm(read if i % 2 == 0 else carried, c.norm.weight))
            if i % 2 == 1:
                outputs.append(carried)
                weights = c.depth_bias[None, None]
                if dynamic:
                    hidden = torch.einsum("hc,bpc->bph", c.hidden_map, rms_norm(carried))
                    hidden = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
                    made = torch.einsum("oh,bph->bpo", c.weight_map, hidden)
                    weights = weights + made.reshape(*made.shape[:2], -1, len(outputs))
                ways = [
                    sum(weights[:, :, way, j, None] * y for j, y in enumerate(outputs))
                    for way in range(weights.shape[2])
                ]
                carried, read = ways[0], ways[-1]
        return final(stack, carried)

    check(stack, expected)


def depth_attention(query: Any, sources: list[Tensor], factor: float) -> Tensor:
    scores = [(query.query * rms_norm(v, query.key_gain)).sum(-1) for v in sources]
    powers = [(s - max(scores, key=lambda t: t.max().item()).max()).exp() for s in scores]
    total = sum(powers)
    return factor * sum((p / total)[..., None] * v for p, v in zip(powers, sources, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("block_size", [1, 6, 5])
@pytest.mark.parametrize("normalize", ["mean", "sum"])
def test_attention_residuals_read_disjoint_sums_of_writes(block_size: int, normalize: Any) -> None:
    stack = random_stack(AttentionResiduals(block_size=block_size, normalize=normalize))

    def factor(sources: list[Tensor]) -> float:
        return len(sources) if normalize == "sum" else 1.0

    def expected(x: Tensor, stack: Stack) -> Tensor:
        writes: list[Tensor] = []

        def sources() -> list[Tensor]:
            blocks = [writes[k : k + block_size] for k in range(0, len(writes), block_size)]
            return [x, *(torch.stack(block).sum(0) for block in blocks)]

        for c, branch in pairs(stack):
            h = depth_attention(c.depth_query, sources(), factor(sources())) if writes else x
            writes.append(branch(rms_norm(h, c.norm.weight)))
        return final(stack, depth_attention(stack.trunk.depth_query, sources(), factor(sources())))

    check(stack, expected)


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("exact_start", [True, False])
def test_delta_attention_residuals_add_a_read_of_writes(block_size: int, exact_start: bool) -> None:
    stack = random_stack(DeltaAttentionResiduals(block_size=block_size, exact_start=exact_start))

    def expected(x0: Tensor, stack: Stack) -> Tensor:
        x, writes = x0, []
        for c, branch in pairs(stack):
            h = x
            if writes:
                blocks = [writes[k : k + block_size] for k in range(0, len(writes), block_size)]
                sources = [x0, *(torch.stack(block).sum(0) for block in blocks)]
                h = x + depth_attention(c.depth_query, sources, 1.0)
                h = h / (1 + 1 / len(sources)) if exact_start else h
            writes.append(branch(rms_norm(h, c.norm.weight)))
            x = x + writes[-1]
        return final(stack, x)

    check(stack, expected)


def test_reads_have_the_gradients_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    query = torch.randn(4, generator=generator, dtype=torch.float64)
    for t in (query, *sources):
        t.requires_grad_()
    assert torch.autograd.gradcheck(lambda q, *s: depth_scores(q, s, 1e-6), (query, *sources))
    for shape in ((3,), (2, 3, 3)):
        weights = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        assert torch.autograd.gradcheck(lambda w, *s: weighted_sum(w, s), (weights, *sources))


@pytest.mark.parametrize(
    "scheme", [AttentionResiduals(exact_start=True), DenseFormer(), MUDD(), DeltaAttentionResiduals()]
)
def test_what_is_kept_for_backward_grows_with_the_depth_and_not_with_its_square(scheme: Scheme) -> None:
    """No stack is kept: twice the depth, at most a little over twice the bytes of whole tensors."""

    def kept(num_sublayers: int) -> int:
        stack = make_stack(scheme, RMS, num_sublayers=num_sublayers)
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(t)
            return t

        alive: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            stack(make_input(0))
        whole = make_input(0).nbytes
        return sum(size for size in sizes.values() if size >= whole)

    assert kept(2 * NUM_SUBLAYERS) <= 2.2 * kept(NUM_SUBLAYERS)


def test_the_published_mean_is_no_plain_residual_at_96_blocks_and_the_sum_is() -> None:
    """The mean of 193 sources is so small that the norm's epsilon outweighs it."""
    published = plain_distance(AttentionResiduals(), 192, 0.02, torch.float32)
    assert published > 0.5
    assert plain_distance(AttentionResiduals(normalize="sum"), 192, 0.02, torch.float32) <= 1e-5
