"""Tensor parallelism: a module whose weights several processes share is one call of a traced pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import _pytree as pytree


def communicates_in_forward(module: nn.Module) -> bool:
    """Whether a forward put on the module itself holds all its communication: that of a ``tp_plan``."""
    return getattr(vars(module).get("forward"), "__name__", "") == "tp_forward"


@contextlib.contextmanager
def sharded_as_one_call(model: nn.Module) -> Generator[None]:
    """Let every module of a ``tp_plan`` be one torch function of its arguments and weights.

    Inside it, shares of a product are put together by communication that changes tensors behind their backs
    and wraps them in others, so that no data flow can be followed. A linear module is called ``linear``, an
    embedding ``embedding``, any other ``sharded``, of which no rule knows anything. All processes have to
    make the same passes.
    """
    changed = [(m, vars(m)["forward"]) for m in model.modules() if communicates_in_forward(m)]
    for module, forward in changed:
        module.forward = _as_one_call(module, forward)
    try:
        yield
    finally:
        for module, forward in changed:
            module.forward = forward


def _as_one_call(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def function(args: tuple[Any, ...], kwargs: Mapping[str, Any], weights: tuple[Tensor, ...]) -> Any:
        tensors = [t for t in pytree.tree_leaves((args, kwargs, weights)) if isinstance(t, Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(function, tensors, args, kwargs, weights)
        return forward(*args, **kwargs)

    function.__name__ = _function_name(module)
    weights = tuple(module.parameters())
    return lambda *args, **kwargs: function(args, kwargs, weights)


def _function_name(module: nn.Module) -> str:
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "linear" if type(module) is nn.Linear else "sharded"  # a subclass need not be linear
