"""What several streams do to each other, in as few passes over them as PyTorch's own kernels allow."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from mainstem.connections._policy import coefficient_dtype


def weigh_streams(weights: Tensor, stream: Tensor) -> Tensor:
    """``sum_i weights_i X_i``: ``[batch, pos, n]``, ``[batch, pos, n, width]`` -> ``[batch, pos, width]``."""
    return torch.matmul(weights.unsqueeze(-2), stream.to(weights.dtype)).squeeze(-2).to(stream.dtype)


def _read(weights: Tensor, stream: Tensor) -> Tensor:
    return torch.bmm(weights.unsqueeze(-2), stream).squeeze(-2)


class _Read(torch.autograd.Function):
    """``sum_i weights_i X_i``, see :func:`read_streams`; ``[token, ...]``."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, stream: Tensor) -> Tensor:
        ctx.save_for_backward(weights, stream)
        return _read(weights, stream)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weights, stream = ctx.saved_tensors
        grad = grads[0].contiguous().unsqueeze(-2)
        return torch.bmm(grad, stream.mT).squeeze(-2), weights.unsqueeze(-1) * grad


def read_streams(weights: Tensor, stream: Tensor) -> Tensor:
    """:func:`weigh_streams` for models: its gradient makes nothing but gradients."""
    flat = stream.to(weights.dtype).flatten(0, -3)
    with torch.autocast(stream.device.type, enabled=False):
        # The compiler finds the gradient itself, of the same numbers.
        read = (_read if torch.compiler.is_compiling() else _Read.apply)(_rows(weights, 1), flat)
    return cast(Tensor, read).view(*stream.shape[:-2], stream.shape[-1]).to(stream.dtype)


def _rows(t: Tensor, dims: int) -> Tensor:
    """``[token, ...]``, contiguous: PyTorch takes products of other small matrices one by one."""
    return t.flatten(0, -dims - 1).contiguous()


def mix_streams(mix: Tensor, stream: Tensor) -> Tensor:
    """``X'_o = sum_i mix[o, i] X_i``: ``[batch, pos, n, n]`` times ``[batch, pos, n, width]``."""
    return torch.matmul(mix, stream.to(mix.dtype)).to(stream.dtype)


def spread_update(weights: Tensor, update: Tensor) -> Tensor:
    """``weights_i u`` for every stream: ``[batch, pos, n]`` and ``[batch, pos, width]``."""
    return (weights.unsqueeze(-1) * update.unsqueeze(-2)).to(update.dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` over the last dimension, which is kept, in one pass."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.rsqrt(length.square() / x.shape[-1] + eps)


def _project(x: Tensor, matrix: Tensor, eps: float) -> Tensor:
    return x @ matrix.T * inverse_rms(x, eps)  # not in place: selective checkpointing keeps the product


class _ProjectNormed(torch.autograd.Function):
    """``matrix x / rms(x)``, see :func:`project_normed`; ``[row, ...]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, eps: float) -> Tensor:
        made = _project(x, matrix, eps)
        ctx.save_for_backward(x, matrix, made)
        ctx.eps = eps
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, matrix, made = ctx.saved_tensors
        scale = inverse_rms(x, ctx.eps)
        of_product = grads[0] * scale
        along = (grads[0] * made).sum(-1, keepdim=True) * scale.square() / -x.shape[-1]
        return (of_product @ matrix).addcmul_(x, along), of_product.T @ x, None


def project_normed(x: Tensor, matrix: Tensor, eps: float) -> Tensor:
    """``matrix (x / sqrt(mean(x^2) + eps))`` for ``x`` of ``[..., d]`` and a matrix ``[m, d]``.

    The norm comes after the product, which is the same number and makes nothing of the size of ``x``.
    Computed, and returned, in the dtype of coefficients.
    """
    wide = coefficient_dtype(x)
    x, matrix = x.to(wide), matrix.to(wide)
    project = _project if torch.compiler.is_compiling() else _ProjectNormed.apply
    with torch.autocast(x.device.type, enabled=False):
        made = project(x.flatten(0, -2), matrix, eps)
    return cast(Tensor, made).unflatten(0, x.shape[:-1])


def _write(stream: Tensor, update: Tensor, weights: Tensor, mix: Tensor | None) -> Tensor:
    carried = stream if mix is None else torch.bmm(mix, stream)
    return torch.addcmul(carried, weights.unsqueeze(-1), update.unsqueeze(-2))


class _Write(torch.autograd.Function):
    """``mix X + weights u^T``, see :func:`write_streams`; ``[token, ...]``.

    PyTorch's own gradient of the sum would write the gradients of every stream's share of ``u`` out in full.
    """

    @staticmethod
    def forward(ctx: Any, stream: Tensor, update: Tensor, weights: Tensor, mix: Tensor | None) -> Tensor:
        ctx.save_for_backward(None if mix is None else stream, update, weights, mix)
        return _write(stream, update, weights, mix)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        stream, update, weights, mix = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_update = torch.bmm(weights.unsqueeze(-2), grad).squeeze(-2) if ctx.needs_input_grad[1] else None
        of_weights = torch.bmm(update.unsqueeze(-2), grad.mT).squeeze(-2) if ctx.needs_input_grad[2] else None
        if mix is None:
            return grad, of_update, of_weights, None
        of_stream = torch.bmm(mix.mT, grad) if ctx.needs_input_grad[0] else None
        of_mix = torch.bmm(grad, stream.mT) if ctx.needs_input_grad[3] else None
        return of_stream, of_update, of_weights, of_mix


def write_streams(stream: Tensor, update: Tensor, weights: Tensor, mix: Tensor | None) -> Tensor:
    """``X'_o = sum_i mix[o, i] X_i + weights_o u``; no mix means the identity.

    Args:
        stream: ``[..., n, width]``.
        update: ``[..., width]``.
        weights: ``[..., n]``, in the dtype of coefficients, in which all is computed and rounded once.
        mix: ``[..., n, n]`` in the same, or None.
    """
    wide = weights.dtype
    write = _write if torch.compiler.is_compiling() else _Write.apply
    with torch.autocast(stream.device.type, enabled=False):
        new = write(
            stream.to(wide).flatten(0, -3),
            update.to(wide).flatten(0, -2),
            _rows(weights, 1),
            None if mix is None else _rows(mix, 2),
        )
    return cast(Tensor, new).view(stream.shape).to(stream.dtype)
