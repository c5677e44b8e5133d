"""The optimiser: parameter groups from the connections, AdamW or Muon with AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mainstem.connections import DepthScaled, TrainingRules, parameter_groups
from mainstem.errors import ConfigError
from mainstem.tower import Block, Tower
from mainstem.training.config import Optimizer

_NEUTRAL = TrainingRules(
    branch_scale=1.0,
    hidden_matrix_lr=1.0,
    hidden_vector_lr=1.0,
    hidden_weight_decay=1.0,
    adam_eps=1.0,
    hidden_init_std=1.0,
    logits=1.0,
)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some parameters and AdamW for the others, as one optimiser.

    Both work on the same group dictionaries that ``param_groups`` lists, Muon's first, so a learning-rate
    schedule reaches both. Muon's updates are scaled to AdamW's size (``match_rms_adamw``), so that one
    learning rate serves both.
    Source: Jordan et al. 2024 (Muon); Liu et al. 2025 (arXiv 2502.16982, section 2.2) for the scale; both in
    :class:`torch.optim.Muon`.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer):
        self.parts = (muon, adamw)
        super().__init__(
            [{"params": group["params"]} for part in self.parts for group in part.param_groups], {}
        )
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step with both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return both states, under ``"parts"``."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up both states."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def make_optimizer(
    model: nn.Module,
    kind: Optimizer,
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.Optimizer:
    """Build the optimiser of a model.

    Groups, their learning-rate multipliers and who is decayed come from
    :func:`mainstem.connections.parameter_groups`; a depth-scaled connection's rules (arXiv 2505.01618, table
    1) add theirs for what stands inside the blocks.

    Raises:
        ConfigError: Muon is asked for and this torch has none.
    """
    rules, hidden = _rules_of(model)
    muon: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for group in parameter_groups(model):
        for inside in (True, False):
            own = [p for p in group.parameters if (id(p) in hidden) == inside and p.requires_grad]
            matrices = inside and group.weight_decay
            settings = {
                "params": own,
                "lr": learning_rate * group.lr_multiplier * (rules.hidden_matrix_lr if matrices else 1.0),
                "weight_decay": weight_decay
                * (rules.hidden_weight_decay if matrices else 1.0)
                * group.weight_decay,
            }
            for_muon = kind == "muon" and matrices and all(p.ndim == 2 for p in own)
            if own:
                (muon if for_muon else rest).append(settings)
    adamw = torch.optim.AdamW
    options: dict[str, Any] = {"betas": betas, "eps": eps * rules.adam_eps, "fused": _can_fuse(model)}
    if not muon:
        return adamw(rest, **options)
    muon_class = getattr(torch.optim, "Muon", None)
    if muon_class is None:
        raise ConfigError(
            f"torch {torch.__version__} has no Muon; install torch>=2.9 or use optimizer='adamw'."
        )
    return MuonWithAdamW(
        muon_class(muon, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"), adamw(rest, **options)
    )


def _rules_of(model: nn.Module) -> tuple[TrainingRules, set[int]]:
    towers = [module for module in model.modules() if isinstance(module, Tower)]
    hidden = _ids(p for tower in towers for block in tower.blocks for p in block.parameters())
    if not towers:
        hidden = _ids(p for m in model.modules() if isinstance(m, Block) for p in m.parameters())
        return _NEUTRAL, hidden
    scheme = towers[0].config.scheme()
    if not isinstance(scheme, DepthScaled):
        return _NEUTRAL, hidden
    return scheme.training_rules(towers[0].config.num_sublayers), hidden


def _ids(parameters: Iterable[nn.Parameter]) -> set[int]:
    return {id(p) for p in parameters}


def _can_fuse(model: nn.Module) -> bool:
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in model.parameters())
