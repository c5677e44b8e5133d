"""Towers of every connection, with options, for the tests of what a tower is trained and kept with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mainstem.connections import Connection, scheme_names
from mainstem.connections.mhc import CONVENTIONS
from mainstem.tower import Tower, TowerConfig

SMALL: dict[str, Any] = {"vocab_size": 50, "width": 32, "num_blocks": 3, "num_heads": 4, "num_kv_heads": 2}

# Beside every scheme as published: options that bring other parameters, buffers, or shapes of the stream.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("hyper_connections", {"dynamic": False, "num_streams": 2}),
    ("x0_reinjection", {"carry_start": (1.01, 0.99), "embed_start": (0.2, 0.05)}),
    ("laurel", {"variant": "rw+lr", "rank": 4}),
    ("laurel", {"variant": "pa"}),
    ("gru_gate", {"relu": False}),
    ("rezero", {"norm_reads": True, "initial_value": 0.5}),
    ("depth_scaled", {"rule": "depth_mup", "base_num_sublayers": 1}),
    ("stochastic_depth", {"final_survival": 0.2}),
    ("resi_dual", {"sum_scale": 0.1}),
    ("admin", {"trained": True}),
    ("admin", {"output_change": "constant"}),
    ("mhc", {"mixing": "permutation", "num_streams": 3}),
    ("mhc", {"mixing": "kronecker", "collapse": "mean"}),
    ("mhc", {"mixing": "cayley", "orientation": "in_out"}),
    ("mhc", CONVENTIONS["deepseek_v4"]),
    ("mudd", {"dynamic": False, "separate_read": False}),
    ("attention_residuals", {"block_size": 2}),
    ("delta_attention_residuals", {"block_size": 4}),
    ("unet_skips", {"skips": ((0, 2),), "initial_weight": 0.18}),
    ("frac_connections", {"dynamic": False, "num_fractions": 2}),
    ("gated_streams", {"num_streams": 2, "rank": 3}),
    ("deep_delta", {"beta_start": 0.5, "value_scale": 1.0}),
    ("reversible", {"collapse": "sum"}),
]
# What a tower can be besides, each with a scheme of one stream and with one of many.
TOWERS: list[dict[str, Any]] = [
    {"attn_softcap": 2.0, "final_softcap": 3.0, "qk_norm": "head", "gated": False, "activation": "gelu"},
    {"sliding_window": 4, "block_types": ("sliding", "full", "sliding"), "positions": "learned"},
    {"value_residual": "learned"},
    {"recompute_connections": True},
]


def _name(options: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in options.items())


CASES: dict[str, dict[str, Any]] = {
    **{name: {"connection": name} for name in scheme_names()},
    **{
        f"{name}-{_name(options)}": {"connection": name, "connection_options": options}
        for name, options in OPTIONS
    },
    **{
        f"{name}-{_name(options)}": {"connection": name, **options}
        for name in ("pre_norm", "mhc", "attention_residuals")
        for options in TOWERS
    },
}


def make_tower(dtype: torch.dtype = torch.float64, **options: Any) -> Tower:
    """A tower in eval mode whose connections are away from their initial values."""
    torch.manual_seed(0)
    tower = Tower(TowerConfig(**(SMALL | options))).to(dtype).eval()
    with torch.no_grad():
        for module in tower.modules():
            if isinstance(module, Connection):
                for parameter in module.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return tower


def tokens(seed: int = 0, batch: int = 2, positions: int = 12) -> Tensor:
    """Random tokens, none of which is 0."""
    return torch.randint(1, 50, (batch, positions), generator=torch.Generator().manual_seed(seed))


def train_step(tower: Tower, text: Tensor, seed: int = 3) -> list[Tensor]:
    """Logits and all gradients of one step of training; ``seed`` is that of dropout."""
    tower.train().zero_grad()
    torch.manual_seed(seed)
    logits = tower(text)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten()).backward()
    gradients = [p.grad for p in tower.parameters()]
    return [logits.detach(), *(torch.zeros(()) if g is None else g for g in gradients)]


def largest_error(results: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of any of them, in units of the largest norm where it is that small."""
    floor = 1e-6 * max(e.norm() for e in expected)
    return max(((r - e).norm() / (e.norm() + floor)).item() for r, e in zip(results, expected, strict=True))
