"""Does a position see a later one, or a sequence another one?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mainstem.check._subject import Model, Subject, difference, shake, size, tolerance, watched
from mainstem.check.report import Finding, Outcome, Passed

COARSE = 1e-3
"""A tolerance, relative to the largest output, beyond which a report says what it cannot see."""


@dataclasses.dataclass(frozen=True)
class _Case:
    depth: int
    tokens: int
    mode: str
    weights: str

    def model(self, subject: Subject) -> Model:
        model = subject.build(self.depth)
        if self.weights != "as built":
            shake(model)
        return model.train(self.mode == "train")


@dataclasses.dataclass(frozen=True)
class _Moved:
    """How far outputs moved that should not have.

    Attributes:
        most: largest ``|difference|``; inf where one is finite and the other is not.
        relative: the same over the largest entry of the output.
        first: position (or sequence) of the first that moved.
        limit: what rounding may do, relative.
    """

    most: float
    relative: float
    first: int
    limit: float

    @property
    def leaks(self) -> bool:
        return self.relative > self.limit


_Measure: TypeAlias = Callable[[Subject, _Case], _Moved]


def check_repeat(subject: Subject) -> Outcome:
    """Look whether a second run in eval mode gives the same: everything else compares two runs."""
    depth = subject.config.depths[0]
    model = subject.build(depth).eval()
    given = subject.inputs()
    first, second = subject.run(model, given), subject.run(model, given)
    apart = float(difference(first, second).max())
    if apart / size(first) <= tolerance(first):
        says = "two runs in eval mode gave the same"
        if (limit := tolerance(first)) > COARSE:
            says += (
                f"; outputs are {str(first.dtype)[6:]}, of which no check sees a difference below "
                f"{limit:.0%} of the largest: build the model in float32"
            )
        return Passed(kind="repeat", figure=apart, says=says)
    return Finding(
        kind="repeat",
        figure=apart,
        where=f"depth {depth}",
        depth=depth,
        says="a second run in eval mode on the same input gives other outputs, so a forward pass changes the "
        "model.",
    )


def check_future(subject: Subject) -> list[Outcome]:
    """Change the last token alone: earlier outputs must stay."""
    held = "the last token changed, no earlier output moved beyond rounding"
    return _in_each_mode(subject, "future-leak", held, _future, _future_leak)


def check_batch(subject: Subject) -> list[Outcome]:
    """Change the last sequence alone: the others must stay."""
    held = "one sequence changed, no other's output moved beyond rounding"
    return _in_each_mode(subject, "batch-leak", held, _batch, _batch_leak)


def _in_each_mode(
    subject: Subject, kind: str, held: str, measure: _Measure, describe: Callable[[Subject, _Case], Finding]
) -> list[Outcome]:
    """Look for a leak in eval and in training mode; say what ``held``, or describe the smallest leak."""
    outcomes: list[Outcome] = []
    for mode in ("eval", "train"):
        case, largest = _first_leak(subject, mode, measure)
        if case is None:
            outcomes.append(Passed(kind=kind, figure=largest, says=f"{mode} mode: {held}"))
        else:
            outcomes.append(describe(subject, case))
    return outcomes


def _future_leak(subject: Subject, found: _Case) -> Finding:
    case = _fewest_tokens(subject, found)
    moved = _future(subject, case)
    module = _first_module(subject, found)  # many tokens: few could be mistaken for heads
    return Finding(
        kind="future-leak",
        figure=moved.most,
        where=f"position {moved.first}" + (f", first in {module}" if module else ""),
        depth=case.depth,
        says=f"{case.mode} mode: changing only token {case.tokens - 1} of {case.tokens} moves earlier "
        f"outputs by up to {moved.most:.2g}{_as(case)}.",
        details=dataclasses.asdict(case) | {"position": moved.first, "module": module},
    )


def _batch_leak(subject: Subject, case: _Case) -> Finding:
    moved = _batch(subject, case)
    return Finding(
        kind="batch-leak",
        figure=moved.most,
        where=f"sequence {moved.first}",
        depth=case.depth,
        says=f"{case.mode} mode: changing only the last of {subject.config.batch} sequences moves the "
        f"outputs of others by up to {moved.most:.2g}{_as(case)}.",
        details=dataclasses.asdict(case) | {"sequence": moved.first},
    )


def _as(case: _Case) -> str:
    return "" if case.weights == "as built" else ", once parameters of one value (gates, gains) are moved"


def _first_leak(subject: Subject, mode: str, measure: _Measure) -> tuple[_Case | None, float]:
    """Return the smallest case that leaks, weights as built first, and the largest movement seen."""
    largest = 0.0
    for weights in ("as built", "moved"):
        for depth in subject.config.depths:
            case = _Case(depth, subject.config.tokens, mode, weights)
            moved = measure(subject, case)
            if moved.leaks:
                return case, moved.most
            largest = max(largest, moved.most)
    return None, largest


def _fewest_tokens(subject: Subject, found: _Case) -> _Case:
    for tokens in range(2, found.tokens):
        case = dataclasses.replace(found, tokens=tokens)
        if _future(subject, case).leaks:
            return case
    return found


def _pair(subject: Subject, case: _Case) -> tuple[Tensor, Tensor]:
    given = subject.inputs(tokens=case.tokens)
    return given, subject.other(given, slice(None), -1)


def _future(subject: Subject, case: _Case) -> _Moved:
    # A fresh model for each run: what one run leaves behind (running statistics) is no leak.
    before, after = (subject.run(case.model(subject), given) for given in _pair(subject, case))
    apart = difference(before, after)[:, :-1].amax(dim=(0, 2))
    return _moved(apart, before)


def _batch(subject: Subject, case: _Case) -> _Moved:
    given = subject.inputs(tokens=case.tokens)
    changed = subject.other(given, -1, slice(None))
    before, after = (subject.run(case.model(subject), one) for one in (given, changed))
    apart = difference(before, after)[:-1].amax(dim=(1, 2))
    return _moved(apart, before)


def _moved(apart: Tensor, out: Tensor) -> _Moved:
    limit, scale = tolerance(out), size(out)
    above = (apart / scale > limit).nonzero().flatten()
    most = float(apart.max())
    return _Moved(most, most / scale, int(above[0]) if above.numel() else -1, limit)


def _first_module(subject: Subject, case: _Case) -> str | None:
    """Return the path of the first module whose output moved at an earlier position."""
    runs: list[list[tuple[str, Tensor]]] = []
    for given in _pair(subject, case):
        model = case.model(subject)
        seen: list[tuple[str, Tensor]] = []
        handles = [
            module.register_forward_hook(_keep(name, seen, given.shape[:2]))
            for name, module in watched(model)
        ]
        subject.run(model, given)
        for handle in handles:
            handle.remove()
        runs.append(seen)
    for (name, before), (other, after) in zip(*runs, strict=False):
        if name != other or before.shape != after.shape:
            return None
        moved = difference(before, after)[:, :-1].max()
        if float(moved) / size(before) > tolerance(before):
            return name
    return None


def _keep(name: str, seen: list[tuple[str, Tensor]], shape: torch.Size) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for t in _tensors(output):
            seen.append((name, t.detach().clone()))

    def _tensors(output: Any) -> Iterator[Tensor]:
        for t in output if isinstance(output, tuple | list) else (output,):
            if isinstance(t, Tensor) and t.is_floating_point() and t.ndim == 3 and t.shape[1] == shape[1]:
                yield t

    return hook
