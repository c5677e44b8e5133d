"""What a scheme costs on the residual path alone: counted by running it, not typed in."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mainstem.connections._base import Scheme, Stream, Trunk
from mainstem.connections._norms import NormConfig

_COPIES = frozenset(
    [
        "clone",
        "copy_",
        "cat",
        "stack",
        "_to_copy",
        "zeros_like",
        "ones_like",
        "fill_",
        "zero_",
        "new_zeros",
        "zeros",
        "ones",
    ]
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Means over the sublayers of a stack; the branches' own work is left out, their norms are not.

    Attributes:
        parameters: a sublayer, the trunk's own (final norm, final mixing) left out.
        flops: floating-point operations of the forward pass, a token and sublayer: matrix products by
            PyTorch's own formulas, everything else one for each entry it makes (or reduces).
        bytes_moved: bytes that the eager forward pass reads and writes, a token and sublayer: each call's
            inputs and outputs once, views not at all.
        bytes_saved: bytes kept for the backward pass, a token and sublayer: each memory once, parameters not.
    """

    parameters: float
    flops: float
    bytes_moved: float
    bytes_saved: float


def count_cost(
    scheme: Scheme,
    *,
    width: int = 256,
    num_sublayers: int = 24,
    tokens: int = 32,
    norm: NormConfig | None = None,
) -> Cost:
    """Run a stack of ``scheme`` around branches that do nothing, in fp32 on the CPU, and count.

    Args:
        scheme: what to count.
        width: of the stream.
        num_sublayers: sublayers of the stack; histories cost more the deeper it is.
        tokens: positions of the one sequence that is run.
        norm: RMSNorm when not given.
    """
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        trunk = scheme.build(width=width, num_sublayers=num_sublayers, norm=norm or NormConfig()).train()
        x = torch.randn(1, tokens, width)
        counter, saved = _Counter(), _Saved(trunk)
        with counter, torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            _run(trunk, trunk.expand(x.requires_grad_()), counter)
    each = num_sublayers * tokens
    parameters = sum(p.numel() for p in trunk.connections.parameters())
    return Cost(
        parameters=parameters / num_sublayers,
        flops=counter.flops / each,
        bytes_moved=counter.bytes / each,
        bytes_saved=saved.bytes / each,
    )


def _run(trunk: Trunk, stream: Stream, counter: _Counter) -> None:
    counter.flops = counter.bytes = 0
    for connection in trunk.connections:
        stream = connection(stream, _nothing, counter)


def _nothing(read: Tensor, counter: _Counter) -> Tensor:
    with counter.paused():
        out: Tensor = _Fresh.apply(read)  # pyright: ignore[reportAssignmentType]
    return out


class _Fresh(torch.autograd.Function):
    """A branch that returns what it reads as a tensor of its own, and keeps nothing."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


class _Counter(TorchDispatchMode):
    """Counts operations and bytes of every call that is not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = 0
        self._active = True

    @contextmanager
    def paused(self) -> Generator[None]:
        self._active = False
        try:
            yield
        finally:
            self._active = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._active:
            self._count(func, args, kwargs or {}, out)
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        read = {t.data_ptr(): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        storages = {t.untyped_storage().data_ptr() for t in read.values()}
        in_place = str(func.overloadpacket).endswith("_")
        if not made or (not in_place and all(t.untyped_storage().data_ptr() in storages for t in made)):
            return
        self.bytes += sum(t.numel() * t.element_size() for t in (*read.values(), *made))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        elif func.overloadpacket.__name__ not in _COPIES:
            self.flops += max(t.numel() for t in (*read.values(), *made))


class _Saved:
    """Counts memory kept for the backward pass."""

    def __init__(self, module: nn.Module):
        self._known = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
        self._kept: list[Tensor] = []
        self.bytes = 0

    def pack(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._kept.append(t)  # so that no later tensor gets the same address
            self.bytes += storage.nbytes()
        return t

    def unpack(self, t: Tensor) -> Tensor:
        return t
