"""Rows and columns of mixing matrices.

A connection shows its matrices and says what it promises of them (`mainstem.connections.MixingMatrix`). Of
one that shows none, only Sinkhorn iterations are seen: they normalise a matrix along one dimension and the
other in turn, and whatever that is made of (softmax, division by a sum, logarithms, somebody's own function),
the values show it: tensors made from one another whose sums are 1 along one dimension, then along another,
and so on. What comes out at the end is a mixing matrix that is meant to be doubly stochastic.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mainstem.check._subject import Subject, shake, watched
from mainstem.check.report import Finding, Outcome, Passed, Skipped
from mainstem.connections import MixingMatrix, Promise

LARGEST = 64
"""Largest number of rows or columns of a mixing matrix: streams times fractions are few."""
TURNS = 4
"""How often the dimension must have changed to be called an iteration."""
CLOSE = 1e-4
"""How near to 1 the sums are right after a normalisation, in fp32, with an epsilon in its denominator."""
BALANCED = 1e-2
"""How near to 1 the sums of the result must be: five iterations from moderate logits do better."""
_DOUBLY_STOCHASTIC: frozenset[Promise] = frozenset({"rows", "columns"})


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


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A mixing matrix, its last two dimensions rows and columns.

    Attributes:
        values: ``[..., out, in]`` in fp64.
        promises: what is to hold of it.
        where: which one it is.
    """

    values: Tensor
    promises: frozenset[Promise]
    where: str


def check_sums(subject: Subject) -> Outcome:
    """Look at every mixing matrix that an iteration made or a connection shows."""
    depth = subject.config.depths[0]
    shown = [(m, weights) for weights in ("as built", "moved") for m in _matrices(subject, depth, weights)]
    if not shown:
        return Skipped(
            kind="mixing-sums",
            reason="no matrix was seen that is normalised along two dimensions in turn (Sinkhorn), and no "
            "connection shows mixing_matrices(stream); matrices made in other ways are not looked at",
        )
    judged = [f for matrix, weights in shown for f in _judge(matrix, weights, depth)]
    # A figure that is no number is the worst.
    worst = max(judged, key=lambda f: math.inf if math.isnan(f.apart) else f.apart, default=None)
    free = sum(not matrix.promises for matrix, _ in shown)
    if worst is None:
        says = f"{free} mixing matrices were looked at, of which nothing is promised; sum furthest from 1"
        return Passed(kind="mixing-sums", figure=_furthest(m for m, _ in shown), says=says)
    if not worst.apart <= BALANCED:
        return worst.finding
    says = f"what is promised of {len(shown) - free} mixing matrices holds; the figure is furthest from it"
    more = f" ({free} others promise nothing)" if free else ""
    return Passed(kind="mixing-sums", figure=worst.finding.figure, says=says + more)


def _matrices(subject: Subject, depth: int, weights: str) -> list[_Seen]:
    model, given = subject.build(depth).eval(), subject.inputs()
    if weights != "as built":
        shake(model)
    watch = _SinkhornWatch()
    streams: list[tuple[str, Any, Any]] = []
    handles = [
        module.register_forward_pre_hook(_keep_stream(name, streams), with_kwargs=True)
        for name, module in watched(model)
        if callable(getattr(module, "mixing_matrices", None))
    ]
    with watch:
        subject.run(model, given)
    for handle in handles:
        handle.remove()
    found = [
        _seen(values.movedim((rows, columns), (-2, -1)), _DOUBLY_STOCHASTIC, f"Sinkhorn {i}")
        for i, (values, rows, columns) in enumerate(watch.matrices())
    ]
    for name, connection, stream in streams:
        with torch.no_grad():
            for one in connection.mixing_matrices(stream):
                one = one if isinstance(one, MixingMatrix) else MixingMatrix(one, _DOUBLY_STOCHASTIC)
                found.append(_seen(one.values, one.promises, name))
    return found


def _keep_stream(name: str, streams: list[tuple[str, Any, Any]]) -> Callable[..., None]:
    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams.append((name, module, args[0] if args else next(iter(kwargs.values()))))

    return keep


def _seen(values: Tensor, promises: frozenset[Promise], where: str) -> _Seen:
    return _Seen(values.detach().double(), promises, where)


@dataclasses.dataclass(frozen=True)
class _Judged:
    """One promise of one matrix: how far it is from holding, and the sentence if that is too far."""

    apart: float
    finding: Finding


def _judge(matrix: _Seen, weights: str, depth: int) -> Iterator[_Judged]:
    """Describe a matrix by the sum furthest from 1, or the entry of ``M M^T`` furthest from the identity."""
    values = matrix.values
    rows, columns = values.shape[-2:]
    shape = f"{rows} x {columns}"
    sums = {"row": values.sum(-1), "column": values.sum(-2)}
    details: dict[str, Any] = {f"{n}_sums": [float(s.min()), float(s.max())] for n, s in sums.items()}
    details |= {"shape": [rows, columns], "weights": weights, "promises": sorted(matrix.promises)}

    def judged(apart: float, figure: float, says: str) -> _Judged:
        square = "" if rows == columns else "; it is not square"
        return _Judged(
            apart,
            Finding(
                kind="mixing-sums",
                figure=figure,
                where=f"{matrix.where}, {shape}",
                depth=depth,
                says=f"{says}{square}.",
                details=details,
            ),
        )

    for name, along in sums.items():
        if f"{name}s" in matrix.promises:
            figure = _extreme(along, 1.0)
            yield judged(
                abs(figure - 1), figure, f"a {name} of a {shape} mixing matrix sums to {figure:.3g}, not 1"
            )
    if matrix.promises >= _DOUBLY_STOCHASTIC and float(values.min()) < 0:
        low = float(values.min())
        yield judged(-low, low, f"a doubly stochastic {shape} mixing matrix has the entry {low:.3g}, below 0")
    if "orthogonal" in matrix.promises:
        product = values @ values.mT - torch.eye(rows, dtype=values.dtype)
        figure = _extreme(product, 0.0)
        says = f"M M^T of an orthogonal {shape} mixing matrix M differs from the identity by {figure:.3g}"
        yield judged(abs(figure), figure, says)


def _extreme(values: Tensor, wanted: float) -> float:
    """Return the entry furthest from ``wanted``; one that is no number before all others."""
    apart = (values - wanted).abs().flatten()
    return float(values.flatten()[apart.nan_to_num(nan=math.inf).argmax()])


def _furthest(matrices: Iterable[_Seen]) -> float:
    sums = [s.flatten() for m in matrices for s in (m.values.sum(-1), m.values.sum(-2))]
    return _extreme(torch.cat(sums), 1.0)
