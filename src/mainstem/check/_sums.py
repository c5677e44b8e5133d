"""Rows and columns of mixing matrices.

A Sinkhorn iteration normalises a matrix along one dimension and the other in turn. Whatever it is made of
(softmax, division by a sum, logarithms, somebody's own function), the values show it: tensors made from one
another whose sums are 1 along one dimension, then along another, and so on. What comes out at the end is a
mixing matrix that is meant to be doubly stochastic, and its sums are looked at.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mainstem.check._subject import Subject, shake
from mainstem.check.report import Finding, Outcome, Passed, Skipped
from mainstem.check.stack import ResidualStack

LARGEST = 64
"""Largest number of rows or columns of a mixing matrix: streams times fractions are few."""
TURNS = 4
"""How often the dimension must have changed to be called an iteration."""
CLOSE = 1e-4
"""How near to 1 the sums are right after a normalisation, in fp32, with an epsilon in its denominator."""
BALANCED = 1e-2
"""How near to 1 the sums of the result must be: five iterations from moderate logits do better."""


@dataclasses.dataclass
class _Chain:
    """Tensors of one shape made from one another, each with sums of 1 along the dimensions of a set.

    Attributes:
        dims: the sets, in order; dimensions count from the end, so -1 is the last.
        last: the last of the tensors.
        in_logs: whether it holds logarithms.
    """

    dims: list[frozenset[int]] = dataclasses.field(default_factory=list[frozenset[int]])
    last: Tensor | None = None
    in_logs: bool = False

    def turns(self, a: int, b: int) -> int:
        """Return how often the sums of 1 went from one dimension to the other; both having them counts."""
        turns, now = 0, None
        for dims in self.dims:
            if a in dims and b in dims:
                turns += 1
            elif a in dims or b in dims:
                turns, now = turns + (now != (a in dims)), a in dims
        return turns

    def pair(self) -> tuple[int, int] | None:
        """Return rows and columns: the two dimensions with the most turns, neighbours and last ones first."""
        known = sorted(frozenset[int]().union(*self.dims))
        pairs = itertools.combinations(known, 2)
        best = max(pairs, key=lambda p: (self.turns(*p), p[0] - p[1], p), default=None)
        return best if best is not None and self.turns(*best) >= TURNS else None


class _SinkhornWatch(TorchDispatchMode):
    """Follows every small tensor whose sums along a dimension are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.chains: list[_Chain] = []
        self._of: dict[int, _Chain] = {}
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and _may_mix(out):
            self._follow(out, pytree.tree_leaves((args, kwargs)))
        return out

    def _follow(self, out: Tensor, given: list[Any]) -> None:
        chain = next((self._of[id(t)] for t in given if isinstance(t, Tensor) and id(t) in self._of), None)
        if chain is not None and chain.last is not None and chain.last.shape != out.shape:
            chain = None
        for in_logs in (False, True):
            dims = _stochastic(out, in_logs)
            if dims and (chain is not None or len(dims) <= 2):  # more were chance
                if chain is None:
                    chain = _Chain()
                    self.chains.append(chain)
                chain.dims.append(dims)
                chain.last, chain.in_logs = out, in_logs
                break
        if chain is not None:  # a step between (an epsilon, a clamp) is followed too
            self._of[id(out)] = chain
            self._alive.append(out)

    def matrices(self) -> list[tuple[Tensor, int, int]]:
        """Return what each iteration ended with, and its two dimensions."""
        found: list[tuple[Tensor, int, int]] = []
        for chain in self.chains:
            pair = chain.pair()
            if pair is not None and chain.last is not None:
                found.append((chain.last.exp() if chain.in_logs else chain.last, *pair))
        return found


def _may_mix(t: Tensor) -> bool:
    return t.ndim >= 2 and 0 < t.numel() <= 2**20 and sum(s <= LARGEST for s in t.shape) >= 2


def _stochastic(t: Tensor, in_logs: bool) -> frozenset[int]:
    """Return the dimensions, from the end, along which all sums of a non-negative tensor are 1."""
    if in_logs:
        if float(t.max()) > CLOSE:
            return frozenset()
        t = t.exp()
    elif float(t.min()) < 0:
        return frozenset()
    return frozenset(
        d
        for d in range(-t.ndim, 0)
        if t.shape[d] <= LARGEST and float((t.sum(dim=d, dtype=torch.float64) - 1).abs().max()) <= CLOSE
    )


def check_sums(subject: Subject) -> Outcome:
    """Look at the sums of every mixing matrix that an iteration made or a connection shows."""
    depth = subject.config.depths[0]
    worst: tuple[float, Finding] | None = None
    seen = 0
    for weights in ("as built", "moved"):
        for matrix, rows, columns, where in _matrices(subject, depth, weights):
            seen += 1
            finding = _judge(matrix, rows, columns, where, depth)
            assert finding.figure is not None
            apart = abs(finding.figure - 1)
            if worst is None or apart > worst[0]:
                worst = (apart, finding)
    if worst is None:
        return Skipped(
            kind="mixing-sums",
            reason="no matrix was seen that is normalised along two dimensions in turn (Sinkhorn), and no "
            "connection shows mixing_matrices(); matrices made in other ways are not looked at",
        )
    if worst[0] > BALANCED:
        return worst[1]
    says = f"all row and column sums of {seen} mixing matrices are 1; the figure is the one furthest from it"
    return Passed(kind="mixing-sums", figure=worst[1].figure, says=says)


def _matrices(subject: Subject, depth: int, weights: str) -> list[tuple[Tensor, int, int, str]]:
    model, given = subject.build(depth).eval(), subject.inputs()
    if weights != "as built":
        shake(model)
    watch = _SinkhornWatch()
    with watch:
        subject.run(model, given)
    found = [(m, rows, columns, f"Sinkhorn {i}") for i, (m, rows, columns) in enumerate(watch.matrices())]
    if isinstance(model.inner, ResidualStack):
        for i, connection in enumerate(model.inner.connections):
            shown: Any = getattr(connection, "mixing_matrices", None)
            if callable(shown):
                with torch.no_grad():
                    found += [(m, -2, -1, f"connections.{i}") for m in shown()]  # pyright: ignore
    return found


def _judge(matrix: Tensor, rows: int, columns: int, where: str, depth: int) -> Finding:
    """Describe a matrix by its sum that is furthest from 1."""
    matrix = matrix.detach().double()
    along = {"row": matrix.sum(columns).flatten(), "column": matrix.sum(rows).flatten()}
    ranges = {name: (float(s.min()), float(s.max())) for name, s in along.items()}
    name, figure = max(
        ((n, v) for n, pair in ranges.items() for v in pair), key=lambda entry: abs(entry[1] - 1)
    )
    shape = (matrix.shape[rows], matrix.shape[columns])
    square = "" if shape[0] == shape[1] else "; it is not square"
    return Finding(
        kind="mixing-sums",
        figure=figure,
        where=f"{where}, {shape[0]} x {shape[1]}",
        depth=depth,
        says=f"a {name} of a {shape[0]} x {shape[1]} mixing matrix sums to {figure:.3g}, not 1{square}.",
        details={f"{n}_sums": list(pair) for n, pair in ranges.items()} | {"shape": list(shape)},
    )
