"""The figures of saved audits: what each question's chart, sentence, table and provenance say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mainstem.audit import QUESTIONS
from mainstem.errors import MainstemError
from mainstem.report._axes import shared_domain
from mainstem.report.figure import (
    Axis,
    Bars,
    Chart,
    Figure,
    Grid,
    Lines,
    Mark,
    Number,
    Report,
    Role,
    Series,
    Table,
)

Audit = Mapping[str, Any]
"""The JSON of one audit, as ``audit.json`` has it."""

_KINDS: Sequence[tuple[str, str, Role]] = (
    ("attn", "attention", "attention"),
    ("cross_attn", "cross-attention", "other"),
    ("mlp", "feed-forward", "feed_forward"),
    ("mixer", "mixer", "other"),
)
_BLOCK = Axis(label="block", floors=True)
_STATE = Axis(label="state (0 is before block 0)", floors=True, states=True)
_LARGEST_PARTS = 12
_OTHERS: Role = "reference"
_IDS = {number: name for name, number in QUESTIONS.items()}


def make_report(audits: Sequence[Audit], names: Sequence[str] | None = None) -> Report:
    """Return the figures of one audit, or of two beside each other with the same axes.

    Args:
        audits: one or two, as `mainstem.report.read_audit` returns them.
        names: what to call them, None for the models' own names.

    Raises:
        MainstemError: a figure is missing or is no number where there should be one.
    """
    try:
        return _made(audits, names)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise MainstemError(
            f"The audit is not as its schema says ({type(error).__name__}: {error}); make it again with "
            "`mainstem audit`."
        ) from error


def _made(audits: Sequence[Audit], names: Sequence[str] | None) -> Report:
    subjects = list(names) if names is not None else _names(audits)
    numbers = {f["number"]: f["question"] for audit in audits for f in audit["findings"]}
    figures = [_figure(number, question, audits, subjects) for number, question in sorted(numbers.items())]
    return Report(
        title=f"The residual stream of {' and '.join(subjects)}",
        subjects=subjects,
        figures=figures,
        provenance={
            name: {k: v for k, v in audit["provenance"].items() if k != "stream"}
            for name, audit in zip(subjects, audits, strict=True)
        },
        notes=_notes(audits, subjects, numbers),
    )


def _notes(audits: Sequence[Audit], subjects: Sequence[str], answered: Collection[int]) -> list[str]:
    """Say which questions have no answer, and which figures are missing and why."""
    notes = [
        f"Question {number} ({name}) has no answer here"
        + ("; `mainstem audit --sweep` gives it." if name == "damage" else ".")
        for name, number in QUESTIONS.items()
        if number not in answered
    ]
    for audit, name in zip(audits, subjects, strict=True):
        about = f"{name}: " if len(audits) > 1 else ""
        notes += [f"{about}{note}." for note in audit["provenance"]["notes"]]
    return notes


def _names(audits: Sequence[Audit]) -> list[str]:
    names = [
        str(audit["provenance"]["model"]["requested"]).rstrip("/").rpartition("/")[2] for audit in audits
    ]
    if len(set(names)) < len(names):
        return [f"{name} ({number})" for number, name in enumerate(names, 1)]
    return names


def _figure(number: int, question: str, audits: Sequence[Audit], subjects: Sequence[str]) -> Figure:
    said = [_finding(audit, number) for audit in audits]
    finding = (
        said[0] if len(said) == 1 else "\n".join(f"{n}: {s}" for n, s in zip(subjects, said, strict=True))
    )
    refused = _refused(audits, subjects)
    panels = [_PANELS[number](audit) for audit in audits]
    charts: list[Chart] = []
    for title in dict.fromkeys(chart.title for own in panels for chart in own):
        same = [
            (name, c) for name, own in zip(subjects, panels, strict=True) for c in own if c.title == title
        ]
        charts += _alike([dataclasses.replace(c, subject=name) if len(audits) > 1 else c for name, c in same])
    for chart in charts:
        _check(chart)
    return Figure(
        id=_IDS[number],
        question=number,
        title=question,
        finding=finding,
        charts=[] if refused else charts,
        table=_table(charts),
        honesty="\n".join(_honesty(a, n, len(audits)) for a, n in zip(audits, subjects, strict=True)),
        refused=refused,
        note=_NOTES.get(number, ""),
    )


def _finding(audit: Audit, number: int) -> str:
    return next((f["finding"] for f in audit["findings"] if f["number"] == number), "not asked.")


def _refused(audits: Sequence[Audit], subjects: Sequence[str]) -> str | None:
    """Say why nothing is drawn: books that do not balance mean that the figures are of something else."""
    for audit, name in zip(audits, subjects, strict=True):
        books = audit["books"]
        worst = [books["additivity"], books["continuity"]]
        # an audit goes on over a stream that is not finite, and says so; only then may an error be missing
        is_lost = audit["first_nonfinite"] is not None
        if any(not is_lost if error is None else error > books["tolerance"] for error in worst):
            shown = " and ".join("not finite" if e is None else f"{e:.1e}" for e in worst)
            return (
                f"No chart: the books of {name} do not balance (additivity and continuity {shown}, allowed "
                f"{books['tolerance']:.0e}), so what was recorded is not what the model adds up."
            )
    return None


def _honesty(audit: Audit, name: str, number: int) -> str:
    about, books = audit["provenance"], audit["books"]
    model, text = about["model"], about["text"]
    versions = ", ".join(
        f"{k} {model['versions'][k]}" for k in ("torch", "transformers") if model["versions"].get(k)
    )
    weights = str(model.get("weights_sha256") or "not hashed")[:16]
    error = "not finite" if books["additivity"] is None else f"{books['additivity']:.1e}"
    seed = f"seed {about['seed']}, " if about["seed"] is not None else ""
    says = (
        f"{model['requested']}, weights sha256 {weights}, {text['num_tokens']:,} tokens of "
        f"{text['text'].get('name') or text['text'].get('kind')}, {model['dtype']}, {seed}"
        f"mainstem {about['mainstem']}, {versions}, {about['created'][:10]}, additivity error {error} "
        f"(allowed {books['tolerance']:.0e})."
    )
    return says if number == 1 or name == model["requested"] else f"{name}: {says}"


def _alike(charts: Sequence[Chart]) -> list[Chart]:
    """Give charts beside each other the same axes."""
    lines = [c for c in charts if isinstance(c, Lines)]
    grids = [c for c in charts if isinstance(c, Grid)]
    if len(lines) == len(charts) > 1:
        y = [v for c in lines for s in c.series for v in (*s.y, *(s.low or ()), *(s.high or ()))]
        y += [level for c in lines for _, level in c.references]
        y_axis = dataclasses.replace(lines[0].y, domain=lines[0].y.domain or shared_domain(lines[0].y, [y]))
        x_domain = shared_domain(lines[0].x, [[*s.x] for c in lines for s in c.series])
        x_axis = dataclasses.replace(lines[0].x, domain=x_domain)
        return [dataclasses.replace(c, x=x_axis, y=y_axis) for c in lines]
    if len(grids) == len(charts) > 1:
        own = grids[0].colour
        colour = dataclasses.replace(own, domain=shared_domain(own, [row for c in grids for row in c.values]))
        return [dataclasses.replace(c, colour=colour) for c in grids]
    return list(charts)


def _check(chart: Chart) -> None:
    """Refuse words where figures belong, before they are drawn.

    Raises:
        TypeError: one is neither a number nor None.
    """
    found: list[Any] = []
    if isinstance(chart, Lines):
        found = [v for s in chart.series for v in (*s.x, *s.y, *(s.low or ()), *(s.high or ()))]
        found += [level for _, level in chart.references]
    elif isinstance(chart, Grid):
        found = [v for row in chart.values for v in row]
    elif isinstance(chart, Bars):
        found = [*chart.values, chart.total]
    for value in found:
        if value is not None and not isinstance(value, int | float):
            raise TypeError(f"{chart.title!r} has {value!r} where a number was expected")


def _table(charts: Sequence[Chart]) -> Table | None:
    """Return what the lines were drawn from, a row a block, or without lines the bars.

    A state is the row of the block that it is left by, the first one that of the embedding.
    """
    bars = [c for c in charts if isinstance(c, Bars)]
    lines = [c for c in charts if isinstance(c, Lines)]
    if lines:
        columns: dict[str, dict[int, Number]] = {}
        for c in lines:
            before = 1 if c.x.states else 0
            for s in c.series:
                head = ": ".join(filter(None, (c.subject, c.title, s.name)))
                columns[head] = {int(x) - before: y for x, y in zip(s.x, s.y, strict=True)}
        places = sorted({x for column in columns.values() for x in column})
        rows = [["before" if p < 0 else p, *(column.get(p) for column in columns.values())] for p in places]
        return Table(columns=["block", *columns], rows=rows)
    if bars:
        return Table(
            columns=["part", "value"],
            rows=[[n, v] for c in bars for n, v in zip(c.labels, c.values, strict=True)],
        )
    return None


def _column(audit: Audit, name: str, *, always: bool = True) -> list[Number]:
    """Return a figure by block; nan where it is not finite, None where it was not measured."""
    values: list[Number] = [block[name] for block in audit["blocks"]]
    lost = audit["first_nonfinite"]
    from_block = lost["block"] if lost is not None and any(v is not None for v in values) else math.inf
    return [math.nan if v is None and (always or i >= from_block) else v for i, v in enumerate(values)]


def _line(
    name: str,
    role: Role,
    y: Sequence[Number],
    *,
    start: int = 0,
    mark: Mark = "line",
    band: Any = (None, None),
) -> Series:
    x = [float(start + i) for i in range(len(y))]
    return Series(name=name, role=role, x=x, y=y, low=band[0], high=band[1], mark=mark)


def _share(label: str) -> Axis:
    return Axis(label=label, domain=(0.0, 1.0))


def _books(audit: Audit) -> list[Chart]:
    charts: list[Chart] = []
    for tokens, title in (
        ("rest", "Swallowed by a bfloat16 stream"),
        ("first", "The same at the first tokens"),
    ):
        series: list[Series] = []
        for kind, name, role in _KINDS:
            shares: list[Number] = [b["absorbed_bfloat16"].get(kind, {}).get(tokens) for b in audit["blocks"]]
            if any(v is not None for v in shares):
                series.append(_line(name, role, shares, mark="dots"))
        if series:
            y = Axis(label="share of a write's entries")
            charts.append(Lines(title=title, x=_BLOCK, y=y, series=series))
    return charts


def _growth(audit: Audit) -> list[Chart]:
    band = (_column(audit, "resid_norm_p5"), _column(audit, "resid_norm_p95"))
    norms = [
        _line("median, 5 to 95 %", "stream", _column(audit, "resid_norm_median"), band=band),
        _line("first tokens", "reference", _column(audit, "resid_norm_first"), mark="dotted"),
        _line("largest entry", "other", _column(audit, "max_abs"), mark="dots"),
    ]
    log = Axis(label="norm of the stream", scale="log")
    charts: list[Chart] = [Lines(title="Size of the stream after each block", x=_BLOCK, y=log, series=norms)]
    if audit["spectra"]:
        at = [float(s["state"]) for s in audit["spectra"]]
        series: list[Series] = []
        for name, role, key in (
            ("all tokens", "stream", "whole"),
            ("without outliers", "reference", "typical"),
        ):
            y = [s[key]["participation_ratio"] for s in audit["spectra"]]
            mark: Mark = "line" if key == "whole" else "dotted"
            series.append(Series(name=name, role=role, x=at, y=y, mark=mark))  # pyright: ignore[reportArgumentType]
        y_axis = Axis(label="participation ratio")
        charts.append(Lines(title="Directions that its tokens use", x=_STATE, y=y_axis, series=series))
    return charts


def _writes(audit: Audit) -> list[Chart]:
    series: list[Series] = []
    for kind, name, role in _KINDS:
        ratios = _column(audit, f"{kind}_write_ratio", always=False)
        if any(v is not None for v in ratios):
            series.append(_line(name, role, ratios, mark="dots"))
    charts: list[Chart] = []
    if series:
        y = Axis(label="size of the write / size of the stream", scale="log")
        charts.append(Lines(title="What each sublayer writes", x=_BLOCK, y=y, series=series))
    cosines = _column(audit, "write_cosine", always=False)
    if any(v is not None for v in cosines):
        charts.append(
            Lines(
                title="Does a block add to the stream or erase?",
                x=_BLOCK,
                y=Axis(label="cosine of write and stream", domain=(-1.0, 1.0)),
                series=[_line("block", "stream", cosines, mark="dots")],
                references=[("0: a new direction", 0.0)],
            )
        )
    return charts


def _identity(audit: Audit) -> list[Chart]:
    found = audit["identity"]
    if found is None:
        return []
    shares = [found["nearest_before"], *_column(audit, "nearest_embedding", always=False)]
    charts: list[Chart] = [
        Lines(
            title="Own embedding is the nearest",
            x=_STATE,
            y=_share("share of tokens"),
            series=[_line("tokens", "stream", shares)],
            references=[("always the commonest token", found["majority"])],
        )
    ]
    if audit["probe"] is not None:
        figures = audit["probe"]["figures"]
        marks: Sequence[Mark] = ("line", "dashed", "dotted", "dotted")
        series = [
            Series(
                name=f"{offset} before" if offset else "in place",
                role="stream" if offset == 0 else "other",
                x=[float(f["state"]) for f in figures if f["offset"] == offset],
                y=[f["text"] for f in figures if f["offset"] == offset],
                mark=marks[min(offset, 3)],
            )
            for offset in sorted({f["offset"] for f in figures})
        ]
        y = _share("share named on held-out text")
        charts.append(Lines(title="What a linear probe names", x=_STATE, y=y, series=series))
    return charts


def _answer(audit: Audit) -> list[Chart]:
    charts: list[Chart] = []
    kl, top1 = _column(audit, "lens_kl", always=False), _column(audit, "lens_top1", always=False)
    if any(v is not None for v in kl):
        y = Axis(label="KL(final || lens), nats", scale="log")
        charts.append(
            Lines(title="How far from the answer", x=_BLOCK, y=y, series=[_line("all tokens", "stream", kl)])
        )
        share = _share("share of tokens")
        agree = [_line("all tokens", "stream", top1)]
        charts.append(Lines(title="Top word is the final one", x=_BLOCK, y=share, series=agree))
    if audit["attribution"] is not None:
        charts += _attribution(audit["attribution"], len(audit["blocks"]))
    return charts


def _attribution(found: Mapping[str, Any], depth: int) -> list[Chart]:
    parts = found["parts"]
    kept = sorted(range(len(parts)), key=lambda i: -abs(parts[i]["logit"] or 0.0))[:_LARGEST_PARTS]
    rest = [part["logit"] for i, part in enumerate(parts) if i not in kept]
    shown = [parts[i] for i in sorted(kept)]
    what = (
        "the logit of "
        + repr(found["token"])
        + (f" over {found['against']!r}" if found["against"] is not None else "")
    )
    roles: list[Role] = [_role(part["label"]) for part in shown]
    labels, values = [part["label"] for part in shown], [part["logit"] for part in shown]
    if rest:
        labels.append(f"{len(rest)} others")
        roles.append(_OTHERS)
        values.append(None if None in rest else math.fsum(rest))
    bars = Bars(
        title="Who says it",
        x=Axis(label=f"part of {what}"),
        labels=labels,
        values=values,
        roles=roles,
        total=found["before"],
    )
    if found["before"] is None or any(part["logit"] is None for part in parts):
        return [bars]
    by_block = [[p["logit"] for p in parts if p["block"] == block] for block in range(depth)]
    start = math.fsum(p["logit"] for p in parts if p["block"] is None)
    running = [start]
    for own in by_block:
        running.append(running[-1] + math.fsum(own))
    y = Axis(label=f"{what}, so far")
    references = [("the model's own", found["before"])]
    line = [_line("embedding, biases and all blocks below", "stream", running)]
    return [Lines(title="The way up of one logit", x=_STATE, y=y, series=line, references=references), bars]


def _role(label: str) -> Role:
    if "attn" in label:
        return "attention"
    return "feed_forward" if "mlp" in label else "other"


def _damage(audit: Audit) -> list[Chart]:
    damage = audit["damage"]
    if damage is None:
        return []
    depth = len(audit["blocks"])
    none: list[Number] = [None]
    values = [none * depth for _ in range(depth)]
    for block in damage["blocks"]:
        change: list[Number] = [math.nan if v is None else v for v in block["change"]]
        values[block["block"]] = none * (depth - len(change)) + change
    x = [float(b["block"]) for b in damage["blocks"]]
    kl: list[Number] = [math.nan if b["kl"] is None else b["kl"] for b in damage["blocks"]]
    charts: list[Chart] = [
        Grid(
            title="Damage that a skipped block does above",
            x=Axis(label="measured after block", floors=True),
            y=Axis(label="block skipped", floors=True),
            values=values,
            colour=Axis(label="relative change", scale="log"),
        ),
        Lines(
            title="Damage to the prediction",
            x=Axis(label="block skipped", floors=True),
            y=Axis(label="KL, nats", scale="log"),
            series=[Series(name="block skipped", role="broken", x=x, y=kl, mark="dots")],
        ),
    ]
    return charts


def _removal(audit: Audit) -> list[Chart]:
    y = Axis(label="1 - cosine of before and after", scale="log")
    series = [_line("block influence", "stream", _column(audit, "block_influence"), mark="dots")]
    charts: list[Chart] = [Lines(title="How much a block turns the stream", x=_BLOCK, y=y, series=series)]
    damage = audit["damage"]
    losses = [(float(b["block"]), b["removal_loss"]) for b in damage["blocks"]] if damage is not None else []
    if any(loss is not None for _, loss in losses):
        charts.append(
            Lines(
                title="Loss of removing a block",
                x=_BLOCK,
                y=Axis(label="loss without it minus with it, nats"),
                series=[
                    Series(
                        name="measured",
                        role="broken",
                        x=[x for x, _ in losses],
                        y=[v for _, v in losses],
                        mark="dots",
                    )
                ],
                references=[("no loss", 0.0)],
            )
        )
    distances = audit["angular_distance"]["distances"]
    if len(distances) > 1:
        rows = [[*row, *[None] * (len(distances) - len(row))] for row in distances]
        charts.append(
            Grid(
                title="Angle over runs of blocks",
                x=Axis(label="first block of the run", floors=True),
                y=Axis(
                    label="blocks in the run", floors=True, names=[str(n) for n in range(1, len(rows) + 1)]
                ),
                values=rows,
                colour=Axis(label="angle / 180 degrees"),
            )
        )
    return charts


def _signals(audit: Audit) -> list[Chart]:
    if audit["gradient"] is None:
        return []
    before = audit["gradient"]["norm_before"]
    norms = [math.nan if before is None else before, *_column(audit, "gradient_norm")]
    y = Axis(label="norm of the gradient", scale="log")
    line = [_line("mean over tokens", "stream", norms)]
    return [Lines(title="Gradient of the loss by depth", x=_STATE, y=y, series=line)]


_PANELS: Mapping[int, Callable[[Audit], list[Chart]]] = {
    1: _books,
    2: _growth,
    3: _writes,
    4: _identity,
    5: _answer,
    6: _damage,
    7: _removal,
    8: _signals,
}
_NOTES = {
    2: "First tokens are drawn apart: they often are larger by orders of magnitude.",
    4: "The nearest embedding is a readout: a word can still be in the sum while another is nearer.",
    5: "The lens is the model's own norm and head applied early: a readout, not what the model thinks.",
    6: "A block is skipped when the stream passes it by; in a history its sublayers write nothing instead.",
    7: "Influence and angle are guesses until the loss without the blocks is measured (--sweep).",
}
