"""Stacks of the same branches under one residual connection or another, ours and other packages'."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mainstem.connections import Connection, Scheme
from mainstem.tower import TowerConfig
from mainstem.tower._attention import Attention
from mainstem.tower._feed_forward import FeedForward
from mainstem.tower._places import Place, make_rotation

STREAMS, EPS = 4, 1e-6


class Branches(nn.ModuleList):
    """Attention and feed-forward in turn, as the tower has them; ``run(i, x)`` runs the i-th."""

    def __init__(self, config: TowerConfig, tokens: int):
        super().__init__(
            FeedForward(config) if i % 2 else Attention(config, i // 2) for i in range(2 * config.num_blocks)
        )
        rotation = make_rotation(config.rope, config.head_dim, torch.arange(tokens)[None], torch.float32)
        self.width = config.width
        self.place = Place(rotation, None)

    def run(self, index: int, x: Tensor) -> Tensor:
        """Return the update of branch ``index``."""
        return self[index](x) if index % 2 else self[index](x, self.place)


class Ours(nn.Module):
    """A scheme of ours around the branches."""

    def __init__(self, scheme: Scheme, branches: Branches, **policies: Any):
        super().__init__()
        self.trunk = scheme.build(width=branches.width, num_sublayers=len(branches), **policies)
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        """Run the stack."""
        stream = self.trunk.enter(x)
        for index, connection in enumerate(self.trunk.connections):
            assert isinstance(connection, Connection)
            stream = connection(stream, functools.partial(self.branches.run, index))
        return self.trunk.leave(stream)


class ByHand(nn.Module):
    """Plain Pre-LN, written as one writes it without a library."""

    def __init__(self, branches: Branches):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(branches.width, eps=EPS) for _ in branches)
        self.final_norm = nn.RMSNorm(branches.width, eps=EPS)
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        """Run the stack."""
        for index, norm in enumerate(self.norms):
            x = x + self.branches.run(index, norm(x))
        return self.final_norm(x)


class Theirs(nn.Module):
    """Another package's connection around the branches, each under a norm of its own.

    Args:
        branches: the branches.
        make: sublayer's index -> their module.
        step: (their module, stream, branch with its norm) -> stream.
        enter, leave: into their stream and out of it.
    """

    def __init__(
        self,
        branches: Branches,
        make: Callable[[int], nn.Module],
        step: Callable[[Any, Any, Callable[[Tensor], Tensor]], Any],
        enter: Callable[[Tensor], Any],
        leave: Callable[[Any], Tensor],
    ):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(branches.width, eps=EPS) for _ in branches)
        self.final_norm = nn.RMSNorm(branches.width, eps=EPS)
        self.connections = nn.ModuleList(make(index) for index in range(len(branches)))
        self.branches = branches
        self.step, self.enter, self.leave = step, enter, leave

    def forward(self, x: Tensor) -> Tensor:
        """Run the stack."""
        stream = self.enter(x)
        for index, connection in enumerate(self.connections):
            stream = self.step(connection, stream, functools.partial(self._normed, index))
        return self.final_norm(self.leave(stream))

    def _normed(self, index: int, x: Tensor) -> Tensor:
        return self.branches.run(index, self.norms[index](x))


def _copies(x: Tensor) -> Tensor:
    return x.unsqueeze(-2).expand(*x.shape[:-1], STREAMS, x.shape[-1]).contiguous()


def _copies_in_batch(x: Tensor) -> Tensor:
    return x.repeat_interleave(STREAMS, dim=0)


def _sum_in_batch(x: Tensor) -> Tensor:
    return x.unflatten(0, (-1, STREAMS)).sum(1)


def _sum(x: Tensor) -> Tensor:
    return x.sum(-2)


def _read_and_add(module: Any, stream: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
    read, add = module(stream)
    return add(branch(read))


def _prepared(module: Any, stream: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
    read, rest, context = module.prepare(stream)
    return module(branch(read), rest, **context)


def _deepseek(module: Any, stream: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
    write, mix, read = module(stream)
    update = branch(read)
    return write.unsqueeze(-1) * update.unsqueeze(-2) + torch.matmul(mix.transpose(-1, -2), stream)


def _hy(module: Any, stream: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
    write, read = module(stream)
    return write.unsqueeze(-1) * branch(read).unsqueeze(-2) + stream


def _qwen(module: Any, stream: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
    read, _, weights = module(stream.flatten(-2))
    return stream + branch(read).unsqueeze(-2) * weights.unsqueeze(-1)


class _Inkling(nn.Module):
    """Inkling 2's read, and when a block of six sublayers begins (its own rule, by blocks of three)."""

    def __init__(self, make: Callable[[], nn.Module], index: int):
        super().__init__()
        self.read = make() if index else None
        self.starts = index % 6 == 0


