"""Apply one recorded call to another tensor, with everything but the carried arguments frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mainstem.observe._rules import ADDITIVE, FUSED_ADDS


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a pass with all its arguments.

    Attributes:
        name: canonical name of the function.
        func: the function.
        leaves: flattened arguments as they were; ``spec`` puts them together again.
        given: the very objects that were passed (a call in place changes its own, ``leaves`` has the copy).
        given_versions: how often each had been changed in place before the call, -1 for no tensor.
        made: tensors it returned, and ``made_versions``: how often each had been changed by then.
    """

    name: str
    func: Callable[..., Any]
    leaves: Sequence[Any]
    spec: pytree.TreeSpec
    given: Sequence[Any]
    given_versions: Sequence[int]
    made: Sequence[Tensor]
    made_versions: Sequence[int]

    @classmethod
    def run(
        cls, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, Any]:
        """Make the call and return it with its result."""
        given, spec = pytree.tree_flatten((args, kwargs))
        leaves = list(given)
        if is_inplace(func):  # the call destroys its first argument, so keep a copy of it as it was
            leaves[0] = given[0].clone()
        versions = [version(t) for t in given]
        out = func(*args, **kwargs)
        made = [t for t in pytree.tree_leaves(given[0] if out is None else out) if isinstance(t, Tensor)]
        return cls(name, func, leaves, spec, given, versions, made, [version(t) for t in made]), out

    @classmethod
    def of_input(cls, name: str, value: Tensor) -> Call:
        """Stand for the caller, who made an input of the model."""
        return cls(name, lambda: value, [], pytree.tree_structure(()), [], [], [value], [version(value)])


def is_inplace(func: Callable[..., Any]) -> bool:
    """Whether a torch function changes its first argument, by PyTorch's own naming."""
    name = getattr(func, "__name__", "")
    return name.startswith("__i") if name.startswith("__") else name.endswith("_")


def version(t: Any) -> int:
    """Return how often a tensor has been changed in place; -1 for what is no tensor or keeps no count."""
    if not isinstance(t, Tensor) or t.is_inference():
        return -1
    return t._version  # pyright: ignore[reportPrivateUsage]


def apply_frozen(call: Call, given: Mapping[int, Tensor], *, constants: bool, offsets: bool) -> list[Tensor]:
    """Return what the linear part of ``call`` makes of ``given``.

    Args:
        call: the call, with the values of the pass.
        given: by slot, what takes the place of the carried arguments.
        constants: whether tensors that the call adds are added here too (they are dropped otherwise).
        offsets: whether a norm's bias is added here.

    Returns:
        One tensor for each that the call made.
    """
    if call.name == "layer_norm":
        return [_layer_norm(call, given[0], offsets)]
    if call.name == "rms_norm":
        return [_rms_norm(call, given[0])]
    if call.name == "normalize":
        return [given[0] * _ratio(call)]
    if call.name in FUSED_ADDS:
        return [given[0]]
    leaves = list(call.leaves)
    for slot, leaf in enumerate(leaves):
        if slot in given:
            leaves[slot] = given[slot].clone() if slot == 0 else given[slot]
        elif (
            call.name in ADDITIVE and not constants and isinstance(leaf, Tensor) and leaf.is_floating_point()
        ):
            leaves[slot] = torch.zeros_like(leaf)
        elif (
            call.name in ADDITIVE
            and call.name in ("add", "sub")
            and not constants
            and isinstance(leaf, float | int)
        ):
            leaves[slot] = 0
    args, kwargs = pytree.tree_unflatten(leaves, call.spec)
    out = call.func(*args, **kwargs)
    return [leaves[0]] if out is None else [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]


def _arguments(call: Call, names: Sequence[str]) -> dict[str, Any]:
    args, kwargs = pytree.tree_unflatten(list(call.leaves), call.spec)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _layer_norm(call: Call, x: Tensor, offsets: bool) -> Tensor:
    a = _arguments(call, ("input", "normalized_shape", "weight", "bias", "eps"))
    dims = tuple(range(-len(tuple(a["normalized_shape"])), 0))
    scale = torch.rsqrt(a["input"].var(dims, correction=0, keepdim=True) + a.get("eps", 1e-5))
    out = (x - x.mean(dims, keepdim=True)) * scale
    out = out if a.get("weight") is None else out * a["weight"]
    return out + a["bias"] if offsets and a.get("bias") is not None else out


def _rms_norm(call: Call, x: Tensor) -> Tensor:
    a = _arguments(call, ("input", "normalized_shape", "weight", "eps"))
    dims = tuple(range(-len(tuple(a["normalized_shape"])), 0))
    eps = torch.finfo(a["input"].dtype).eps if a.get("eps") is None else a["eps"]
    out = x * torch.rsqrt(a["input"].square().mean(dims, keepdim=True) + eps)
    return out if a.get("weight") is None else out * a["weight"]


def _ratio(call: Call) -> Tensor:
    """Return what a normalize multiplied its input by."""
    a = _arguments(call, ("input", "p", "dim", "eps"))
    size = a["input"].norm(p=a.get("p", 2.0), dim=a.get("dim", 1), keepdim=True)
    return 1 / size.clamp_min(a.get("eps", 1e-12))
