"""Zero what a sublayer writes: its last matrix and bias."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from mainstem.errors import ConfigError

from ._blocks import main_output, probe_inputs

_PARTS = {
    "attention": ("self_attn", "attention", "self_attention", "attn", "self_attn_layer"),
    "feed_forward": ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "output", "fc2"),
}
_LAST = ("o_proj", "out_proj", "c_proj", "down_proj", "dense_4h_to_h", "fc2", "fc_out", "wo", "Wo", "w2")
_LAST_OF = {"attention": (*_LAST, "dense"), "feed_forward": _LAST}


def silence(model: Any, blocks: nn.ModuleList, number: int, kind: str, *, named: int) -> None:
    """Make one sublayer of block ``number`` write exactly zero, in place; ``named`` is its number for people.

    Raises:
        ConfigError: no such sublayer is found, or zeros in its last matrix leave a write, as where a norm
            with a bias or the residual's own norm comes after it.
    """
    block = blocks[number]
    both = copy.deepcopy(block)
    found = {which: _zero(both, which) for which in _PARTS}
    where, what = f"block {named} ({type(block).__name__})", kind.replace("_", "-")
    if not found[kind]:
        raise ConfigError(f"{where} has no {what} whose last matrix is known; remove the whole block.")
    if not all(found.values()) or not _is_identity(model, blocks, number, both):
        raise ConfigError(
            f"{where}: zeros in the last matrix of its {what} do "
            "not make what it writes zero, for something after it writes too; remove the whole block."
        )
    _zero(block, kind)


def _zero(block: nn.Module, kind: str) -> bool:
    """Replace the last matrix and bias by zeros of its own; return whether there was one."""
    done = False
    for module, name in _last_parameters(block, kind):
        parameter = cast(nn.Parameter, getattr(module, name))
        zeros = nn.Parameter(torch.zeros_like(parameter), requires_grad=parameter.requires_grad)
        setattr(module, name, zeros)
        done = True
    return done


def last_modules(block: nn.Module, kind: str) -> list[str]:
    """Return the paths, in the block, of what is zeroed to silence a sublayer: ``["self_attn.o_proj"]``."""
    found: dict[str, None] = {}
    paths = {id(module): path for path, module in block.named_modules()}
    for module, name in _last_parameters(block, kind):
        path = paths[id(module)]
        found[path if path.rpartition(".")[2] in _LAST_OF[kind] else f"{path}.{name}"] = None
    return list(found)


def _last_parameters(block: nn.Module, kind: str) -> Iterator[tuple[nn.Module, str]]:
    for name, part in block.named_children():
        if name not in _PARTS[kind]:
            continue
        for path, module in part.named_modules():
            leaf = (path or name).rpartition(".")[2]
            if leaf in _LAST_OF[kind]:
                yield from ((module, own) for own, _ in module.named_parameters(recurse=False))
            else:  # the experts of a mixture may be one tensor
                for own, _ in module.named_parameters(recurse=False):
                    if own.removesuffix("_bias") in _LAST_OF[kind]:
                        yield module, own


def _is_identity(model: Any, blocks: nn.ModuleList, number: int, both: nn.Module) -> bool:
    """Whether a block with both sublayers zeroed gives back what it gets, zeros too.

    Of zeros even the smallest write would be left; of a real state the carry is seen.
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def look(zeros: bool) -> None:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            state = args[0] if args else kwargs["hidden_states"]
            state = torch.zeros_like(state) if zeros else state
            states.append(state.clone())
            return ((state, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": state})

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            after = cast(Any, output)[0] if isinstance(output, (tuple, list)) else output
            seen.append((states.pop(), after.clone()))

        states: list[Tensor] = []
        handles = [
            both.register_forward_pre_hook(enter, with_kwargs=True),
            both.register_forward_hook(leave),
        ]
        try:
            main_output(model, probe_inputs(model))
        finally:
            for handle in handles:
                handle.remove()

    original = blocks[number]
    blocks[number] = both
    try:
        for zeros in (False, True):
            look(zeros)
    finally:
        blocks[number] = original
    return all(torch.equal(before, after) for before, after in seen) and len(seen) == 2