def _inkling(module: Any, stream: tuple[Tensor, Tensor], branch: Callable[[Tensor], Tensor]) -> Any:
    done, newest = stream
    read = newest if module.read is None else module.read(done, newest)[0]
    update = branch(read)
    if module.starts:
        return torch.cat([done, newest.unsqueeze(-2)], dim=-2), update
    return done, newest + update


def peer_stacks(branches: Branches) -> tuple[dict[str, nn.Module], list[str]]:
    """Return other packages' stacks by name, and which are left out for want of their package."""
    width = branches.width
    config = SimpleNamespace(
        hc_mult=STREAMS, hc_count=STREAMS, hc_sinkhorn_iters=20, hc_eps=1e-6, hc_magnitude=2.0,
        hc_lowrank=5 * width // 32, hidden_size=width, rms_norm_eps=EPS, _attn_implementation="sdpa",
    )  # fmt: skip

    def module_of(name: str, cls: str) -> Callable[..., Any]:
        return getattr(importlib.import_module(name), cls)

    def theirs(*parts: str) -> Callable[..., Any]:
        return module_of(f"transformers.models.{parts[0]}.modeling_{parts[0]}", parts[1])

    def lucidrains(name: str, cls: str) -> Callable[[int], nn.Module]:
        made = module_of(f"hyper_connections.{name}", cls)
        return lambda index: made(STREAMS, dim=width, layer_index=index)

    def started(module: nn.Module) -> nn.Module:
        """Their weights come uninitialised or constant; any small values will do to time them."""
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)
        return module

    def inkling() -> nn.Module:
        read = theirs("inkling2", "Inkling2BlockAttentionResidual")
        enter: Callable[[Tensor], Any] = lambda x: (x.new_zeros(*x.shape[:-1], 0, x.shape[-1]), x)  # noqa: E731
        return Theirs(branches, lambda i: _Inkling(lambda: read(config), i), _inkling, enter, lambda s: s[1])

    def in_batch(make: Callable[[int], nn.Module], step: Callable[..., Any]) -> nn.Module:
        return Theirs(branches, make, step, _copies_in_batch, _sum_in_batch)

    def of_transformers(name: str, cls: str, step: Callable[..., Any]) -> nn.Module:
        made = theirs(name, cls)
        return Theirs(branches, lambda _: started(made(config)), step, _copies, _sum)

    def x_transformers() -> nn.Module:
        made = module_of("x_transformers.x_transformers", "HyperConnection")
        return in_batch(lambda i: made(width, layer_index=i, num_residual_streams=STREAMS), _prepared)

    v1 = "manifold_constrained_hyper_connections"
    makers: dict[str, Callable[[], nn.Module]] = {
        "hyper-connections HC": lambda: in_batch(
            lucidrains("hyper_connections", "HyperConnections"), _read_and_add
        ),
        "hyper-connections mHC": lambda: in_batch(
            lucidrains(v1, "ManifoldConstrainedHyperConnections"), _read_and_add
        ),
        "hyper-connections mHC v2": lambda: Theirs(
            branches, lucidrains("mHCv2", "mHC"), _read_and_add, _copies, _sum
        ),
        "x-transformers HC": x_transformers,
        "transformers DeepSeek-V4 mHC": lambda: of_transformers(
            "deepseek_v4", "DeepseekV4HyperConnection", _deepseek
        ),
        "transformers HY-V4": lambda: of_transformers("hy_v4", "HYV4HyperConnection", _hy),
        "transformers Qwen4-Exp": lambda: of_transformers("qwen4_exp", "Qwen4ExpTextGatedResidual", _qwen),
        "transformers Inkling 2": inkling,
    }  # fmt: skip
    found: dict[str, nn.Module] = {}
    missing: list[str] = []
    for name, make in makers.items():
        try:
            found[name] = make()
        except ImportError:
            missing.append(name)
    return found, missing


def tower_branches(scheme: Scheme, options: Sequence[int]) -> Branches:
    """Build the branches for ``(blocks, width, heads, tokens)``, with the inner norms the scheme wants."""
    blocks, width, heads, tokens = options
    config = TowerConfig(
        vocab_size=2, width=width, num_blocks=blocks, num_heads=heads, connection=scheme.name
    )
    return Branches(config, tokens)
