"""Our connections around a reference's own branches, one after another, compared from end to end."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import Run, run
from torch import Tensor, nn

from mainstem.connections import Connection, NormConfig, Scheme, Stream, Trunk

WIDTH = 16


@contextmanager
def fp64() -> Iterator[None]:
    """Build in fp64: constants of depth are buffers in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def draw(module: nn.Module, std: float = 0.5, seed: int = 1) -> None:
    """Move every parameter away from where it starts: a 1 or a 0 would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def some(*shape: int, seed: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def build(scheme: Scheme, num_sublayers: int, norm: NormConfig, width: int = WIDTH) -> Trunk:
    with fp64():
        return scheme.build(width=width, num_sublayers=num_sublayers, norm=norm)


def joins_of(trunk: Trunk) -> list[Connection]:
    return [join for join in trunk.connections if isinstance(join, Connection)]


def through(
    joins: Sequence[Connection], stream: Stream, branches: Sequence[Callable[[Tensor], Tensor]]
) -> Any:
    for join, branch in zip(joins, branches, strict=True):
        stream = join(stream, branch)
    return stream


def copy_weights(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Copy (from, to) for each name."""
    with torch.no_grad():
        for name, (source, target) in pairs.items():
            assert source.shape == target.shape, name
            target.copy_(source)


def side(value: Tensor | Sequence[Tensor], x: Tensor | Mapping[str, Tensor], **weights: Tensor) -> Run:
    """One side's run: gradients of the input ``x`` (or several) and of the weights named."""
    inputs = {"input": x} if isinstance(x, Tensor) else dict(x)
    return run(value, inputs | weights)


def one_file(package: str, path: str) -> Any:
    """Run one file of an installed package without the package around it, which may ask for a compiler."""
    found = importlib.util.find_spec(package)
    if found is None or found.submodule_search_locations is None:
        pytest.skip(f"needs {package}; `make test-oracle` installs it")
    place = Path(next(iter(found.submodule_search_locations))) / path
    spec = importlib.util.spec_from_file_location(f"{package}_{place.stem}_alone", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[[str], Any]) -> None:
    """Put an empty module in the place of one that is imported and not used; it has any name asked for."""

    def attribute(asked: str) -> Any:
        if asked.startswith("__"):
            raise AttributeError(asked)
        return make(asked)

    module: Any = types.ModuleType(name)
    module.__getattr__ = attribute
    monkeypatch.setitem(sys.modules, name, module)
