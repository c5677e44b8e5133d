"""Which blocks to leave out: planners behind one interface, from a glance at states to a search by loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from mainstem.errors import ConfigError
from mainstem.measure import AngularDistances, BlockInfluence, Reducer, Result
from mainstem.observe import record
from mainstem.surgery.judge import Judge

Chosen = tuple[int, ...]
Steps = Iterator[Chosen]


@dataclasses.dataclass(frozen=True)
class Plan(Result):
    """What one planner would leave out.

    Attributes:
        planner: its name.
        sets: ``sets[n]`` are the numbers of the ``n`` units left out, in order, from ``n`` = 0.
        finished: whether it came to the number asked for; not so after a KeyboardInterrupt.
    """

    planner: str
    sets: tuple[Chosen, ...]
    finished: bool


class Planner(Protocol):
    """Answers with the units to leave out, for every number of them."""

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        ...

    def most_passes(self, num_units: int, num: int) -> int:
        """Most passes a batch it makes for ``num`` of ``num_units``, the whole model's included."""
        ...

    def steps(self, judge: Judge, num: int) -> Steps:
        """Yield the sets for 1, 2, ... ``num`` units."""
        ...


def make_plan(
    planner: Planner, judge: Judge, num: int, progress: Callable[[int, int], None] | None = None
) -> Plan:
    """Ask a planner for 0 to ``num`` units.

    Args:
        planner: one of `PLANNERS`, or your own.
        judge: over the calibration text.
        num: most units to leave out.
        progress: told how many units are found, and ``num``.

    Raises:
        ConfigError: ``num`` is below 1, or leaves no unit.
    """
    if not 1 <= num < len(judge.units):
        raise ConfigError(
            f"asked to leave out {num} of {len(judge.units)} units ({judge.unit}); expected 1 to "
            f"{len(judge.units) - 1}."
        )
    sets: list[Chosen] = [()]
    try:
        for chosen in planner.steps(judge, num):
            sets.append(chosen)
            if progress is not None:
                progress(len(sets) - 1, num)
    except KeyboardInterrupt:
        return Plan(planner.name, tuple(sets), finished=False)
    return Plan(planner.name, tuple(sets), finished=True)


@dataclasses.dataclass(frozen=True)
class Influence:
    """The blocks of least influence, ``1 - cos`` of the states around them (ShortGPT, arXiv 2403.03853)."""

    name: str = "influence"

    def most_passes(self, num_units: int, num: int) -> int:
        """One, over the whole model."""
        return 1

    def steps(self, judge: Judge, num: int) -> Steps:
        """Yield the first ``n`` blocks in order of influence."""
        reducer = BlockInfluence()
        _look(judge, reducer, self.name)
        order = sorted(reducer.result().blocks, key=lambda one: (one.influence.all, one.block))
        yield from _first_of([one.block for one in order], num)


@dataclasses.dataclass(frozen=True)
class Angular:
    """The run of blocks over which the last token's state turns least (Gromov et al., arXiv 2403.17887)."""

    name: str = "angular"

    def most_passes(self, num_units: int, num: int) -> int:
        """One, over the whole model."""
        return 1

    def steps(self, judge: Judge, num: int) -> Steps:
        """Yield the best run of each length."""
        reducer = AngularDistances()
        _look(judge, reducer, self.name)
        result = reducer.result()
        for n in range(1, num + 1):
            start = result.best_start(n)
            yield tuple(range(start, start + n))


@dataclasses.dataclass(frozen=True)
class Single:
    """The units whose removal costs least, each measured alone."""

    name: str = "single"

    def most_passes(self, num_units: int, num: int) -> int:
        """One a unit, and the whole model's; always as many."""
        return 1 + num_units

    def steps(self, judge: Judge, num: int) -> Steps:
        """Yield the first ``n`` units in order of their own loss."""
        yield from _first_of(sorted(judge.units, key=lambda unit: judge.rank([unit])), num)


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The unit that costs least beside those already out, again and again (SLEB, arXiv 2402.09025)."""

    name: str = "greedy"

    def most_passes(self, num_units: int, num: int) -> int:
        """One a candidate, and one for the states of each step's start; always as many."""
        return sum(1 + num_units - n for n in range(num))

    def steps(self, judge: Judge, num: int) -> Steps:
        """Yield each step's set."""
        chosen: Chosen = ()
        for _ in range(num):
            chosen = min(_extended(judge, chosen), key=judge.rank)
            yield chosen


