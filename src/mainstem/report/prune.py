"""A pruning in words, and its curves as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any


def prune_lines(record: dict[str, Any]) -> list[str]:
    """Return what was found, a line each, from what ``prune.json`` says."""
    chosen = record["curves"][0]
    removed = chosen["points"][-1]["removed"] if chosen["points"] else []
    lines = [
        f"{record['model']['requested']}: {record['planner']} removes {len(removed)} x {record['unit']}: "
        f"{', '.join(map(str, removed)) or 'none'}"
    ]
    if not record["finished"]:
        lines.append("interrupted: these are the curves up to then; nothing was cut")
    lines += [f"warning: {warning}" for warning in record["warnings"]]
    if record["outliers"]:
        jumps = (
            f"{o['block']} {o['what']} ({o['before']:.0f} -> {o['after']:.0f})" for o in record["outliers"]
        )
        lines.append(f"outliers, by block: {'; '.join(jumps)}")
    lines += ["", "loss above the whole model's, nats a token: calibration / held out", *_table(record)]
    if "loss" in record:
        lines += ["", *_loss_lines(record["loss"]), *_size_lines(record["size"])]
    cost = record["cost"]
    lines.append(
        f"planning: {cost['num_passes']} passes, {cost['block_runs']} block runs "
        f"({cost['naive_block_runs']} from the bottom), {cost['seconds']:.1f} s"
    )
    return lines


def curves_csv(record: dict[str, Any]) -> str:
    """Return the curves, a row a planner and number of units."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["planner", "num_removed", "removed", "calibration_delta", "held_out_delta"])
    for curve in record["curves"]:
        for n, point in enumerate(curve["points"]):
            removed = " ".join(map(str, point["removed"]))
            writer.writerow([curve["planner"], n, removed, point["calibration"], point["held_out"]])
    return out.getvalue()


def _table(record: dict[str, Any]) -> list[str]:
    curves = record["curves"]
    lines = ["  n  " + "".join(f"{curve['planner']:>20}" for curve in curves)]
    for n in range(max(len(curve["points"]) for curve in curves)):
        cells = [_cell(curve["points"][n]) if n < len(curve["points"]) else "-" for curve in curves]
        lines.append(f"{n:>3}  " + "".join(f"{cell:>20}" for cell in cells))
    return lines


def _cell(point: dict[str, Any]) -> str:
    return f"{_figure(point['calibration'])} / {_figure(point['held_out'])}"


def _figure(value: float | None, how: str = "+.4f") -> str:
    return "not finite" if value is None else format(value, how)


def _loss_lines(loss: dict[str, Any]) -> list[str]:
    lines = [
        f"{name.replace('_', '-')} loss {_figure(loss[name]['before'], '.4f')} -> "
        f"{_figure(loss[name]['after'], '.4f')} nats"
        for name in ("calibration", "held_out")
    ]
    held_out = loss["held_out"]
    lines[1] += (
        f", KL {_figure(held_out['kl'], '.4f')}, same first word {_figure(held_out['top1'], '.1%')}, over "
        f"{held_out['num_tokens']:,} tokens"
    )
    return lines


def _size_lines(size: dict[str, Any]) -> list[str]:
    before, after = size["before"], size["after"]
    lines = [
        f"blocks {before['num_blocks']} -> {after['num_blocks']}, parameters {before['num_parameters']:,} -> "
        f"{after['num_parameters']:,}, weights {_mib(before['weight_bytes'])} -> "
        f"{_mib(after['weight_bytes'])}"
    ]
    if before["cache_bytes_per_token"] is not None:
        lines.append(
            f"keys and values {before['cache_bytes_per_token']:,} -> {after['cache_bytes_per_token'] or 0:,} "
            "bytes a token"
        )
    for name in ("reading", "writing"):
        one, other = before[name], after[name]
        if one is not None and other is not None:
            lines.append(
                f"{name} {_speed(one)} -> {_speed(other)} tokens a second "
                f"({other['median'] / one['median']:.2f}x, median of {one['rounds']} rounds in turn)"
            )
    return lines


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _speed(speed: dict[str, Any]) -> str:
    return f"{speed['median']:,.0f} ({speed['low']:,.0f} to {speed['high']:,.0f})"
