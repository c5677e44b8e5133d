"""The fused operations of several streams against their plain formulas, and against differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mainstem.connections._sinkhorn import Sinkhorn
from mainstem.connections._stream_ops import project_normed, read_streams, write_streams

BATCH, POSITIONS, N, WIDTH = 2, 3, 4, 5


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def each_token(*shape: int) -> Tensor:
    return drawn(BATCH, POSITIONS, *shape)


def close(found: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    """Equal values, and equal gradients of a random sum."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((found * weights).sum(), inputs, retain_graph=True)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs, retain_graph=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shared", [False, True])
def test_write_is_the_sum(shared: bool) -> None:
    stream, update = each_token(N, WIDTH), each_token(WIDTH)
    weights, mix = (drawn(N), drawn(N, N)) if shared else (each_token(N), each_token(N, N))
    w, m = weights.expand(BATCH, POSITIONS, N), mix.expand(BATCH, POSITIONS, N, N)
    spread = torch.einsum("bpn,bpw->bpnw", w, update)
    mixed = torch.einsum("bpoi,bpiw->bpow", m, stream)
    close(write_streams(stream, update, w, m), mixed + spread, stream, update, weights, mix)
    close(write_streams(stream, update, w, m.mT), torch.einsum("bpio,bpiw->bpow", m, stream) + spread, mix)
    close(write_streams(stream, update, w, None), stream + spread, stream, update, weights)


def test_read_is_the_weighted_sum() -> None:
    weights, stream = each_token(N), each_token(N, WIDTH)
    close(read_streams(weights, stream), torch.einsum("bpn,bpnw->bpw", weights, stream), weights, stream)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_projecting_before_the_norm_is_projecting_after_it(eps: float) -> None:
    x, matrix = each_token(N * WIDTH), drawn(3, N * WIDTH)
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    close(project_normed(x, matrix, eps), normed @ matrix.T, x, matrix)


def test_a_stream_of_zeros_has_finite_gradients() -> None:
    x, matrix = torch.zeros(2, 3, requires_grad=True), torch.ones(1, 3)
    project_normed(x, matrix, 1e-6).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full((2, 3), 1e3), rtol=1e-5, atol=0)


def test_gradients_are_those_of_differences() -> None:
    inputs = (each_token(N, WIDTH), each_token(WIDTH), each_token(N), each_token(N, N))
    assert torch.autograd.gradcheck(write_streams, inputs)
    assert torch.autograd.gradgradcheck(write_streams, inputs)
    assert torch.autograd.gradcheck(read_streams, (each_token(N), each_token(N, WIDTH)))
    matrix = drawn(2, WIDTH)
    assert torch.autograd.gradcheck(lambda x, m: project_normed(x, m, 0.1), (each_token(WIDTH), matrix))
    assert torch.autograd.gradgradcheck(lambda x, m: project_normed(x, m, 0.1), (each_token(WIDTH), matrix))


@pytest.mark.parametrize(
    "sinkhorn", [Sinkhorn(steps=3), Sinkhorn(steps=3, order="rows_first", start="softmax", epsilon=1e-3)]
)
def test_sinkhorn_keeps_its_logits_and_has_the_gradient_of_its_steps(sinkhorn: Sinkhorn) -> None:
    logits = each_token(N, N)
    close(sinkhorn(logits), sinkhorn.matrices(logits), logits)
    assert torch.autograd.gradcheck(sinkhorn, logits)
    assert torch.autograd.gradgradcheck(sinkhorn, logits)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t), lambda _: logits):
        sinkhorn(logits)
    assert [t.data_ptr() for t in kept] == [logits.data_ptr()]


def test_bf16_streams_are_rounded_once() -> None:
    stream, update = each_token(N, WIDTH).bfloat16(), each_token(WIDTH).bfloat16()
    weights, mix = each_token(N).float(), each_token(N, N).float()
    expected = mix @ stream.float() + weights[..., None] * update.float()[..., None, :]
    assert torch.equal(write_streams(stream, update, weights, mix), expected.bfloat16())
