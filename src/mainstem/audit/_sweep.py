"""What an audit finds by skipping blocks: the damage of each, and what removing several together costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mainstem.audit._placement import device_of
from mainstem.audit._provenance import speaks
from mainstem.audit.config import AuditConfig
from mainstem.audit.result import BlockDamage, Damage, RemovalPlan
from mainstem.errors import MainstemError
from mainstem.intervene import FloorDamage, SweepConfig, plan_sweep, removal_loss, sweep
from mainstem.measure import AngularDistanceResult, BlockInfluenceResult
from mainstem.observe import StreamMap, TowerMap
from mainstem.sources import WindowBatch

Tell = Callable[[str, int, int], None]


@dataclasses.dataclass
class Swept:
    """What was found, None where it was not asked for or is not to be had; ``notes`` say why."""

    damage: Damage | None = None
    notes: list[str] = dataclasses.field(default_factory=list[str])


@dataclasses.dataclass(frozen=True)
class Skips:
    """Skips the blocks of one model on the first windows of a text.

    Attributes:
        model: as it was loaded, and its ``kind``: only a causal one has a loss of the next token.
        inputs_of: from windows to the model's arguments; ``map_for``: to the stream's map.
    """

    model: Any
    kind: str
    config: AuditConfig
    inputs_of: Callable[[WindowBatch], dict[str, Any]]
    map_for: Callable[[WindowBatch], StreamMap]
    tell: Tell

    def run(self, windows: Iterable[WindowBatch], scores: Mapping[str, Any]) -> Swept:
        """Sweep, where the config asks for it.

        Args:
            windows: of the text, from its beginning.
            scores: results of the reducers by name; the cheap scores of removal are among them.
        """
        if not self.config.sweeps:
            return Swept()
        try:
            return self._run(windows, scores)
        except MainstemError as error:
            return Swept(notes=[f"damage is null: {error}"])

    def _run(self, windows: Iterable[WindowBatch], scores: Mapping[str, Any]) -> Swept:
        taken, stream_map = self._take(windows)
        batches = [self.inputs_of(window) for window in taken]
        num_blocks = len(stream_map.blocks)
        plan = plan_sweep(self.model, batches, stream_map)
        self.tell(f"skipping every block in turn: {plan.describe()}", 0, plan.num_passes)
        found = sweep(
            self.model,
            batches,
            stream_map,
            SweepConfig(),
            lambda done, total: self.tell(f"skipping blocks, about {plan.seconds:.0f} s", done, total),
        )
        swept = Swept()
        silenced = isinstance(stream_map, TowerMap) and stream_map.has_history
        if silenced:
            swept.notes.append(
                "damage: to leave a block out its sublayers were made to write nothing, 0 for what they "
                "worked out; the stream cannot pass it by, for it is a history, which later blocks read by "
                "place"
            )
        if not found.finished:
            swept.notes.append(
                f"the sweep was stopped after {found.num_passes} of {plan.num_passes} passes: damage is of "
                "what was done"
            )
        if not found.restarted:
            swept.notes.append(f"the sweep ran every pass in full: {found.why_not}")
        losses = self.kind == "causal" and speaks(stream_map)
        if not losses:
            swept.notes.append("damage has no loss: there is no loss of a next token")
        blocks = tuple(_block(one, num_blocks, losses) for one in found.floors)
        plans = self._plans(batches, stream_map, blocks, scores) if found.finished and losses else ()
        cost = {b.block: b.kl if b.removal_loss is None else b.removal_loss for b in blocks}
        influence: BlockInfluenceResult = scores["block_influence"]
        angles: AngularDistanceResult = scores["angular_distances"]
        swept.damage = Damage(
            windows=sum(len(window.input_ids) for window in taken),
            tokens=sum(int(window.attention_mask.sum()) for window in taken),
            passes=found.num_passes,
            finished=found.finished,
            restarted=found.restarted,
            blocks=blocks,
            influence_correlation=rank_correlation(
                [influence.blocks[b].influence.rest for b in cost], list(cost.values())
            ),
            angle_correlation=rank_correlation([angles.distances[0][b] for b in cost], list(cost.values())),
            plans=plans,
            silenced=silenced,
        )
        return swept

    def _take(self, windows: Iterable[WindowBatch]) -> tuple[list[WindowBatch], StreamMap]:
        """The first windows, as many as there is a map of their kind for."""
        taken: list[WindowBatch] = []
        left, first = self.config.sweep_windows, None
        for window in windows:
            some = dataclasses.replace(
                window,
                input_ids=window.input_ids[:left],
                attention_mask=window.attention_mask[:left],
                position_ids=window.position_ids[:left],
            ).to(device_of(self.model))
            found = self.map_for(some)
            first = first or found
            if found is first:
                taken.append(some)
                left -= len(some.input_ids)
            if left <= 0 or found is not first:
                break
        assert first is not None
        return taken, first

    def _plans(
        self,
        batches: Sequence[Mapping[str, Any]],
        stream_map: StreamMap,
        blocks: Sequence[BlockDamage],
        scores: Mapping[str, Any],
    ) -> tuple[RemovalPlan, ...]:
        """Remove a tenth of the blocks, at least two of at least six, as each score would choose them."""
        num_blocks = len(blocks)
        count = max(2, num_blocks // 10)
        if num_blocks < 6:
            return ()
        influence: BlockInfluenceResult = scores["block_influence"]
        angles: AngularDistanceResult = scores["angular_distances"]
        start = angles.best_start(count)
        chosen = {
            "block_influence": _least([b.influence.rest for b in influence.blocks], count),
            "angular_distance": tuple(range(start, start + count)),
            "removal_loss": _least([_or_nan(b.removal_loss) for b in blocks], count),
        }
        found = removal_loss(
            self.model,
            batches,
            stream_map,
            list(chosen.values()),
            lambda done, total: self.tell(f"removing {count} blocks together", done, total),
        )
        return tuple(
            RemovalPlan(
                score=score,
                blocks=one.blocks,
                removal_loss=one.nll_delta,
                kl=one.kl.all,
                top1=one.top1.all,
            )
            for score, one in zip(chosen, found, strict=False)
        )


def _block(one: FloorDamage, num_blocks: int, losses: bool) -> BlockDamage:
    assert one.states[-1].state == num_blocks
    return BlockDamage(
        block=one.floor,
        removal_loss=one.nll_delta if losses else None,
        kl=one.kl.all,
        top1=one.top1.all,
        change=[state.change.rest for state in one.states],
        cosine=[state.cosine.rest for state in one.states],
    )


def _least(values: Sequence[float], count: int) -> tuple[int, ...]:
    order = sorted(range(len(values)), key=lambda i: values[i] if math.isfinite(values[i]) else math.inf)
    return tuple(sorted(order[:count]))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, ties at the mean of their ranks.

    None for fewer than 3 values, where one is not finite, or where all of a side are the same.
    """
    values = np.array([x, y], dtype=np.float64)
    if values.shape[1] < 3 or not np.isfinite(values).all():
        return None
    below = (values[:, None, :] < values[:, :, None]).sum(-1)
    ties = (values[:, None, :] == values[:, :, None]).sum(-1)
    ranks = below + (ties - 1) / 2
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    norms = np.sqrt((centred**2).sum(axis=1))
    return float(centred[0] @ centred[1] / norms.prod()) if norms.all() else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
