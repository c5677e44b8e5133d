"""To agree with a reference: the same values, and the same gradient of everything that has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# fp64: some hundreds of operations in another order. fp32: assert_close's own defaults.
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {},
}

NOTHING = 1e-10


class Row(NamedTuple):
    """What a comparison is, for the table.

    Attributes:
        scheme: name of ours.
        package: the distribution the reference comes from.
        reference: what of it.
        compared: what was compared beside the input's gradient.
        departs: where the reference departs from its paper, or from ours; empty where it does not.
    """

    scheme: str
    package: str
    reference: str
    compared: str
    departs: str = ""


class Run(NamedTuple):
    """What one side computed: values, and gradients by the reference's names (None: not in the graph)."""

    values: Sequence[Tensor]
    gradients: Mapping[str, Tensor | None]


def run(
    values: Tensor | Sequence[Tensor],
    wanted: Mapping[str, Tensor],
    directions: Sequence[Tensor] | None = None,
) -> Run:
    """Differentiate the values along fixed random directions, by everything in ``wanted``."""
    values = [values] if isinstance(values, Tensor) else list(values)
    if directions is None:
        generator = torch.Generator().manual_seed(7)
        directions = [torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in values]
    loss: Any = sum((v * d).sum() for v, d in zip(values, directions, strict=True))
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return Run([v.detach() for v in values], dict(zip(wanted, found, strict=True)))


def renamed(gradients: Run, names: Mapping[str, str | tuple[str, Callable[[Tensor], Tensor]]]) -> Run:
    """Give gradients the reference's names: ours -> theirs, or (theirs, how to lay it out as theirs)."""
    out: dict[str, Tensor | None] = {}
    for name, gradient in gradients.gradients.items():
        to = names.get(name, name)
        to, lay_out = to if isinstance(to, tuple) else (to, None)
        out[to] = gradient if gradient is None or lay_out is None else lay_out(gradient)
    return Run(gradients.values, out)


def measure(ours: Run, theirs: Run) -> dict[str, Any]:
    """Assert agreement and return the largest errors, relative to the largest entry of each tensor."""
    value_error = max(error(a, b) for a, b in zip(ours.values, theirs.values, strict=True))
    for a, b in zip(ours.values, theirs.values, strict=True):
        torch.testing.assert_close(a, b, **CLOSE[b.dtype])
    assert ours.gradients.keys() == theirs.gradients.keys()
    largest = max(float(g.abs().max()) for g in theirs.gradients.values() if g is not None)
    gradient_error, compared = 0.0, 0
    for name, b in theirs.gradients.items():
        a = ours.gradients[name]
        assert (a is None) == (b is None), name
        if a is None or b is None:
            continue
        assert a.shape == b.shape, name
        torch.testing.assert_close(a, b, **CLOSE[b.dtype], msg=lambda text, name=name: f"{name}: {text}")
        # Where the gradient is zero but for rounding (a mix of equal streams), an error has no size to go by.
        if b.abs().max() > NOTHING * largest:
            gradient_error, compared = max(gradient_error, error(a, b)), compared + 1
    assert compared
    dtype = str(theirs.values[0].dtype).removeprefix("torch.")
    return {"dtype": dtype, "values": value_error, "gradients": gradient_error, "num_gradients": compared}


def error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    assert theirs.isfinite().all()
    return float((ours - theirs).abs().max() / theirs.abs().max())
