"""Remove the units that a planner names, and say what that costs on text that no planner has seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from mainstem.errors import ConfigError
from mainstem.intervene import Skip, SweepConfig, sweep
from mainstem.measure import LargestActivations, Result
from mainstem.observe import StreamMap, find_stream, record
from mainstem.sources import LoadedModel, Windows, load_model, load_text, make_windows, versions
from mainstem.surgery._speed import measure_sizes, reading_ratio
from mainstem.surgery.cut import Cut, cut
from mainstem.surgery.judge import PARTS, Judge, Unit
from mainstem.surgery.planners import PLANNERS, Chosen, Planner, make_plan, planner_named
from mainstem.surgery.save import Origin

OUTLIER_JUMP = 3.0
"""A block creates (erases) an outlier where the largest ``|h|`` grows (shrinks) by this factor over it."""

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """What to remove, how to choose it, and what to judge it on. Exactly one of the three goals is given.

    Attributes:
        model: as `mainstem.sources.load_model` takes it.
        text: calibration; planners see it. As `mainstem.sources.load_text` takes it.
        eval_text: held out; no planner sees it, but for ``loss_budget``, which is kept on it.
        num: units to remove.
        loss_budget: nats a token that the held-out loss may rise; the planner goes on until it is above.
        speed_up: how many times faster forward passes must become; whole blocks only.
        planner: whose choice is taken; ``planners``: whose curves are drawn besides.
        unit: ``"block"``, ``"attention"``, ``"feed_forward"``.
        tokens, eval_tokens, window, batch_size, first_token: as `mainstem.sources.make_windows` takes them.
        cache_bytes: most bytes of held states, calibration and held out together.
        rounds: rounds of timing.
        dtype, revision, trust_remote_code: as `mainstem.sources.load_model` takes them.

    Raises:
        ConfigError: none or several goals, one that cannot be met, or an unknown planner or unit.
    """

    model: str
    text: str
    eval_text: str
    num: int | None = None
    loss_budget: float | None = None
    speed_up: float | None = None
    planner: str = "beam"
    planners: tuple[str, ...] = tuple(PLANNERS)
    unit: Unit = "block"
    tokens: int | None = 2048
    eval_tokens: int | None = 2048
    window: int = 256
    batch_size: int = 8
    first_token: str = "none"
    cache_bytes: int = 4 * 2**30
    rounds: int = 5
    dtype: str = "float32"
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        goals = [name for name in ("num", "loss_budget", "speed_up") if getattr(self, name) is not None]
        if len(goals) != 1:
            raise ConfigError(
                f"{len(goals)} goals were given; expected exactly one of a number of blocks, a loss budget "
                "and a speed-up."
            )
        if self.loss_budget is not None and not self.loss_budget > 0:
            raise ConfigError(f"the loss budget is {self.loss_budget}; expected nats a token above 0.")
        if self.speed_up is not None and not self.speed_up > 1:
            raise ConfigError(f"the speed-up is {self.speed_up}; expected a factor above 1, such as 1.3.")
        if self.unit not in PARTS:
            raise ConfigError(f"unit is {self.unit!r}; expected one of {', '.join(PARTS)}.")
        if self.speed_up is not None and self.unit != "block":
            raise ConfigError(
                f"a model without single sublayers ({self.unit}) is not faster as it is saved; ask for a "
                "number or a loss budget, or remove blocks."
            )
        if self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds}; expected at least 1.")
        for name in (self.planner, *self.planners):
            planner_named(name)
        if self.unit != "block" and self.planner in _OF_BLOCKS:
            raise ConfigError(
                f"the planner {self.planner!r} chooses whole blocks; use single, greedy or beam."
            )

    @property
    def others(self) -> tuple[Planner, ...]:
        """The planners whose curves are drawn besides."""
        names = (n for n in self.planners if self.unit == "block" or n not in _OF_BLOCKS)
        return tuple(PLANNERS[n] for n in dict.fromkeys(names) if n != self.planner)


_OF_BLOCKS = ("influence", "angular")


@dataclasses.dataclass(frozen=True)
class Point(Result):
    """One removal: numbers of the units; nats a token more than the whole model loses on either text."""

    removed: Chosen
    calibration: float
    held_out: float


@dataclasses.dataclass(frozen=True)
class Curve(Result):
    """One planner's removals of 0, 1, 2, ... units, and whether it came to the last."""

    planner: str
    points: tuple[Point, ...]
    finished: bool


