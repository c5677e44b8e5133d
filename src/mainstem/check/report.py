"""What a check found, as data."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

SCHEMA = "mainstem.check/1"

KINDS = {
    "repeat": "the same input gives the same output again",
    "future-leak": "changing the last token moves no earlier output",
    "batch-leak": "changing one sequence moves no other's output",
    "growth": "the stream does not grow exponentially with depth",
    "non-finite": "outputs and gradients are finite at every depth",
    "start-distance": "distance from plain Pre-LN with the same branches",
    "mixing-sums": "mixing matrices have the row and column sums, or are as orthogonal, as promised",
    "dead-parameter": "every parameter gets a gradient",
    "train-eval": "train and eval mode agree without dropout",
    "compile": "compiled and eager runs agree",
    "save-load": "saved, loaded into a fresh module, it computes the same",
}
"""Every kind of finding, in the order they are looked for, with what holds where there is none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault, with the smallest case that shows it.

    Attributes:
        kind: one of `KINDS`.
        figure: the number that shows it, None where an exception did.
        where: module path, parameter, position or depth.
        says: the finding in one sentence.
        depth: the smallest of the depths tried that shows it, None where depth does not matter.
        details: further plain values, by kind.
    """

    kind: str
    figure: float | None
    where: str
    says: str
    depth: int | None = None
    details: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passed:
    """One thing that holds.

    Attributes:
        kind: one of `KINDS`.
        figure: what was measured.
        says: what was compared, in one sentence.
    """

    kind: str
    figure: float | None
    says: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skipped:
    """One thing that was not looked at, and why."""

    kind: str
    reason: str


Outcome = Finding | Passed | Skipped


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Everything a check found.

    Attributes:
        subject: what was checked, as it was named.
        is_stack: whether it was a `ResidualStack` rather than a model.
        depths: the depths it was built for.
        outcomes: findings, passes and skips, in the order they were looked for.
    """

    subject: str
    is_stack: bool
    depths: tuple[int, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The faults."""
        return tuple(o for o in self.outcomes if isinstance(o, Finding))

    @property
    def passed(self) -> tuple[Passed, ...]:
        """What holds."""
        return tuple(o for o in self.outcomes if isinstance(o, Passed))

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What was not looked at."""
        return tuple(o for o in self.outcomes if isinstance(o, Skipped))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a figure that is no finite number is its name as a string."""
        plain: dict[str, Any] = {
            "schema": SCHEMA,
            "subject": self.subject,
            "subject_kind": "residual stack" if self.is_stack else "model",
            "depths": list(self.depths),
            "findings": [dataclasses.asdict(f) for f in self.findings],
            "passed": [dataclasses.asdict(p) for p in self.passed],
            "skipped": [dataclasses.asdict(s) for s in self.skipped],
        }
        return _finite(plain)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
