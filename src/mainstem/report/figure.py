"""What a chart says, before anybody draws it: plain data that Python and the browser both draw from.

A `Figure` is one question's picture: a sentence, one or more charts beside each other, a table and a line of
provenance. A chart is one of four forms (docs/design.md, section 8). Numbers are plain floats, None where a
figure was not measured; one that is not finite goes into JSON by its name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

SCHEMA = "mainstem.report/1"

Number = float | None
Role = Literal["stream", "attention", "feed_forward", "broken", "reference", "other"]
Mark = Literal["line", "dots", "dashed", "dotted"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis.

    Attributes:
        label: what is measured, with its unit in words.
        scale: ``log`` has lanes of its own for zeros (below) and non-finite values (above).
        domain: fixed limits; None takes them from the data. Compared figures share theirs.
        floors: whether it counts blocks (or states between them), so that the shared cursor moves along it.
        states: whether it counts states: state 0 is before block 0, state k + 1 is what block k leaves.
        names: labels of the places 0, 1, ... where they are not numbers, such as tokens.
    """

    label: str
    scale: Literal["linear", "log"] = "linear"
    domain: tuple[float, float] | None = None
    floors: bool = False
    states: bool = False
    names: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One line or one set of dots.

    Attributes:
        name: as the legend says it.
        role: decides colour and marker, by kind of write and never by importance.
        x, y: as long as each other.
        low, high: a band around the line, such as the 5th and 95th percentile.
        mark: how it is drawn; what is broken or without residuals is dashed with open markers.
        subject: which of the compared models it belongs to.
    """

    name: str
    role: Role
    x: Sequence[float]
    y: Sequence[Number]
    low: Sequence[Number] | None = None
    high: Sequence[Number] | None = None
    mark: Mark = "line"
    subject: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines:
    """Lines, bands and dots over one x axis.

    Attributes:
        title: of this panel.
        references: levels to draw across, ``(label, y)``.
        subject: name of the model, where two are beside each other.
    """

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    references: Sequence[tuple[str, float]] = ()
    subject: str = ""
    form: Literal["lines"] = "lines"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """A grid of colours; row 0 at the bottom.

    Attributes:
        values: ``[rows][columns]``; None is "no data" and hatched.
        colour: what the colour means; its ``domain`` is printed.
        diverging: centred at zero, for signed values alone.
        right: one series along the rows, ``bottom``: along the columns.
        cells: what to say of a cell, ``[rows][columns]``: top words with their probabilities.
    """

    title: str
    x: Axis
    y: Axis
    values: Sequence[Sequence[Number]]
    colour: Axis
    diverging: bool = False
    right: Lines | None = None
    bottom: Lines | None = None
    cells: Sequence[Sequence[str]] | None = None
    subject: str = ""
    form: Literal["grid"] = "grid"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bars:
    """Signed bars of named things, in the order given, which add up to ``total``.

    Attributes:
        labels, values, roles: as long as each other.
        total: their sum as the model itself has it; None where they do not add up to anything.
    """

    title: str
    x: Axis
    labels: Sequence[str]
    values: Sequence[Number]
    roles: Sequence[Role]
    total: float | None = None
    subject: str = ""
    form: Literal["bars"] = "bars"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """One block of the tower.

    Attributes:
        norm: of the stream after it.
        attention, feed_forward: norm of its writes, None where it has none.
        attention_part, feed_forward_part: their signed parts of the direction; they add up with the others.
        running: part of all up to and with this block.
        broken: whether it was intervened on.
    """

    norm: Number
    attention: Number
    feed_forward: Number
    attention_part: Number = None
    feed_forward_part: Number = None
    running: Number = None
    broken: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerPicture:
    """One token on its way up, block 0 at the bottom.

    Attributes:
        token: the word; ``position``: its place in the window.
        start_norm: of the stream before block 0; ``start``: its part of the direction.
        rooms: one a block.
        direction: what the parts are of, such as the logit of the word " city"; None without parts.
        end: the model's own figure, which the running sum ends at.
        collar: where the norm sits: on the ``read`` arm, or on the ``shaft`` (post-norm).
        streams: how many.
    """

    title: str
    token: str
    position: int
    start_norm: Number
    rooms: Sequence[Room]
    start: Number = None
    direction: str | None = None
    end: Number = None
    collar: Literal["read", "shaft"] = "read"
    streams: int = 1
    subject: str = ""
    form: Literal["tower"] = "tower"


Chart = Lines | Grid | Bars | TowerPicture


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """The figures of a chart, for those who read."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | int | None]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One question, answered.

    Attributes:
        id: stays the same between versions, for links.
        question: its number in the audit, 0 for the opening picture and what belongs to none.
        title: the question in words; ``finding``: the answer in a sentence made from the data, a line a
            subject where there are two.
        charts: beside each other on a wide page.
        table: the figures.
        honesty: model, weights, tokens, dtype, date and the additivity error.
        refused: why there is no chart; None where there is one.
        note: what the picture does not show.
    """

    id: str
    question: int
    title: str
    finding: str
    charts: Sequence[Chart]
    table: Table | None
    honesty: str
    refused: str | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All figures of one file or page.

    Attributes:
        title: of the page; ``subjects``: names of the models compared, one or two.
        figures: in reading order.
        provenance: what is needed to repeat it, by subject.
        notes: questions without an answer and figures that are missing, and why.
    """

    title: str
    subjects: Sequence[str]
    figures: Sequence[Figure]
    provenance: Mapping[str, Mapping[str, Any]]
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; a number that is not finite becomes its name."""
        return {"schema": SCHEMA, **{f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}}


def plain(value: Any) -> Any:
    """Return dataclasses, mappings and sequences as JSON values, keys as in Python."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value