@dataclasses.dataclass(frozen=True)
class Outlier(Result):
    """A block over which the largest ``|h|`` jumps: ``what`` is ``"creates"`` or ``"erases"``."""

    block: int
    what: str
    before: float
    after: float


@dataclasses.dataclass(frozen=True)
class Outlook(Result):
    """What planning will cost at most, said before it begins.

    Attributes:
        passes: forward passes by planner, over all batches.
        seconds: for all of them, were each a full pass: those that begin midway take less.
        held_bytes: of the states of both texts that are held.
    """

    passes: dict[str, int]
    seconds: float
    held_bytes: int

    def describe(self) -> str:
        """Return it for people."""
        each = ", ".join(f"{name} {count}" for name, count in self.passes.items())
        return (
            f"at most {sum(self.passes.values())} forward passes ({each}), {self.seconds / 60:.1f} minutes "
            f"were all of them full; {self.held_bytes / 2**20:.0f} MiB of states held"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruning:
    """A shorter model, not yet saved.

    Attributes:
        model: in eval mode; shares memory with the whole one. None where the planner was interrupted before
            it had an answer.
        tokenizer: the whole model's.
        origin: what `mainstem.surgery.save_pruned` is told of where it comes from.
        record: what ``prune.json`` will say besides.
    """

    model: Any
    tokenizer: Any
    origin: Origin
    record: dict[str, Any]


def prune(
    config: PruneConfig,
    progress: Progress | None = None,
    on_outlook: Callable[[Outlook], None] | None = None,
) -> Pruning:
    """Load a model, plan what to remove, judge every plan on held-out text, and cut.

    Args:
        config: what to do.
        progress: told what is done, how many steps of it, and of how many.
        on_outlook: told, before planning, what it costs at most.

    Raises:
        ConfigError: a goal that cannot be met, a model that is not causal or cannot be cut.
        SourceError: the model or a text cannot be had.
    """
    return _Work(config, progress or _silent).run(on_outlook)


class _Work:
    """One pruning, from the texts to the cut model."""

    def __init__(self, config: PruneConfig, progress: Progress):
        self.config, self.progress = config, progress
        progress("loading", 0, 1)
        self.loaded = _loaded(config)
        self.model = self.loaded.model
        self.windows = {
            "calibration": self._windows(config.text, config.tokens),
            "held_out": self._windows(config.eval_text, config.eval_tokens),
        }
        batches = {name: self._batches(windows) for name, windows in self.windows.items()}
        self.map: StreamMap = find_stream(self.model, batches["calibration"][0])
        self.depth = len(self.map.blocks)
        if self.depth < 2:
            raise ConfigError(f"{config.model} has {self.depth} block; there is none that can go.")
        self._cut((0,))  # a model that cannot be cut is refused before the work
        self.calibration, self.held_out = (
            Judge(self.model, batches[name], self.map, config.unit, config.cache_bytes // 2)
            for name in ("calibration", "held_out")
        )
        if config.num is not None and not 1 <= config.num < len(self.calibration.units):
            raise ConfigError(
                f"asked to remove {config.num} of {len(self.calibration.units)} units ({config.unit}); "
                f"expected 1 to {len(self.calibration.units) - 1}."
            )

    def run(self, on_outlook: Callable[[Outlook], None] | None) -> Pruning:
        """Plan, judge, cut, measure."""
        config = self.config
        outlook, outliers = self._outlook(), self._outliers()
        if on_outlook is not None:
            on_outlook(outlook)
        main = self._chosen_curve()
        num = len(main.points) - 1
        curves = [main]
        for planner in config.others if main.finished and num else ():
            plan = make_plan(planner, self.calibration, num, self._told(planner.name))
            curves.append(self._curve(planner.name, plan.sets, plan.finished))
            if not plan.finished:
                break
        finished = all(curve.finished for curve in curves)
        removed = main.points[-1].removed
        says: dict[str, Any] = {
            "planner": config.planner,
            "unit": config.unit,
            "goal": {"num": config.num, "loss_budget": config.loss_budget, "speed_up": config.speed_up},
            "finished": finished,
            "model": self.loaded.provenance,
            "texts": {name: windows.provenance for name, windows in self.windows.items()},
            "warnings": list(self._warnings(removed, outliers)),
            "outliers": [one.to_dict() for one in outliers],
            "curves": [curve.to_dict() for curve in curves],
            "outlook": outlook.to_dict(),
            "cost": self.calibration.cost.to_dict(),
            "made_with": versions("mainstem", "torch", "transformers"),
        }
        shorter = None
        if finished:
            shorter = self._cut(removed)
            says |= {"loss": self._losses(removed), "size": self._sizes(shorter, len(removed))}
        what = Origin(source=config.model, num_blocks=self.depth, what=self._what(removed))
        return Pruning(model=shorter, tokenizer=self.loaded.tokenizer, origin=what, record=says)

    # ---- before ----

    def _windows(self, text: str, tokens: int | None) -> Windows:
        c = self.config
        options: dict[str, Any] = {
            "window": c.window,
            "batch_size": c.batch_size,
            "first_token": c.first_token,
        }
        return make_windows(self.loaded.tokenizer, load_text(text), num_tokens=tokens, **options)

    def _batches(self, windows: Windows) -> list[dict[str, Any]]:
        device = next(self.model.parameters()).device
        return [
            {name: value.to(device) for name, value in batch.inputs_for(self.model).items()}
            for batch in windows
        ]

    def _outlook(self) -> Outlook:
        for judge in (self.calibration, self.held_out):
            judge.loss(())
        num = self.config.num or len(self.calibration.units) - 1
        planners = (planner_named(self.config.planner), *self.config.others)
        times = len(self.calibration.batches)
        passes = {p.name: times * p.most_passes(len(self.calibration.units), num) for p in planners}
        seconds = sum(passes.values()) * self.calibration.cost.seconds / times
        return Outlook(passes, seconds, self.calibration.held_bytes + self.held_out.held_bytes)

    def _outliers(self) -> tuple[Outlier, ...]:
        reducer = LargestActivations()
        with torch.no_grad():
            for inputs in self.calibration.batches:
                record(self.model, inputs, self.map, [reducer])
        sizes = [abs(s.largest.value) if s.largest else 0.0 for s in reducer.result().states]
        found: list[Outlier] = []
        for block in range(self.depth):
            before, after = sizes[block], sizes[block + 1]
            if after >= OUTLIER_JUMP * before or before >= OUTLIER_JUMP * after:
                found.append(Outlier(block, "creates" if after > before else "erases", before, after))
        return tuple(found)

    # ---- planning ----

    def _chosen_curve(self) -> Curve:
        """The curve of the planner whose choice is taken, up to the goal."""
        config, planner = self.config, planner_named(self.config.planner)
        if config.num is not None:
            plan = make_plan(planner, self.calibration, config.num, self._told(planner.name))
            return self._curve(planner.name, plan.sets, plan.finished)
        sets: list[Chosen] = [()]
        most = len(self.calibration.units) - 1
        met = False
        try:
            for chosen in planner.steps(self.calibration, most):
                self._told(planner.name)(len(chosen), most)
                if config.loss_budget is not None and self._point(chosen).held_out > config.loss_budget:
                    met = True
                    break
                sets.append(chosen)
                if config.speed_up is not None and self._is_fast_enough(chosen):
                    met = True
                    break
        except KeyboardInterrupt:
            return self._curve(planner.name, tuple(sets), finished=False)
        if len(sets) == 1:
            raise ConfigError(
                f"the first {config.unit} that {planner.name} removes costs more than {config.loss_budget} "
                "nats on held-out text; give a larger budget."
            )
        if config.speed_up is not None and not met:
            raise ConfigError(
                f"one block alone is not {config.speed_up} times as fast as all {self.depth}; ask for less."
            )
        return self._curve(planner.name, tuple(sets), finished=True)

    def _is_fast_enough(self, chosen: Chosen) -> bool:
        goal = self.config.speed_up
        assert goal is not None
        if self.depth / (self.depth - len(chosen)) < goal:  # the rest of the model takes time too
            return False
        shorter = self._cut(chosen)
        return reading_ratio(self.model, shorter, self.held_out.batches[0], self.config.rounds) >= goal

    def _told(self, name: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(f"planning: {name}", done, total)

    def _curve(self, name: str, sets: tuple[Chosen, ...], finished: bool) -> Curve:
        points: list[Point] = []
        try:
            for chosen in sets:
                points.append(self._point(chosen))
        except KeyboardInterrupt:
            finished = False
        return Curve(name, tuple(points), finished)

    def _point(self, chosen: Chosen) -> Point:
        calibration, held_out = (j.loss(chosen) - j.loss(()) for j in (self.calibration, self.held_out))
        return Point(chosen, calibration, held_out)

    # ---- after ----

    def _what(self, removed: Chosen) -> Cut:
        name = "blocks" if self.config.unit == "block" else self.config.unit
        return Cut(**{name: removed})

    def _cut(self, removed: Chosen) -> Any:
        return cut(self.model, self._what(removed))

    def _losses(self, removed: Chosen) -> dict[str, Any]:
        """Both texts' losses; KL and top-1 on the held-out one."""
        self.progress("judging on held-out text", 0, 1)
        skip = Skip(blocks=removed, part=PARTS[self.config.unit])
        how = SweepConfig(broken=lambda _: skip, floors=[0], states=False)
        (found,) = sweep(self.model, self.held_out.batches, self.map, how).floors
        both = {"calibration": self.calibration, "held_out": self.held_out}
        losses: dict[str, Any] = {
            name: {"before": judge.loss(()), "after": judge.loss(removed)} for name, judge in both.items()
        }
        losses["held_out"] |= {"kl": found.kl.all, "top1": found.top1.all, "num_tokens": found.num_tokens}
        return losses

    def _sizes(self, shorter: Any, num: int) -> dict[str, Any]:
        self.progress("measuring speed", 0, 1)
        depths = {"before": self.depth, "after": self.depth - (num if self.config.unit == "block" else 0)}
        models = {"before": self.model, "after": shorter}
        sizes = measure_sizes(models, self.held_out.batches[0], depths, self.config.rounds)
        return {name: size.to_dict() for name, size in sizes.items()}

    def _warnings(self, removed: Chosen, outliers: tuple[Outlier, ...]) -> Iterator[str]:
        rows = {
            name: {tuple(cast(list[int], row.tolist())) for row in w.token_ids.split(w.step)}
            for name, w in self.windows.items()
        }
        if same := len(rows["calibration"] & rows["held_out"]):
            yield (
                f"{same} of {len(rows['held_out'])} held-out windows are in the calibration text too: the "
                "held-out figures are not held out."
            )
        for one in outliers:
            if one.block in removed:
                yield (
                    f"block {one.block} {one.what} an outlier (largest activation {one.before:.0f} -> "
                    f"{one.after:.0f}) and is among those removed."
                )
        if self.calibration.why_not:
            yield f"every pass was a full one, for {self.calibration.why_not}."


def _loaded(config: PruneConfig) -> LoadedModel:
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    if (kind := loaded.provenance["kind"]) != "causal":
        raise ConfigError(
            f"{config.model} is a model of kind {kind}, which has no next-token loss to judge a removal by; "
            "give a causal language model."
        )
    return loaded


def _silent(what: str, done: int, total: int) -> None:
    """For who asks for no progress."""
