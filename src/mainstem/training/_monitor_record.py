"""From the sums of a step to its record, and from the record to what a logger gets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mainstem.training._monitor_file import SCHEMA_VERSION
from mainstem.training._monitor_sums import StepSums
from mainstem.training._monitor_watch import Layout
from mainstem.training._non_finite import NonFiniteSite


class Snapshot:
    """The trained parameters before an update, kept until it is done.

    Args:
        model: whose parameters.
        blocks: paths of its blocks; what belongs to none of them is counted together.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str]):
        numbers = {path: number for number, path in enumerate(blocks)}
        self.num_blocks = len(numbers)
        self._kept: list[tuple[int, nn.Parameter, Tensor]] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parts = name.split(".")
                owners = (numbers.get(".".join(parts[:i])) for i in range(len(parts)))
                block = next((number for number in owners if number is not None), -1)
                self._kept.append((block, parameter, parameter.detach().clone()))

    def ratios(self) -> tuple[list[float], float]:
        """Return ``|change| / |parameters before|`` of each block, and of all outside the blocks; let go.

        NaN where nothing is trained.
        """
        norms: list[Tensor] = []
        for _, parameter, before in self._kept:
            norms += [_norm(parameter.detach() - before), _norm(before)]
        squares = [norm**2 for norm in _together(norms)]
        changed, size = [0.0] * (self.num_blocks + 1), [0.0] * (self.num_blocks + 1)
        for i, (block, _, _) in enumerate(self._kept):
            changed[block] += squares[2 * i]  # -1, outside, is the last place
            size[block] += squares[2 * i + 1]
        self._kept = []
        ratios = [math.sqrt(c / s) if s > 0 else math.nan for c, s in zip(changed, size, strict=True)]
        return ratios[:-1], ratios[-1]


def _norm(t: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _together(tensors: list[Tensor]) -> list[float]:
    if not tensors:
        return []
    return torch.stack([t.to(tensors[0].device, non_blocking=True) for t in tensors]).tolist()


def make_record(
    step: int,
    layout: Layout,
    sums: StepSums,
    updates: tuple[list[float], float],
    *,
    ranks: int,
    skipped: bool,
) -> dict[str, Any]:
    """Return the record of one step; `StreamMonitor` says what its entries mean."""
    states = sorted(sums.states)
    writes = sorted(sums.writes)
    bad = first_bad(layout, sums)
    return {
        "schema": SCHEMA_VERSION,
        "step": step,
        "source": layout.source,
        "num_blocks": len(layout.blocks),
        "tokens": sums.tokens,
        "passes": sums.passes,
        "ranks": ranks,
        "skipped": skipped,
        "state_block": [-1 if state == 0 else layout.site_blocks[state - 1] for state in states],
        "stream_rms": [_finite(sums.rms(state)) for state in states],
        "stream_largest": [_finite(sums.peaks[state].value) for state in states],
        "outlier_ratio": [_finite(sums.outlier(state)) for state in states],
        "outlier_position": [sums.peaks[state].position for state in states],
        "outlier_channel": [sums.peaks[state].channel for state in states],
        "outlier_stream": [sums.peaks[state].stream for state in states],
        "gradient_norm": [_finite(sums.gradient(state)) for state in states],
        "write_block": [layout.site_blocks[site] for site, _ in writes],
        "write_kind": [kind for _, kind in writes],
        "write_ratio": [_finite(sums.write_ratio(key)) for key in writes],
        "update_ratio": [_finite(ratio) for ratio in updates[0]],
        "update_ratio_outside": _finite(updates[1]),
        "non_finite": None if bad is None else bad.describe(),
        "non_finite_block": None if bad is None else bad.block,
        "additivity": _finite(sums.additivity) if layout.source == "calls" else None,
        "continuity": _finite(sums.continuity) if layout.source == "calls" else None,
        "notes": list(layout.notes),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def first_bad(layout: Layout, sums: StepSums) -> NonFiniteSite | None:
    """Return the first site that is not finite: upwards in the forward pass, else downwards in backward."""
    for state in sorted(sums.states):
        value = sums.peaks[state].value
        wrote = next((k for k in sorted(sums.writes) if k[0] == state - 1 and _bad(sums.writes[k])), None)
        if state and wrote is not None:
            value = value if _bad(value) else math.inf
            block, module = layout.site_blocks[state - 1], layout.site_modules[state - 1]
            return NonFiniteSite(module, block, f"the update of the {wrote[1]}", _word(value))
        if _bad(value):
            module, block, what = _place(layout, state)
            return NonFiniteSite(module, block, what, _word(value))
    for state in sorted(sums.gradients, reverse=True):
        if _bad(sums.gradients[state]):
            module, block, what = _place(layout, state)
            word = _word(sums.gradients[state])
            return NonFiniteSite(
                module, block, f"the gradient with respect to {what}", word, in_backward=True
            )
    return None


def _bad(value: float) -> bool:
    return not math.isfinite(value)


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinity"


def _place(layout: Layout, state: int) -> tuple[str, int | None, str]:
    if state == 0:
        return "", None, "the stream before the first block"
    block, name = layout.site_blocks[state - 1], layout.site_names[state - 1]
    return layout.blocks[block], block, f"the stream after the {name}"


# ---- for a logger ----


def summary(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the few figures that a logger gets by default."""
    chosen: dict[str, float | None] = {
        "stream/rms/first": _end(record["stream_rms"], 0),
        "stream/rms/last": _end(record["stream_rms"], -1),
        "stream/largest": _most(abs(x) for x in record["stream_largest"] if x is not None),
        "stream/outlier_ratio": _most(x for x in record["outlier_ratio"] if x is not None),
        "stream/write_ratio": _middle(record["write_ratio"]),
        "stream/gradient/first": _end(record["gradient_norm"], 0),
        "stream/gradient/last": _end(record["gradient_norm"], -1),
        "stream/update_ratio": _middle(record["update_ratio"]),
        "stream/non_finite": float(record["non_finite"] is not None),
    }
    return {name: value for name, value in chosen.items() if value is not None}


def profile(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of every block: of the state after it, and of what it writes."""
    found: dict[str, float | None] = {}
    for i, block in enumerate(record["state_block"]):  # the last state of a block stays
        name = "embedding" if block < 0 else f"block_{block}"
        found[f"stream/rms/{name}"] = record["stream_rms"][i]
        found[f"stream/outlier_ratio/{name}"] = record["outlier_ratio"][i]
        found[f"stream/gradient/{name}"] = record["gradient_norm"][i]
    writes = zip(record["write_block"], record["write_kind"], record["write_ratio"], strict=True)
    found |= {f"stream/write_ratio/block_{block}_{kind}": ratio for block, kind, ratio in writes}
    found |= {f"stream/update_ratio/block_{i}": ratio for i, ratio in enumerate(record["update_ratio"])}
    return {name: value for name, value in found.items() if value is not None}


def _end(values: list[float | None], place: int) -> float | None:
    return values[place] if values else None


def _most(values: Iterable[float]) -> float | None:
    return max(values, default=None)


def _middle(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
