"""In which dtype the stream is kept, whatever the dtype of the branches."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, Self

import torch
from torch import Tensor, nn


def coefficient_dtype(t: Tensor) -> torch.dtype:
    """Coefficients are fp32 whatever the stream is, fp64 for an fp64 stream."""
    return torch.promote_types(t.dtype, torch.float32)


def coefficient(value: float | Tensor) -> Tensor:
    """Return a coefficient for a buffer: fp32 also where a model is built under a lower default dtype.

    bf16 holds ``192 ** 0.25`` as 3.719, 0.1 % off, and off the same way at every sublayer.
    """
    return torch.as_tensor(value, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))


def weigh(weight: Tensor, x: Tensor) -> Tensor:
    """``weight * x`` with the weight in fp32 at least, rounded once, to the dtype of ``x``."""
    wide = coefficient_dtype(x)
    return (weight.to(wide) * x.to(wide)).to(x.dtype)


class StreamModule(nn.Module):
    """A module whose own parameters stay in the stream's dtype when the model is cast to a lower one.

    Buffers, which are coefficients, are never cast below fp32; what is computed from parameters on the way to
    a coefficient is computed in fp32 at least.

    Over 192 updates a bf16 stream loses 17 % of what was added at stream RMS 100 and 80 % at 1,000
    (docs/stream-dtype.md); an fp32 stream under bf16 branches loses nothing of it, at the price of 4 instead
    of 2 bytes an entry. Norms and mixing coefficients on the stream are part of it.

    Attributes:
        stream_dtype: the least dtype of the stream and of these parameters; None leaves both to the model.
        branch_dtype: what branches compute in: the dtype the model was last cast to.
    """

    stream_dtype: torch.dtype | None = None
    branch_dtype: torch.dtype = torch.float32

    def keep_stream_in(self, dtype: torch.dtype | None, branch_dtype: torch.dtype | None = None) -> Self:
        """Set the policy of every such module in this one, and widen their parameters to it.

        Args:
            dtype: the least dtype of the stream, or None.
            branch_dtype: what branches compute in; PyTorch's default dtype when not given. Casting the model
                keeps it up to date; weights that were put in place of others need this call.
        """
        for module in self.modules():
            if isinstance(module, StreamModule):
                module.stream_dtype = dtype
                module.branch_dtype = branch_dtype or torch.get_default_dtype()
                if dtype is not None:
                    nn.Module._apply(module, _Widening(dtype))
        return self

    def stream_of(self, x: Tensor) -> Tensor:
        """Return ``x`` in the stream's dtype."""
        return x if self.stream_dtype is None else x.to(torch.promote_types(x.dtype, self.stream_dtype))

    def branch_of(self, x: Tensor) -> Tensor:
        """Return ``x`` in the branches' dtype."""
        return x if self.stream_dtype is None else x.to(self.branch_dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow a cast or a move of the model, but never below the stream's dtype."""
        self.branch_dtype = fn(torch.empty(0, dtype=self.branch_dtype)).dtype
        if self.stream_dtype is None:
            buffers = {id(b) for b in self.buffers()}
            return super()._apply(_Keeping(fn, torch.float32, buffers), recurse)
        return super()._apply(_Keeping(fn, self.stream_dtype), recurse)


class _Widening:
    """A cast of floating-point tensors below a dtype to it."""

    def __init__(self, least: torch.dtype):
        self.least = least

    def __call__(self, t: Tensor) -> Tensor:
        return t.to(torch.promote_types(t.dtype, self.least)) if t.is_floating_point() else t


class _Keeping:
    """A cast or move that keeps floating-point tensors, or some of them, at or above a dtype."""

    def __init__(self, fn: Callable[[Tensor], Tensor], least: torch.dtype, only: Set[int] | None = None):
        self.fn = fn.fn if isinstance(fn, _Keeping) else fn
        self.least = least
        self.only = only

    def __call__(self, t: Tensor) -> Tensor:
        new = self.fn(t)
        if self.only is not None and id(t) not in self.only:
            return new
        if not new.is_floating_point() or torch.promote_types(new.dtype, self.least) == new.dtype:
            return new
        return t.to(device=new.device) if t.numel() else new
