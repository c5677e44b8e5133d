"""Write ``docs/connections.md``: every residual connection, how it starts, what it costs, how gradients fare.

    python -m benchmarks.connections_table

Every cell is computed: costs by running each scheme (`mainstem.connections.cost`), distances and gradients on
the stack that the conformance suite uses (``tests/connections/reference_stack.py``).
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._harness import versions
from mainstem.connections import NormConfig, Scheme, make_scheme
from mainstem.connections.table import NUM_SUBLAYERS, WIDTH, SchemeRow, scheme_rows

ROOT = Path(__file__).parents[1]
DEPTHS = (96, 1000)
SEEDS = 3

HEADER = """# Residual connections

Made by `make connections-table`; do not edit. On {versions}.

- **formula**: `N` a norm, `F` the sublayer without its norm, `S` sublayers in all.
- **start**: relative distance from plain Pre-LN with the same branches (24 sublayers, width 64, fp64, mean of
  {seeds} seeds, and their spread). **exact**: `always` the same function; `option` with `exact_start=True`.
- **parameters, FLOPs, bytes moved, bytes saved**: on the residual path alone, norms included, a sublayer (and
  token), counted over {sublayers} sublayers of width {width} in fp32.
- **gradient**: `|dL/dx_0| / |dL/dx_S|` at 96 and at 1,000 sublayers (width 32, fp64, random branches): what
  of a learning signal at the top is left at the bottom. A dash: the scheme refuses to be built so deep.
"""

COLUMNS = (
    *("connection", "family", "year", "paper", "formula", "streams", "exact", "start"),
    *("parameters", "FLOPs", "moved", "saved", "gradient, 96", "gradient, 1,000"),
)


def gradient_ratio(scheme: Scheme, num_sublayers: int, stacks: Any) -> float:
    """Return the size of the loss's gradient at the embedding over that at the last state."""
    stack = stacks.make_stack(scheme, NormConfig(), num_sublayers=num_sublayers, width=32)
    x = stacks.make_input(7, width=32).requires_grad_()
    states = stack.states(x)
    last = [t for t in ([states[-1]] if isinstance(states[-1], Tensor) else states[-1]) if t.requires_grad]
    out = stack.trunk.final_norm(stack.trunk.collapse(states[-1]))
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(8), dtype=out.dtype)
    top = torch.autograd.grad((out * probe).sum(), [x, *last], allow_unused=True)
    size = math.sqrt(sum(float(g.square().sum()) for g in top[1:] if g is not None))
    return float(top[0].norm()) / size if size else math.nan


def row(entry: SchemeRow, stacks: Any) -> str:
    """Return one line of the table."""
    scheme = make_scheme(entry.name)
    starts = torch.tensor([stacks.start_distance(scheme, NormConfig(), seed) for seed in range(SEEDS)])
    gradients: list[str] = []
    for depth in DEPTHS:
        try:
            gradients.append(f"{gradient_ratio(scheme, depth, stacks):.2g}")
        except ValueError:  # a history scheme refuses to be built this deep
            gradients.append("-")
    cells = [
        f"`{entry.name}`",
        entry.family,
        entry.year,
        entry.paper,
        f"`{entry.formula}`".replace("|", "\\|"),
        f"{entry.streams}{' + history' if entry.has_history else ''}",
        entry.exact_start,
        f"{starts.mean():.2g} ± {starts.std():.1g}" if starts.max() > 1e-9 else "0",
        f"{entry.parameters:,.0f}",
        f"{entry.flops:,.0f}",
        f"{entry.bytes_moved:,.0f}",
        f"{entry.bytes_saved:,.0f}",
        *gradients,
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def main() -> None:
    """Write the page."""
    sys.path.insert(0, str(ROOT / "tests" / "connections"))
    import reference_stack as stacks

    entries = scheme_rows()
    refusals = [f"- `{e.name}` and {what}: {why}" for e in entries for what, why in sorted(e.refuses.items())]
    page = [
        HEADER.format(
            versions=f"torch {versions('torch')['torch']}", seeds=SEEDS, sublayers=NUM_SUBLAYERS, width=WIDTH
        ),
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *(row(entry, stacks) for entry in entries),
    ]
    if refusals:
        page += ["", "## What cannot be combined", "", *refusals]
    target = ROOT / "docs" / "connections.md"
    target.write_text("\n".join(page) + "\n", encoding="utf-8")
    print(f"wrote {target.relative_to(ROOT)}: {len(entries)} schemes")


if __name__ == "__main__":
    main()
