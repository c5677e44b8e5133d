"""The measured loss of a model without some of its blocks or sublayers, from cached states."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mainstem.errors import ConfigError
from mainstem.intervene import Skip
from mainstem.intervene._doors import Doors, NoDoorsError
from mainstem.intervene._mode import InterveneMode
from mainstem.intervene.sweep import logits_of
from mainstem.measure import LossSums, Result, next_token_loss
from mainstem.observe import StreamMap, batch_of
from mainstem.observe._frames import unwrapped

Unit = Literal["block", "attention", "feed_forward"]
PARTS: Mapping[str, str] = {"block": "block", "attention": "attn", "feed_forward": "mlp"}
"""What may be removed, and the part of an intervention that leaves it out."""


@dataclasses.dataclass(frozen=True)
class Cost(Result):
    """What measuring has cost so far.

    Attributes:
        num_sets: different sets of units that were measured, the whole model among them.
        num_passes: forward passes, each over one batch; those that only renew the cached states are among
            them.
        block_runs: blocks that they ran, each on one batch.
        naive_block_runs: the same sets, each run from the bottom without its skipped blocks.
        seconds: on the wall; ``cpu_seconds``: of the process.
    """

    num_sets: int
    num_passes: int
    block_runs: int
    naive_block_runs: int
    seconds: float
    cpu_seconds: float


class Judge:
    """Measures what a causal model's next-token loss is without some of its units.

    A unit is a block, or one sublayer of it, and has the block's number. The states of one model, the *base*
    (the whole one at first), are held at the entries of the blocks. The pass of another set begins at the
    lowest block at which that set and the base differ, from the state held there; below, both are the same.
    A skipped block does not run. Losses are to the bit those of full passes and of the model that is really
    cut, for both make the same calls.

    Args:
        model: in eval mode.
        batches: keyword arguments of its forward, one entry a batch.
        stream_map: from `mainstem.observe.find_stream`.
        unit: what is removed.
        cache_bytes: most bytes that held states may take. Where all states need more, every second, third and
            so on is held, and passes begin at the next lower one.

    Raises:
        ConfigError: no batch, an unknown unit, a model in training mode, or one without such units.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Mapping[str, Any]],
        stream_map: StreamMap,
        unit: Unit = "block",
        cache_bytes: int = 2 * 2**30,
    ):
        if unit not in PARTS:
            raise ConfigError(f"unit is {unit!r}; expected one of {', '.join(PARTS)}.")
        if not batches:
            raise ConfigError("no batch was given to measure the loss on; give at least one.")
        if model.training:
            raise ConfigError("losses are compared, so nothing may be random: call model.eval().")
        self.model, self.map, self.unit, self.cache_bytes = unwrapped(model), stream_map, unit, cache_bytes
        self.batches = list(batches)
        self.num_blocks = len(stream_map.blocks)
        self.units = _units(stream_map, unit)
        self.why_not = ""
        try:
            self._doors: Doors | None = Doors(self.model, stream_map, self.batches[0])
        except NoDoorsError as reason:
            self._doors, self.why_not = None, str(reason)
        self._base: frozenset[int] | None = None
        self._states: list[dict[int, Tensor]] = [{} for _ in self.batches]
        self._known: dict[frozenset[int], LossSums] = {}
        self._passes = self._runs = self._naive_runs = 0
        self._seconds = self._cpu_seconds = 0.0

    @property
    def cost(self) -> Cost:
        """What it has cost so far; a set asked for again costs nothing."""
        counts = (len(self._known), self._passes, self._runs, self._naive_runs)
        return Cost(*counts, self._seconds, self._cpu_seconds)

    @property
    def held_bytes(self) -> int:
        """Bytes of the states that are held."""
        return sum(t.numel() * t.element_size() for states in self._states for t in states.values())

    def loss(self, skipped: Iterable[int] = ()) -> float:
        """Return the mean next-token loss without these units, nats a token.

        Raises:
            ConfigError: a unit that the model does not have, or a model that predicts nothing.
        """
        chosen = self._chosen(skipped)
        if chosen not in self._known:
            if self._base is None:
                self.rebase(())
            if chosen not in self._known:
                self._measure(chosen, keep=False)
        return self._known[chosen].nll

    def knows(self, skipped: Iterable[int]) -> bool:
        """Return whether this set's loss was measured already."""
        return frozenset(skipped) in self._known

    def rank(self, skipped: Iterable[int]) -> tuple[float, tuple[int, ...]]:
        """Return what sets are ordered by: the loss, one that is no number last, then the units' numbers."""
        chosen = tuple(sorted(skipped))
        loss = self.loss(chosen)
        return (math.inf if math.isnan(loss) else loss, chosen)

    def rebase(self, skipped: Iterable[int]) -> None:
        """Hold the states of the model without these units: sets that add to them begin where they add."""
        chosen = self._chosen(skipped)
        if chosen == self._base or (self._doors is None and chosen in self._known):
            return
        try:
            self._measure(chosen, keep=True)
        except BaseException:  # some states are the new base's, some the old one's
            self._base, self._states = None, [{} for _ in self.batches]
            raise
        self._base = chosen

    def _chosen(self, skipped: Iterable[int]) -> frozenset[int]:
        chosen = frozenset(skipped)
        if unknown := sorted(chosen - set(self.units)):
            raise ConfigError(
                f"{self.unit} {', '.join(map(str, unknown))} is not one of the model's, which are "
                f"{', '.join(map(str, self.units))}."
            )
        return chosen

    def _measure(self, chosen: frozenset[int], keep: bool) -> None:
        begin, cpu = time.perf_counter(), time.process_time()
        total = LossSums()
        for inputs, states in zip(self.batches, self._states, strict=True):
            total += self._run(inputs, chosen, states, keep)
        away = len(chosen) if self.unit == "block" else 0
        if chosen not in self._known:
            self._naive_runs += len(self.batches) * (self.num_blocks - away)
        self._known[chosen] = total
        self._seconds += time.perf_counter() - begin
        self._cpu_seconds += time.process_time() - cpu

    def _run(
        self, inputs: Mapping[str, Any], chosen: frozenset[int], states: dict[int, Tensor], keep: bool
    ) -> LossSums:
        first = self._first(chosen, states)
        batch = batch_of(inputs)
        if batch.token_ids is None:
            raise ConfigError("the loss needs inputs with token ids; give batches that have input_ids.")

        def on_state(number: int, state: Tensor) -> None:
            if keep and number < self.num_blocks and number % self._stride(state, batch.mask) == 0:
                states[number] = state.detach().clone()  # a block may change it in place

        with ExitStack() as stack:
            for one in (torch.no_grad(), torch.compiler.set_stance("force_eager")):
                stack.enter_context(one)
            self._leave_out(stack, chosen, first, states, on_state)
            output = self.model(**inputs)
        logits = logits_of(self.map, output)
        if logits is None:
            raise ConfigError(
                f"{type(self.model).__name__} makes no prediction of tokens, so no loss can judge what is "
                "removed; give a causal language model."
            )
        whole = len([b for b in chosen if b >= first]) if self.unit == "block" and self._doors else 0
        self._passes += 1
        self._runs += self.num_blocks - first - whole
        return next_token_loss(logits, batch.token_ids, batch.mask)

    def _leave_out(
        self,
        stack: ExitStack,
        chosen: frozenset[int],
        first: int,
        states: dict[int, Tensor],
        on_state: Callable[[int, Tensor], None],
    ) -> None:
        """Have the pass begin at ``first``, without the chosen units."""
        by_doors = self.unit == "block" and self._doors is not None
        active = [] if by_doors else sorted(b for b in chosen if b >= first)
        mode = None
        if active:
            mode = InterveneMode(self.model, self.map, [Skip(blocks=active, part=PARTS[self.unit])])
            mode.allow_missing(range(first))
            stack.enter_context(mode.tracker)
            stack.enter_context(mode)
        if self._doors is None:
            return
        entered = states.get(first)
        entries = {} if entered is None or first == 0 else {first: [(range(entered.shape[0]), entered)]}

        def see(number: int, state: Tensor) -> None:
            if mode is not None and number < self.num_blocks:
                mode.note_entry(number, state)
            on_state(number, state)

        skipped = chosen if by_doors else ()
        stack.enter_context(self._doors.passing(first, entries, see, skipped=skipped))

    def _first(self, chosen: frozenset[int], states: Mapping[int, Tensor]) -> int:
        """The block to begin at: the highest held state that this set and the base have in common."""
        if self._doors is None or self._base is None:
            return 0
        apart = min(chosen ^ self._base, default=self.num_blocks)
        return max((n for n in states if n <= apart), default=0)

    def _stride(self, state: Tensor, mask: Tensor) -> int:
        """Hold the state at every how manieth block."""
        num_tokens = sum(batch_of(inputs).mask.numel() for inputs in self.batches)
        size = state.numel() * state.element_size() // mask.numel() * num_tokens
        allowed = self.cache_bytes // size
        return math.ceil((self.num_blocks - 1) / allowed) if allowed else self.num_blocks


def _units(stream_map: StreamMap, unit: Unit) -> tuple[int, ...]:
    """The blocks that have such a unit."""
    part = PARTS[unit]
    found = tuple(
        block.index
        for block in stream_map.blocks
        if part == "block"
        or any(w.kind == part for s in stream_map.sites[block.first_site : block.end_site] for w in s.writes)
    )
    if not found:
        raise ConfigError(
            f"no block of the model has a sublayer of its own that is {unit}; use unit='block'."
        )
    return found
