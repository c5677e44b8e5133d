"""Branches scaled by depth: GPT-2's initialisation, depth-muP and CompleteP."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from torch import Tensor, nn

from mainstem.connections._base import (
    AffineStep,
    Connection,
    Context,
    ParameterGroup,
    Properties,
    Scheme,
    Stream,
)
from mainstem.connections._norms import NormConfig
from mainstem.connections._policy import coefficient, weigh
from mainstem.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRules:
    """What a change of depth and width does to a recipe tuned at the base size: factors on its values.

    *Hidden* is what stands inside the blocks; embedding, final norm and head keep the base recipe's values.

    Attributes:
        branch_scale: on what every branch returns; the connections apply it.
        hidden_matrix_lr: learning rate of matrices inside blocks.
        hidden_vector_lr: learning rate of norms and biases inside blocks; the connections' groups carry it.
        hidden_weight_decay: decoupled weight decay of matrices inside blocks, so that learning rate times
            decay does not change with width.
        adam_eps: AdamW's epsilon.
        hidden_init_std: standard deviation of matrices inside blocks at the start.
        logits: on what the head returns.
    """

    branch_scale: float
    hidden_matrix_lr: float
    hidden_vector_lr: float
    hidden_weight_decay: float
    adam_eps: float
    hidden_init_std: float
    logits: float


class DepthScaledConnection(Connection):
    """``x' = x + write_scale * F(N(x))``, a constant that depends on the stack's depth.

    Shapes: stream, read and update ``[batch, pos, width]``; ``write_scale`` is a buffer. Parameters: one
    norm, trained at ``norm_lr_multiplier`` times the base rate. FLOPs: 2 a channel. Moved: 3 elements a
    channel.
    At initialisation: the plain residual whose branches' output matrices are multiplied by ``write_scale``.
    Source: see :class:`DepthScaled`.
    """

    write_scale: Tensor

    def __init__(self, norm: nn.Module, write_scale: float, norm_lr_multiplier: float):
        super().__init__()
        self.norm = norm
        self.norm_lr_multiplier = norm_lr_multiplier
        self.register_buffer("write_scale", coefficient(write_scale))

    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return the normed stream."""
        return self.norm(stream), None

    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the stream plus the scaled update."""
        assert isinstance(stream, Tensor)
        return stream + weigh(self.write_scale, update)

    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Carry is the identity; inject scales."""
        return AffineStep(carry=lambda s: s, inject=lambda u: weigh(self.write_scale, u))

    def parameter_groups(self) -> list[ParameterGroup]:
        """The norm, at the rule's learning rate, not decayed."""
        return [ParameterGroup(tuple(self.parameters()), lr_multiplier=self.norm_lr_multiplier)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthScaled(Scheme):
    """Branches scaled by depth (``"depth_scaled"``).

    ``m = num_sublayers / base_num_sublayers`` in what follows; both papers count blocks, and the ratio is
    the same.

    ============== ======================== ========================= =====================
    rule           factor on every branch   learning rate in blocks   AdamW's epsilon
    ============== ======================== ========================= =====================
    ``gpt2``       1                        1                         1
    ``depth_mup``  ``multiplier / sqrt(m)`` ``1 / sqrt(m)``           ``1 / sqrt(m)``
    ``completep``  ``multiplier / m``       1                         ``1 / m``
    ============== ======================== ========================= =====================

    ``gpt2`` is plain Pre-LN with the initial values of the matrices that write divided by
    ``sqrt(num_sublayers)`` (Radford et al. 2019, section 2.3). ``depth_mup`` with ``base_num_sublayers=1``
    is Yang et al. 2023 (arXiv 2310.02244), ``a / sqrt(L)`` with L counted in residual branches.
    ``completep`` is Dey et al. 2025 (arXiv 2505.01618), table 1. Read: the reference code of CompleteP
    (``EleutherAI/nanoGPT-mup``, branch ``completep``), whose one exponent gives both rules (0.5 and 1); the
    depth-muP paper was not read, its epsilon rule is that code's. That code applies one epsilon to all
    parameters, and so does :meth:`training_rules`. Width rules are muP's, from the same code.

    Attributes:
        rule: which of the three.
        multiplier: constant before the factor.
        base_num_sublayers: depth at which the recipe was tuned (two blocks by default, as in CompleteP's
        examples).
    """

    name: ClassVar[str] = "depth_scaled"
    family: ClassVar[str] = "branch scaling"
    year: ClassVar[int] = 2025
    paper: ClassVar[str] = "2505.01618"
    formula: ClassVar[str] = "x' = x + F(N(x)) / m, m = depth / base depth"
    no_exact_start: ClassVar[str | None] = (
        "its factor is a constant. Divide the matrix that makes each update by branch_scale instead, "
        "which keeps the function; rule='gpt2' is plain Pre-LN as it stands."
    )
    properties: ClassVar[Properties] = Properties(equals_pre_norm_at_start=False, start_distance=1.01)

    rule: Literal["gpt2", "depth_mup", "completep"] = "completep"
    multiplier: float = 1.0
    base_num_sublayers: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in ("gpt2", "depth_mup", "completep"):
            raise ConfigError(f"rule {self.rule!r} is not known; choose 'gpt2', 'depth_mup' or 'completep'.")
        if self.rule == "gpt2" and self.multiplier != 1.0:
            raise ConfigError(f"multiplier={self.multiplier!r} has no effect with rule 'gpt2'; leave it out.")
        if self.base_num_sublayers < 1:
            raise ConfigError(f"base_num_sublayers={self.base_num_sublayers!r} must be at least 1.")

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one; all are alike."""
        rules = self.training_rules(num_sublayers)
        return DepthScaledConnection(norm.build(width), rules.branch_scale, rules.hidden_vector_lr)

    def training_rules(self, num_sublayers: int, width_ratio: float = 1.0) -> TrainingRules:
        """Return the factors on a base recipe's values.

        Args:
            num_sublayers: depth to be trained.
            width_ratio: its width over the width of the base recipe.
        """
        exponent = {"gpt2": 0.0, "depth_mup": 0.5, "completep": 1.0}[self.rule]
        depth_ratio = 1.0 if self.rule == "gpt2" else num_sublayers / self.base_num_sublayers
        hidden_lr = 1.0 if self.rule == "gpt2" else depth_ratio ** (exponent - 1.0)
        return TrainingRules(
            branch_scale=self.multiplier * depth_ratio**-exponent,
            hidden_matrix_lr=hidden_lr / width_ratio,
            hidden_vector_lr=hidden_lr,
            hidden_weight_decay=width_ratio,
            adam_eps=depth_ratio**-exponent / width_ratio,
            hidden_init_std=width_ratio**-0.5,
            logits=1.0 / width_ratio,
        )

    def output_init_scale(self, num_sublayers: int) -> float:
        """Only ``gpt2`` speaks through the initial values."""
        return super().output_init_scale(num_sublayers) if self.rule == "gpt2" else 1.0
