"""A claim as data, and the page they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

Verdict = Literal["holds", "holds only if", "does not hold"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of figures under a header, with a caption that says what was measured on what."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | float | int]]

    def markdown(self) -> str:
        """Return the table as GitHub markdown."""
        lines = [self.caption, "", f"| {' | '.join(self.header)} |", "|" + "---|" * len(self.header)]
        return "\n".join([*lines, *(f"| {' | '.join(cell(value) for value in row)} |" for row in self.rows)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence of the textbook, what was measured, and what came of it.

    Attributes:
        number, text: as on the lesson's list.
        verdict: the rule that gives it is in the docstring of the function that measures it.
        condition: what "holds only if" depends on, or why it does not hold; empty where it simply holds.
        finding: one sentence with the figures.
        tables: the evidence.
    """

    number: int
    text: str
    verdict: Verdict
    condition: str = ""
    finding: str
    tables: Sequence[Table]

    def markdown(self) -> str:
        """Return the claim's section."""
        says = f"**{self.verdict}{' ' + self.condition if self.condition else ''}.** {self.finding}"
        return "\n\n".join(
            [f"## {self.number}. {self.text}", says, *(table.markdown() for table in self.tables)]
        )


def cell(value: str | float | int) -> str:
    """Three significant digits, plain where that is shorter."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.1e}"


def spread(values: Sequence[float]) -> str:
    """Mean and, of several, half the range between the least and the greatest."""
    mean = sum(values) / len(values)
    return cell(mean) if len(values) == 1 else f"{cell(mean)} ± {cell((max(values) - min(values)) / 2)}"
