"""Towers with and without the elevator, and what their states are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mainstem.sources import load_model, load_text, make_windows
from mainstem.tower import Tower, TowerConfig

WIDTH, VOCABULARY, WINDOW = 64, 2048, 128
CONNECTIONS = {"with": "pre_norm", "without": "no_residual"}


@dataclasses.dataclass
class Pass:
    """One forward pass.

    Attributes:
        states: before the first block and after each, ``[batch, pos, width]``.
        writes: of each sublayer, in order: block, kind, what it read and what it wrote.
        logits: ``[batch, pos, vocabulary]``.
    """

    states: list[Tensor]
    writes: list[tuple[int, str, Tensor, Tensor]]
    logits: Tensor


def build(connection: str, depth: int, seed: int, *, norms: bool, width: int, vocabulary: int) -> Tower:
    """Return a tower at initial values N(0, 1/width); each norm an identity without ``norms``."""
    torch.manual_seed(seed)
    config = TowerConfig(
        vocab_size=vocabulary,
        width=width,
        num_blocks=depth,
        num_heads=2,
        connection=connection,
        init_std=width**-0.5,
    )
    tower = Tower(config)
    if not norms:
        for module in list(tower.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.RMSNorm):
                    setattr(module, name, nn.Identity())
    return tower


def fresh(connection: str, depth: int, seed: int, *, norms: bool = True) -> Tower:
    """Return a tower of the trained ones' size at its start, to be looked at."""
    tower = build(connection, depth, seed, norms=norms, width=WIDTH, vocabulary=VOCABULARY)
    return tower.eval().requires_grad_(False)


def trained(name: str) -> tuple[Tower, object]:
    """Return a tower that comes with mainstem, in fp32, and its tokenizer."""
    loaded = load_model(name)
    return loaded.model.tower.float().eval().requires_grad_(False), loaded.tokenizer


def tokens(tokenizer: object, num_windows: int) -> Tensor:
    """Return text that the trained towers were not trained on, ``[num_windows, 128]``."""
    text = load_text("sotu-held-out")
    windows = make_windows(
        tokenizer, text, num_tokens=num_windows * WINDOW, window=WINDOW, batch_size=num_windows
    )
    return next(iter(windows)).input_ids


@torch.no_grad()
def run(tower: Tower, ids: Tensor, change: Callable[[int, str, Tensor], Tensor] | None = None) -> Pass:
    """Run the tower and keep its states and writes.

    Args:
        tower: any of a single stream.
        ids: ``[batch, pos]``.
        change: replaces the write of a block's sublayer, given its number, kind and value.
    """
    states: list[Tensor] = []
    writes: list[tuple[int, str, Tensor, Tensor]] = []
    handles = [tower.blocks[0].register_forward_pre_hook(lambda _, args: states.append(args[0]))]
    handles += [block.register_forward_hook(lambda _m, _a, out: states.append(out)) for block in tower.blocks]

    def keep(block: int, kind: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            new = out if change is None else change(block, kind, out)
            writes.append((block, kind, args[0], new))
            return new

        return hook

    handles += [
        m.register_forward_hook(keep(b, k)) for b, _, parts in tower.sublayers() for k, m in parts.items()
    ]
    try:
        logits = tower(ids)
    finally:
        for handle in handles:
            handle.remove()
    return Pass(states, writes, logits)


def nll(logits: Tensor, ids: Tensor) -> float:
    """Mean nats of the next token."""
    return float(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()))


def kl(logits: Tensor, other: Tensor) -> float:
    """Mean ``KL(p || p')`` over positions, nats."""
    p, q = logits.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