@dataclasses.dataclass(frozen=True)
class Beam:
    """Several sets are carried on at once, and the best one's units are exchanged while that helps.

    Every step extends the ``width`` best sets, and the greedy planner's beside them, by every unit. Then each
    unit of the best set is exchanged for each one outside of it, and the best exchange is made, at most
    ``exchanges`` times. So no step is worse than the greedy one, on the text that it was judged by.

    Attributes:
        width: sets carried on.
        exchanges: rounds of exchanging a step; 0 for none.

    Raises:
        ConfigError: a width below 1, or fewer than no exchanges.
    """

    width: int = 3
    exchanges: int = 1
    name: str = "beam"

    def __post_init__(self) -> None:
        if self.width < 1 or self.exchanges < 0:
            raise ConfigError(
                f"width is {self.width} and exchanges {self.exchanges}; expected at least 1 and 0."
            )

    def most_passes(self, num_units: int, num: int) -> int:
        """What it takes where no set comes up twice."""
        total = 0
        for n in range(num):
            parents = 1 if n == 0 else self.width + 1
            total += parents * (1 + num_units - n) + self.exchanges * (n + 1) * (num_units - n)
        return total

    def steps(self, judge: Judge, num: int) -> Steps:
        """Yield the best set of each step."""
        kept: list[Chosen] = [()]
        greedy: Chosen = ()
        for _ in range(num):
            found: dict[Chosen, None] = {}
            children: list[Chosen] = []
            for parent in sorted({*kept, greedy}):
                extended = _extended(judge, parent)
                found.update(dict.fromkeys(extended))
                if parent == greedy:
                    children = extended
            greedy = min(children, key=judge.rank)
            ranked = sorted(found, key=judge.rank)
            best = self._exchanged(judge, ranked[0])
            kept = list(dict.fromkeys([best, *ranked]))[: self.width]
            yield best

    def _exchanged(self, judge: Judge, best: Chosen) -> Chosen:
        for _ in range(self.exchanges if len(best) > 1 else 0):
            found = [best]
            for unit in best:
                found += _extended(judge, tuple(u for u in best if u != unit))
            new = min(found, key=judge.rank)
            if new == best:
                break
            best = new
        return best


def _extended(judge: Judge, parent: Chosen) -> list[Chosen]:
    """The sets of one unit more, all of them measured."""
    sets = [tuple(sorted((*parent, u))) for u in judge.units if u not in parent]
    if any(not judge.knows(chosen) for chosen in sets):
        judge.rebase(parent)
    for chosen in sets:
        judge.loss(chosen)
    return sets


def _first_of(order: list[int], num: int) -> Steps:
    for n in range(1, num + 1):
        yield tuple(sorted(order[:n]))


def _look(judge: Judge, reducer: Reducer, name: str) -> None:
    """Show the whole model's states to a reducer."""
    if judge.unit != "block":
        raise ConfigError(
            f"planner {name!r} compares states around blocks; for {judge.unit} use single, greedy or beam."
        )
    with torch.no_grad():
        for inputs in judge.batches:
            record(judge.model, inputs, judge.map, [reducer])


PLANNERS: dict[str, Planner] = {one.name: one for one in (Influence(), Angular(), Single(), Greedy(), Beam())}
"""All planners by name, the cheapest first."""


def planner_named(name: str) -> Planner:
    """Return a planner.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in PLANNERS:
        raise ConfigError(f"there is no planner {name!r}; expected one of {', '.join(PLANNERS)}.")
    return PLANNERS[name]
