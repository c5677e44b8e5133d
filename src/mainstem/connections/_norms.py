"""Norms, and norms with their statistics frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
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
        unit_offset: an RMSNorm multiplies by ``1 + weight`` with ``weight`` 0 at the start, as in Gemma. The
            same function as a weight of 1 at the start; kept apart because ``1 + w`` is not ``w`` to the bit
            in bf16.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    bias: bool = True
    unit_offset: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("rms", "layer"):
            raise ConfigError(f"norm kind {self.kind!r} is not known; choose 'rms' or 'layer'.")
        if not self.eps > 0:
            raise ConfigError(f"norm eps {self.eps!r} must be greater than 0.")
        if self.unit_offset and self.kind != "rms":
            raise ConfigError(
                "unit_offset=True needs norm kind 'rms'; set unit_offset=False for a LayerNorm."
            )

    def build(self, width: int) -> nn.Module:
        """Build the norm over the last dimension of size ``width``; gain 1, bias 0."""
        if self.unit_offset:
            return UnitOffsetRMSNorm(width, eps=self.eps)
        if self.kind == "rms":
            return nn.RMSNorm(width, eps=self.eps)
        return nn.LayerNorm(width, eps=self.eps, bias=self.bias)


class UnitOffsetRMSNorm(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * (1 + weight)`` with ``weight`` 0 at the start (Gemma).

    Args:
        width: size of the last dimension.
        eps: added to the mean square under the root.

    Statistics and gain are computed in fp32, or in fp64 for fp64 input; the result has the input's dtype.
    """

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def reset_parameters(self) -> None:
        """Set the gain to 1, which is a weight of 0."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dimension."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(dtype), self.weight.shape, 1.0 + self.weight.to(dtype), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Size and eps."""
        return f"{self.weight.numel()}, eps={self.eps}"


def frozen_norm(norm: nn.Module, x: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor | None]:
    """Split ``norm`` at ``x`` into a linear map and an offset.

    With the scale ``r = 1/sqrt(ms(x) + eps)`` held fixed, ``norm(x) == linear(x) + offset`` where
    ``linear(c) = (c - mean(c)) * r * weight`` for a LayerNorm (``ms`` the variance) and ``c * r * weight``
    for an RMSNorm (``ms`` the mean square).

    Args:
        norm: an ``nn.LayerNorm``, ``nn.RMSNorm`` or :class:`UnitOffsetRMSNorm` over the last dimension.
        x: the tensor whose statistics are frozen, ``[..., width]``.

    Returns:
        ``linear`` (any tensor broadcastable to ``x``) and the norm's bias or None.
    """
    if isinstance(norm, nn.LayerNorm):
        variance = x.var(dim=-1, correction=0, keepdim=True)
        gain = torch.rsqrt(variance + norm.eps)
        gain = gain * norm.weight if norm.elementwise_affine else gain
        return lambda c: (c - c.mean(dim=-1, keepdim=True)) * gain, norm.bias
    if isinstance(norm, nn.RMSNorm):
        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
        gain = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        gain = gain * norm.weight if norm.elementwise_affine else gain
        return lambda c: c * gain, None
    if isinstance(norm, UnitOffsetRMSNorm):
        gain = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm.eps) * (1.0 + norm.weight)
        return lambda c: c * gain, None
    raise ConfigError(
        f"cannot freeze a {type(norm).__name__}; expected nn.LayerNorm, nn.RMSNorm or UnitOffsetRMSNorm."
    )


def rms_gain(norm: nn.Module) -> tuple[Tensor, float] | None:
    """Return the gain and the epsilon of an RMS norm that :class:`NormConfig` built, None for a LayerNorm."""
    if isinstance(norm, UnitOffsetRMSNorm):
        return 1.0 + norm.weight, norm.eps
    if isinstance(norm, nn.RMSNorm) and norm.eps is not None:
        return norm.weight, norm.eps
    return None


def set_gain(norm: nn.Module, gain: float) -> None:
    """Set every channel's gain of a norm that :class:`NormConfig` built."""
    weight = norm.weight
    assert isinstance(weight, nn.Parameter)
    nn.init.constant_(weight, gain - 1.0 if isinstance(norm, UnitOffsetRMSNorm) else gain)
