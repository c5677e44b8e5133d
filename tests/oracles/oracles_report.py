"""Write the page of oracles from what the tests of this folder measure.

python tests/oracles/oracles_report.py docs/oracles.md

Every row is a comparison that has just passed; a failing or skipped one stops the page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mainstem.connections import scheme_names

HERE = Path(__file__).parent

HEADER = """# Oracles

Made by `make oracles-report`; do not edit. Our connections beside other people's modules with the same
weights: values, and the gradients of the input and of the weights named. The formulas written out from the
papers, to which every scheme is held as well, are in `tests/connections/`.

- **error**: the largest difference over the largest entry, in the values and in the worst of the gradients
  (their number in brackets; one that is zero but for rounding is not counted). Held to 1e-10 in fp64, and to
  `torch.testing.assert_close`'s defaults in fp32.
- **departs**: where the reference is not its paper's formula, or not ours, and what was done about it.

Whole models of transformers run their own attention, feed-forward, embedding and head; their residual is
taken out and ours put in its place, and the logits and all gradients of both are compared.

| connection | reference | version | compared | dtype | error, values | error, gradients | departs | test |
|---|---|---|---|---|---|---|---|---|
"""

WITHOUT = {
    "backout": "no package was found; the speedruns it comes from are scripts",
    "b2t": "its authors' code is a fork of fairseq",
    "deep_delta": "its authors' code is in no package",
    "delta_attention_residuals": "its authors' code is in no package",
    "dense_former": "its authors' code is in no package",
    "highway": "no package was found; `GatedResidual` of hyper-connections gates by update and state at once",
    "keel": "no public code was found",
    "mix_norm": "its authors' code is in no package",
    "mudd": "its authors' code is in no package",
    "no_residual": "nothing to compare: the branch alone",
    "resi_dual": "its authors' code is a fork of fairseq",
    "siamese_norm": "its authors' code is in no package",
    "unet_skips": "x-transformers joins its skips by a matrix over both, concatenated: another scheme",
    "x0_reinjection": "x-transformers adds its input to what a branch reads, not to the stream",
}
"""Connections that nothing was found to compare with, and why."""


class Measured:
    """Collects what `agree` reported."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)
        if report.when == "call":
            test = report.nodeid.rpartition("/")[2].partition("[")[0]
            found = [json.loads(str(value)) for name, value in report.user_properties if name == "oracle"]
            self.rows += [row | {"test": test} for row in found]


def line(row: dict[str, Any]) -> str:
    cells = (
        f"`{row['scheme']}`",
        f"{row['package']}: {row['reference']}",
        row["version"].partition("+")[0],
        row["compared"],
        row["dtype"],
        f"{row['values']:.1e}",
        f"{row['gradients']:.1e} ({row['num_gradients']})",
        row["departs"],
        f"`{row['test']}`",
    )
    return f"| {' | '.join(cells)} |"


def page(rows: list[dict[str, Any]]) -> str:
    rows = sorted(rows, key=lambda row: (row["scheme"], row["package"], row["reference"], row["compared"]))
    without = sorted(set(scheme_names()) - {row["scheme"] for row in rows})
    if unexplained := set(without) ^ set(WITHOUT):
        raise SystemExit(
            f"{__file__}: WITHOUT must name what no oracle is for, which differs in {unexplained}"
        )
    rest = "".join(f"- `{name}`: {WITHOUT[name]}.\n" for name in without)
    return (
        HEADER
        + "".join(line(row) + "\n" for row in rows)
        + "\n## Without a reference that could be run\n\n"
        + "Held to their formulas, written out in fp64 in `tests/connections/`, alone.\n\n"
        + rest
    )


def main(out: str) -> int:
    measured = Measured()
    names = [str(path) for path in sorted(HERE.glob("test_*.py")) if "agree: " in path.read_text("utf-8")]
    if status := pytest.main([*names, "--no-header"], plugins=[measured]):
        return int(status)
    if measured.skipped:
        print(f"not measured: {', '.join(measured.skipped)}", file=sys.stderr)
        return 1
    Path(out).write_text(page(measured.rows), encoding="utf-8")
    print(f"{out}: {len(measured.rows)} comparisons")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
