"""Sinkhorn-Knopp: a positive matrix made doubly stochastic by turns."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast

import torch
from torch import Tensor

from mainstem.errors import ConfigError

Start = Literal["exp", "softmax"]
Order = Literal["columns_first", "rows_first"]
Guard = Literal["add", "clamp"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinkhorn:
    """How logits ``[..., n, n]`` become a matrix whose rows and columns sum to 1.

    Each step divides by the sums of one side, then of the other, so the side done last sums to 1 at once (to
    rounding, or to ``epsilon``) and the other converges. Sinkhorn and Knopp 1967; arXiv 2512.24880, eq. 9.

    Attributes:
        steps: pairs of divisions; 20 in the paper.
        order: ``"columns_first"`` is the paper's ``T_r(T_c(M))``; ``"rows_first"`` is DeepSeek-V4's and
            Megatron's.
        start: ``"exp"``, or ``"softmax"``, which is the same with the first division's sums exact, but adds
            ``epsilon`` to every entry (DeepSeek-V4).
        epsilon: guard of every divisor. 0 runs in the log domain, where nothing can underflow.
        guard: ``"add"`` adds it, ``"clamp"`` takes it as the least value (Megatron).

    Promise, ``epsilon=0``, 20 steps, n = 4: entries are at least 0; the side done last sums to 1 within 1e-6
    (fp32) or 1e-14 (fp64) for any finite logits; the other within 1e-6 for logits of at most 1 in size, and
    within 0.05 for at most 4 (over all sign patterns at the bound: 7.6e-7 and 0.034). An ``epsilon`` takes
    that much off the sums.
    """

    steps: int = 20
    order: Order = "columns_first"
    start: Start = "exp"
    epsilon: float = 0.0
    guard: Guard = "add"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"sinkhorn_steps={self.steps} must be at least 1, such as 20.")
        if self.epsilon < 0:
            raise ConfigError(f"sinkhorn_epsilon={self.epsilon} must not be negative.")
        choices = {
            "order": ("columns_first", "rows_first"),
            "start": ("exp", "softmax"),
            "guard": ("add", "clamp"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"sinkhorn_{name} {getattr(self, name)!r} is not known; choose one of {', '.join(known)}."
                )

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the matrix, in the logits' dtype. For backward the logits alone are kept."""
        if torch.compiler.is_compiling():
            return self.matrices(logits)
        return cast(Tensor, _Again.apply(logits, self))

    def matrices(self, logits: Tensor) -> Tensor:
        """Make the matrices, ``[..., n, n]``, keeping every step for backward."""
        size = logits.shape[-1]
        # Tokens last, so that every step runs along them; along 4 entries each it takes 15 times as long.
        x = logits.reshape(-1, size, size).permute(1, 2, 0).contiguous()
        return self._steps(x).permute(2, 0, 1).reshape(logits.shape)

    def _steps(self, logits: Tensor) -> Tensor:
        """``[n, n, tokens]`` -> the same."""
        first, second = (0, 1) if self.order == "columns_first" else (1, 0)
        if self.epsilon == 0.0:
            for _ in range(self.steps):
                logits = logits.log_softmax(first).log_softmax(second)
            return logits.exp()
        if self.start == "softmax":
            matrix = self._divide(logits.softmax(first) + self.epsilon, second)
            done = 1
        else:
            matrix = torch.exp(logits - logits.amax(first, keepdim=True).detach())
            done = 0
        for _ in range(self.steps - done):
            matrix = self._divide(self._divide(matrix, first), second)
        return matrix

    def _divide(self, matrix: Tensor, dim: int) -> Tensor:
        sums = matrix.sum(dim, keepdim=True)
        return matrix / (sums + self.epsilon if self.guard == "add" else sums.clamp_min(self.epsilon))


class _Again(torch.autograd.Function):
    """Makes the matrices, and makes them again for their gradient: 40 tensors a sublayer less to keep."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, sinkhorn: Sinkhorn) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.sinkhorn = sinkhorn
        return sinkhorn.matrices(logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        twice = torch.is_grad_enabled()
        with torch.enable_grad():
            leaf = logits if twice else logits.detach().requires_grad_()
            matrix = ctx.sinkhorn.matrices(leaf)
        return torch.autograd.grad(matrix, leaf, grads[0], create_graph=twice)[0], None
