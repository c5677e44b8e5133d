"""Break every block in turn, and measure what it does above and at the top."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mainstem.errors import ConfigError
from mainstem.intervene._damage import Clean, Damage, FloorDamage
from mainstem.intervene._passes import Entry, passes_of
from mainstem.intervene._tower import left_out
from mainstem.intervene.kinds import Intervention, Skip
from mainstem.measure import HostBatch, Result
from mainstem.observe import StreamMap
from mainstem.observe._frames import unwrapped

Break = Callable[[int], Intervention]
Inputs = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """What a sweep does.

    Attributes:
        broken: the intervention for a block, such as ``lambda b: Noise(blocks=[b], size=1.0)``. It may act at
            other blocks, or at several: where it begins is where its own ``blocks`` say. `left_out` when not
            given.
        floors: what ``broken`` is asked for, one number a break; every block when not given.
        future_only: measure only at positions beyond the last one that is broken (which must be named).
        together: how many breaks share one pass, each with rows of its own. More than 1 pays where a pass is
            so small that its overhead counts; the lowest block of a group is where all of them begin.
        restart: begin at the broken block, from the cached state, where the model allows it.
        states: measure the states above the break; else the top alone.
    """

    broken: Break | None = None
    floors: Sequence[int] | None = None
    future_only: bool = False
    together: int = 1
    restart: bool = True
    states: bool = True

    def __post_init__(self) -> None:
        if self.together < 1:
            raise ConfigError(f"together is {self.together}; it must be at least 1.")


@dataclasses.dataclass(frozen=True)
class SweepResult(Result):
    """What a sweep found.

    Attributes:
        floors: one entry a broken block, in order; after a cancel, those that were done, of all batches or of
            the first (their ``num_tokens`` says).
        finished: whether it ran to its end.
        num_passes: forward passes made, the whole model's included.
        restarted: whether they began at the broken block.
        why_not: why they did not; empty where they did.
    """

    floors: tuple[FloorDamage, ...]
    finished: bool
    num_passes: int
    restarted: bool
    why_not: str


@dataclasses.dataclass(frozen=True)
class SweepPlan(Result):
    """What a sweep will cost.

    Attributes:
        num_passes: forward passes, the whole model's included.
        block_runs: blocks that they run, each on one batch; ``naive_block_runs``: without restarting.
        seconds: expected, from one timed pass and one timed comparison; blocks and the rest counted apart.
        state_bytes: of the cached states of one batch; ``top_bytes``: of the whole model's prediction.
        restarts: whether passes begin at the broken block, and ``why_not``.
    """

    num_passes: int
    block_runs: int
    naive_block_runs: int
    seconds: float
    state_bytes: int
    top_bytes: int
    restarts: bool
    why_not: str

    def describe(self) -> str:
        """Return the plan for people."""
        where = "from the broken block" if self.restarts else f"in full, for {self.why_not}"
        return (
            f"{self.num_passes} passes {where}: {self.block_runs} block runs of {self.naive_block_runs}, "
            f"about {self.seconds:.1f} s; {(self.state_bytes + self.top_bytes) / 2**20:.0f} MiB held."
        )


def plan_sweep(
    model: nn.Module,
    batches: Sequence[Inputs],
    stream_map: StreamMap,
    config: SweepConfig | None = None,
) -> SweepPlan:
    """Say what `sweep` would cost, from one pass over the first batch.

    Raises:
        ConfigError: as `sweep`.
    """
    runner = _Runner(model, batches[0], stream_map, config or SweepConfig())
    begin = time.perf_counter()
    clean = runner.run_clean(batches[0])
    whole = time.perf_counter() - begin
    begin = time.perf_counter()
    runner.measure_itself(clean)
    measuring = time.perf_counter() - begin
    groups = runner.groups()
    num_blocks, blocks = len(stream_map.blocks), sum(runner.passes.seconds)
    runs, seconds = 0, whole
    for group in groups:
        first = min(runner.start(f) for f in group)
        runs += len(group) * (num_blocks - first)
        seconds += len(group) * (
            measuring + runner.model_seconds - blocks + sum(runner.passes.seconds[first:])
        )
    return SweepPlan(
        num_passes=len(batches) * (1 + len(groups)),
        block_runs=len(batches) * (num_blocks + runs),
        naive_block_runs=len(batches) * num_blocks * (1 + len(runner.floors)),
        seconds=len(batches) * seconds,
        state_bytes=runner.state_bytes(clean),
        top_bytes=0 if clean.top is None else clean.top.num_bytes,
        restarts=runner.restarts,
        why_not=runner.passes.why_not,
    )


def sweep(
    model: nn.Module,
    batches: Sequence[Inputs],
    stream_map: StreamMap,
    config: SweepConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SweepResult:
    """Break every block in turn, and measure the damage at every later state and at the top.

    A state of the stream is all that the blocks above it need, so each pass begins at the broken block, from
    the state that the whole model had there. Where a block is skipped, that state enters the next one.
    Figures are those of full passes under `intervening`, to the bit for ``together=1``.

    Args:
        model: in eval mode.
        batches: keyword arguments of its forward, one entry a batch.
        stream_map: from `mainstem.observe.find_stream`, or of a tower from `mainstem.observe.tower_map`.
        config: what to break; every block is left out when not given.
        progress: told of the passes done and of all passes.

    Returns:
        The figures; those found so far after a KeyboardInterrupt.

    Raises:
        ConfigError: the model is in training mode, or a break the model has no place for.
    """
    config = config or SweepConfig()
    runner = _Runner(model, batches[0], stream_map, config)
    groups, done, finished = runner.groups(), 0, True
    total = len(batches) * (1 + len(groups))
    try:
        for inputs in batches:
            clean = runner.run_clean(inputs)
            done += 1
            if progress is not None:
                progress(done, total)
            for group in groups:
                runner.run_broken(inputs, clean, group)
                done += 1
                if progress is not None:
                    progress(done, total)
    except KeyboardInterrupt:
        finished = False
    return SweepResult(
        floors=runner.damage.result(runner.floors),
        finished=finished,
        num_passes=done,
        restarted=runner.restarts,
        why_not=runner.passes.why_not,
    )


class _Runner:
    """Runs the passes of one sweep and adds up what they show."""

    def __init__(self, model: nn.Module, inputs: Inputs, stream_map: StreamMap, config: SweepConfig):
        self.model, self.map, self.config = unwrapped(model), stream_map, config
        if self.model.training:
            raise ConfigError("a sweep compares passes, so nothing may be random in them: call model.eval().")
        self.num_blocks = len(stream_map.blocks)
        floors = range(self.num_blocks) if config.floors is None else config.floors
        self.floors = sorted(set(floors))
        self.breaks = {f: self._break(f) for f in self.floors}
        self.damage, self.model_seconds = Damage(), 0.0
        self.passes = passes_of(self.model, stream_map, inputs, list(self.breaks.values()), config.restart)

    def _break(self, floor: int) -> Intervention:
        if self.config.broken is None:
            return left_out([floor], self.map)
        return self.config.broken(floor)

    @property
    def restarts(self) -> bool:
        """Whether passes begin at the broken block."""
        return not self.passes.why_not

    def groups(self) -> list[list[int]]:
        """The floors that share a pass."""
        n = self.config.together
        return [self.floors[i : i + n] for i in range(0, len(self.floors), n)]

    def start(self, floor: int) -> int:
        """The block at which the pass of a break begins."""
        if not self.restarts:
            return 0
        return self._lowest(floor) + self._passed_by(floor)

    def _lowest(self, floor: int) -> int:
        """The lowest block that a break acts at: the state that enters it is the whole model's."""
        return min(self.breaks[floor].blocks)

    def _first_changed(self, floor: int) -> int:
        """The first state above the break that the pass makes."""
        return max(self._lowest(floor) + 1, self.start(floor))

    def _passed_by(self, floor: int) -> int:
        """How many blocks, from the lowest on, the state only passes by."""
        one, lowest = self.breaks[floor], self._lowest(floor)
        if not isinstance(one, Skip) or (one.part, one.positions, one.rows) != ("block", None, None):
            return 0
        above = (n for n in range(lowest, self.num_blocks + 1) if n not in one.blocks)
        return next(above) - lowest

    def run_clean(self, inputs: Inputs) -> Clean:
        """Run the whole model and keep its states and prediction."""
        begin = time.perf_counter()
        states, output = self.passes.run_whole(inputs)
        self.model_seconds = time.perf_counter() - begin
        return Clean(states, self._logits(output), self.passes.batch(inputs))

    def state_bytes(self, clean: Clean) -> int:
        """Bytes held of one batch beside its prediction."""
        return self.passes.held_bytes() + sum(t.numel() * t.element_size() for t in clean.states.values())

    def measure_itself(self, clean: Clean) -> None:
        """Compare the whole model's prediction with itself, for the time it takes."""
        if clean.top is not None:
            clean.top.compare(clean.top.p)

    def run_broken(self, inputs: Inputs, clean: Clean, group: list[int]) -> None:
        """Run one pass for the breaks of a group, each on rows of its own."""
        num_rows = clean.states[0].shape[0]
        rows = {f: range(i * num_rows, (i + 1) * num_rows) for i, f in enumerate(group)}
        active = [one for f in group if (one := self._on_rows(f, rows[f])) is not None]
        hosts = {f: self._host(clean, f) for f in group}
        found = Damage()
        measured = group if self.config.states else []
        for floor in measured:  # between blocks that are passed over together
            for number in range(self._lowest(floor) + 1, self._first_changed(floor)):
                found.add_state(floor, number, clean.states[self._lowest(floor)], clean, hosts[floor])

        def see(number: int, state: Tensor) -> None:
            for floor in measured:
                if number >= self._first_changed(floor):
                    piece = state.detach()[rows[floor].start : rows[floor].stop]
                    found.add_state(floor, number, piece, clean, hosts[floor])

        entries: list[Entry] = []
        if self.restarts:
            entries = [Entry(rows[f], self._lowest(f), self.start(f)) for f in group]
        repeated = _repeated(inputs, num_rows, len(group))
        output = self.passes.run_broken(repeated, active, entries, see if measured else None)
        logits = self._logits(output)
        for floor in group:
            piece = None if logits is None else logits[rows[floor].start : rows[floor].stop]
            found.add_top(floor, piece, clean, hosts[floor], self._last_broken(floor))
        self.damage = self.damage.plus(found)

    def _on_rows(self, floor: int, rows: range) -> Intervention | None:
        """The break at its rows of the pass, without the blocks that are passed over; None for none."""
        one = self.breaks[floor]
        inside = one.rows
        chosen = rows if inside is None else range(rows.start + inside.start, rows.start + inside.stop)
        blocks = [b for b in one.blocks if b >= self.start(floor)]
        return dataclasses.replace(one, rows=chosen, blocks=blocks) if blocks else None

    def _last_broken(self, floor: int) -> int:
        """The last broken position, -1 where all are measured."""
        if not self.config.future_only:
            return -1
        positions = self.breaks[floor].positions
        if not positions or min(positions) < 0:
            raise ConfigError(
                "future_only needs breaks at named positions, counted from 0, such as positions=[5]."
            )
        return max(positions)

    def _host(self, clean: Clean, floor: int) -> HostBatch:
        """The tokens that are measured."""
        if not clean.batch.mask.numel():
            raise ConfigError("a sweep needs inputs with token ids or a mask, which say what is a token.")
        host, after = clean.batch.host, self._last_broken(floor)
        if after < 0:
            return host
        num_positions = clean.batch.mask.shape[1]
        rest, first = (places[places % num_positions > after] for places in (host.rest, host.first))
        return dataclasses.replace(host, rest=rest, first=first)

    def _logits(self, output: Any) -> Tensor | None:
        return logits_of(self.map, output)


def logits_of(stream_map: StreamMap, output: Any) -> Tensor | None:
    """Return the prediction ``[batch, pos, vocab]`` of a pass; None for a model that makes none."""
    if stream_map.output == "last_hidden_state":
        return None
    found = output[stream_map.output] if isinstance(output, Mapping) else output
    found = found[0] if isinstance(found, tuple | list) else getattr(found, "logits", found)
    return found if isinstance(found, Tensor) and found.ndim == 3 else None


def _repeated(inputs: Inputs, num_rows: int, times: int) -> dict[str, Any]:
    """Give every break its copy of the batch."""
    if times == 1:
        return dict(inputs)
    return {
        name: value.repeat(times, *[1] * (value.ndim - 1))
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == num_rows
        else value
        for name, value in inputs.items()
    }
