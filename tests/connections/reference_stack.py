"""The reference stack of the conformance suite: 24 sublayers, width 64, causal branches, fp64.

Even sublayers mix tokens causally (a softmax over earlier positions of fixed random scores, then a matrix),
odd ones are feed-forward (two matrices with a GELU between). All matrices are N(0, 1/fan_in), so that a
branch returns about the size it reads; none has a norm of its own unless the scheme asks for one. The same
branches are put under every scheme.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mainstem.connections import Connection, NormConfig, PreNorm, Scheme, Stream, Trunk

WIDTH = 64
NUM_SUBLAYERS = 24
NUM_POSITIONS = 12


class TokenMixing(nn.Module):
    """Causal attention with fixed scores: no position sees a later one."""

    def __init__(self, width: int, positions: int = NUM_POSITIONS):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(positions, positions))
        self.out = nn.Linear(width, width, bias=False)
        self.inner_norm: nn.Module = nn.Identity()
        nn.init.normal_(self.out.weight, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-2]
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        mixed = self.scores[:n, :n].masked_fill(future, float("-inf")).softmax(-1) @ x
        return self.out(self.inner_norm(mixed))


class FeedForward(nn.Module):
    """Two matrices and a GELU."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.inner_norm: nn.Module = nn.Identity()
        nn.init.normal_(self.up.weight, std=width**-0.5)
        nn.init.normal_(self.down.weight, std=(2 * width) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner_norm(nn.functional.gelu(self.up(x))))


def make_branches(num_sublayers: int, width: int) -> nn.ModuleList:
    return nn.ModuleList(FeedForward(width) if i % 2 else TokenMixing(width) for i in range(num_sublayers))


class Stack(nn.Module):
    """A scheme's trunk around branches: the whole of a transformer that a connection can see."""

    def __init__(self, trunk: Trunk, branches: nn.ModuleList):
        super().__init__()
        self.trunk = trunk
        self.branches = branches

    def states(self, x: Tensor) -> list[Stream]:
        stream = self.trunk.expand(x)
        states = [stream]
        for connection, branch in zip(self.trunk.connections, self.branches, strict=True):
            assert isinstance(connection, Connection)
            stream = connection(stream, branch)
            states.append(stream)
        return states

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk.final_norm(self.trunk.collapse(self.states(x)[-1]))


def make_stack(
    scheme: Scheme,
    norm: NormConfig,
    *,
    num_sublayers: int = NUM_SUBLAYERS,
    width: int = WIDTH,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Stack:
    """Build a stack whose branches depend on ``seed`` alone, so that two schemes get the same ones."""
    torch.manual_seed(seed)
    branches = make_branches(num_sublayers, width)
    for branch in branches:
        writing = branch.down if isinstance(branch, FeedForward) else branch.out
        branch.inner_norm = scheme.build_inner_norm(width=writing.in_features, norm=norm) or nn.Identity()
    trunk = scheme.build(width=width, num_sublayers=num_sublayers, norm=norm)
    return Stack(trunk, branches).to(dtype).eval()


def make_input(seed: int, batch: int = 2, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        batch, NUM_POSITIONS, width, generator=torch.Generator().manual_seed(seed), dtype=dtype
    )


def randomize(module: nn.Module, seed: int = 1) -> None:
    """Move every parameter away from its initial value: a weight of 1 or a bias of 0 would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((0.3 * noise).to(parameter.dtype))


def start_distance(scheme: Scheme, norm: NormConfig, seed: int) -> float:
    """Relative Frobenius distance of the freshly built stack's output from plain Pre-LN's."""
    x = make_input(seed + 1000)
    with torch.no_grad():
        plain = make_stack(PreNorm(), norm, seed=seed)(x)
        other = make_stack(scheme, norm, seed=seed)(x)
    return ((other - plain).norm() / plain.norm()).item()


@torch.no_grad()
def plain_distance(
    scheme: Scheme, num_sublayers: int, embedding_scale: float, dtype: torch.dtype, width: int = 32
) -> float:
    """Relative distance from plain Pre-LN of a stack with GPT-2's initial values.

    Matrices are N(0, 0.02^2), those that write further scaled by ``num_sublayers ** -0.5``: a stream as small
    as real ones are at the start, where a norm's epsilon is felt.
    """
    outputs: list[Tensor] = []
    for each in (PreNorm(), scheme):
        stack = make_stack(each, NormConfig(), num_sublayers=num_sublayers, width=width, dtype=dtype)
        for branch in stack.branches:
            for name, parameter in branch.named_parameters():
                writes = name in ("out.weight", "down.weight")
                if parameter.shape != (NUM_POSITIONS, NUM_POSITIONS):
                    parameter *= 0.02 * parameter.shape[-1] ** 0.5 * (num_sublayers**-0.5 if writes else 1.0)
        outputs.append(stack(embedding_scale * make_input(1000, width=width, dtype=dtype)))
    plain, other = outputs
    return ((other - plain).norm() / plain.norm()).item()
