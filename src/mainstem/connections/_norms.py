"""Norms, and norms with their statistics frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from mainstem.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Which norm a connection builds.

    Attributes:
        kind: ``"rms"`` (Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4) or ``"layer"`` (Ba et al. 2016,
            arXiv 1607.06450, eq. 3).
        eps: added to the mean square (or variance) under the root.
        bias: whether a LayerNorm has its additive vector; an RMSNorm never has one.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    bias: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("rms", "layer"):
            raise ConfigError(f"norm kind {self.kind!r} is not known; choose 'rms' or 'layer'.")
        if not self.eps > 0:
            raise ConfigError(f"norm eps {self.eps!r} must be greater than 0.")

    def build(self, width: int) -> nn.Module:
        """Build the norm over the last dimension of size ``width``; weight 1, bias 0."""
        if self.kind == "rms":
            return nn.RMSNorm(width, eps=self.eps)
        return nn.LayerNorm(width, eps=self.eps, bias=self.bias)


def frozen_norm(norm: nn.Module, x: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor | None]:
    """Split ``norm`` at ``x`` into a linear map and an offset.

    With the scale ``r = 1/sqrt(ms(x) + eps)`` held fixed, ``norm(x) == linear(x) + offset`` where
    ``linear(c) = (c - mean(c)) * r * weight`` for a LayerNorm (``ms`` the variance) and ``c * r * weight`` for an
    RMSNorm (``ms`` the mean square).

    Args:
        norm: an ``nn.LayerNorm`` or ``nn.RMSNorm`` over the last dimension.
        x: the tensor whose statistics are frozen, ``[..., width]``.

    Returns:
        ``linear`` (any tensor broadcastable to ``x``) and the norm's bias or None.
    """
    if isinstance(norm, nn.LayerNorm):
        variance = x.var(dim=-1, correction=0, keepdim=True)
        gain = torch.rsqrt(variance + norm.eps) * (1.0 if norm.weight is None else norm.weight)
        return lambda c: (c - c.mean(dim=-1, keepdim=True)) * gain, norm.bias
    if isinstance(norm, nn.RMSNorm):
        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
        gain = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        gain = gain if norm.weight is None else gain * norm.weight
        return lambda c: c * gain, None
    raise ConfigError(f"cannot freeze a {type(norm).__name__}; expected nn.LayerNorm or nn.RMSNorm.")
