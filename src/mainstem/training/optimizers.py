"""The optimiser: parameter groups from the connections, AdamW or Muon with AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mainstem.connections import Connection, DepthScaled, TrainingRules, parameter_groups
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

    Both work on the groups that ``param_groups`` lists, Muon's first, and on one state, so that a
    learning-rate schedule reaches both and a checkpoint, distributed or not, holds both. Muon's updates are
    scaled to AdamW's size (``match_rms_adamw``), so that one learning rate serves both.
    Source: Jordan et al. 2024 (Muon); Liu et al. 2025 (arXiv 2502.16982, section 2.2) for the scale; both in
    :class:`torch.optim.Muon`.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer):
        self.parts = (muon, adamw)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let both parts work on the groups and the state that this optimiser saves and loads."""
        muon, adamw = self.parts
        num_groups = len(muon.param_groups)
        muon.param_groups = self.param_groups[:num_groups]
        adamw.param_groups = self.param_groups[num_groups:]
        muon.state = adamw.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step with both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the state of both."""
        super().load_state_dict(state_dict)
        self._share()


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
    1) add theirs for what stands inside the blocks. Muon gets the matrices of attention and feed-forward;
    a connection's own, which are few rows wide, stay with AdamW.

    Raises:
        ConfigError: Muon is asked for and this torch has none.
    """
    rules, hidden = _rules_of(model)
    branches = hidden - _ids(p for m in model.modules() if isinstance(m, Connection) for p in m.parameters())
    muon: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for group in parameter_groups(model):
        kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for p in group.parameters:
            for_muon = kind == "muon" and group.weight_decay and p.ndim == 2 and id(p) in branches
            if p.requires_grad:
                kinds.setdefault((for_muon, id(p) in hidden), []).append(p)
        for (for_muon, inside), parameters in kinds.items():
            matrices = inside and group.weight_decay
            rate = group.lr_multiplier * (rules.hidden_matrix_lr if matrices else 1.0)
            decay = group.weight_decay * (rules.hidden_weight_decay if matrices else 1.0)
            settings = {
                "params": parameters,
                "lr": learning_rate * rate,
                "weight_decay": weight_decay * decay,
            }
            (muon if for_muon else rest).append(settings)
    adamw = torch.optim.AdamW(rest, betas=betas, eps=eps * rules.adam_eps, fused=_can_fuse(model))
    if not muon:
        return adamw
    muon_class = getattr(torch.optim, "Muon", None)
    if muon_class is None:
        raise ConfigError(
            f"torch {torch.__version__} has no Muon; install torch>=2.9 or use optimizer='adamw'."
        )
    return MuonWithAdamW(
        muon_class(muon, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"), adamw
    )


def _rules_of(model: nn.Module) -> tuple[TrainingRules, set[int]]:
    """Return the rules of a depth-scaled tower, and who stands inside blocks."""
    hidden = _ids(p for m in model.modules() if isinstance(m, Block) for p in m.parameters())
    for tower in model.modules():
        if isinstance(tower, Tower) and isinstance(scheme := tower.config.scheme(), DepthScaled):
            return scheme.training_rules(tower.config.num_sublayers), hidden
    return _NEUTRAL, hidden


def _ids(parameters: Iterable[nn.Parameter]) -> set[int]:
    return {id(p) for p in parameters}


def _can_fuse(model: nn.Module) -> bool:
    """Whether one kernel can update all parameters; for sharded ones there is one on CUDA only."""
    from torch.distributed.tensor import DTensor  # here, for its import takes half a second

    return all(
        p.is_floating_point()
        and (p.device.type == "cuda" or (p.device.type == "cpu" and not isinstance(p, DTensor)))
        for p in model.parameters()
    )
