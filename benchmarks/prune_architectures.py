"""Write ``docs/prune-architectures.md``: every language model class of transformers, cut, saved, read back.

The classes and their small random models are those of ``benchmarks/architectures.py``; each is tried in a
process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks._harness import versions
from benchmarks.architectures import BLOCKS, NOT_BUILT, WIDTH, WRONG, brief, build, classes, tried, zoo_cases
from mainstem.errors import MainstemError
from mainstem.surgery import Cut, Origin, cut, save_pruned

ROOT = Path(__file__).parents[1]
WORKS, IN_PART, REFUSED = "every cut works", "some cuts work", "refused"
SETS = ((0,), (1,), (2,), (3,), (1, 2), (0, 3))
LONGEST = 150
NEEDLESS = (
    r"Class validation error for validator '\w+': |Error\(s\) in loading state_dict for \w+: ",
    r"StrictDataclassClassValidationError: |(?<=: )ValueError: ",
    r"; (remove others|give a [^;]*|the model was not saved)\.$|, so the model was not saved\.$",
    r"(?<=[a-z)`'\]])\. .*$",  # of several sentences the first
)
"""What a reason says beside the reason, which the row says too or which is advice to the user."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What came of one class.

    Attributes:
        outcome: one of the words above; ``reason``: the first refusal, or what failed.
        cuts: how many of `SETS` were cut, saved and read back equal to the bit.
        sublayers: which sublayers of block 1 can be silenced.
        generation: what was found about generation with and without a cache.
    """

    name: str
    kind: str
    outcome: str
    reason: str = ""
    cuts: int = 0
    sublayers: str = ""
    generation: str = ""

    def line(self) -> str:
        """Return the row of the table."""
        cells = (f"`{self.name}`", self.kind, f"{self.cuts}/{len(SETS)}", self.sublayers, self.generation)
        return "| " + " | ".join((*cells, self.why())) + " |"

    def why(self) -> str:
        """Return the reason in one sentence of at most `LONGEST` characters."""
        text = self.reason.removeprefix(f"{self.name} ")
        for pattern in NEEDLESS:
            text = re.sub(pattern, "", text)
        text = text.rstrip(".")
        return text if len(text) <= LONGEST else text[: LONGEST - 3].rpartition(" ")[0] + " ..."


def attempt(name: str, kind: str, make: Callable[[], Any]) -> Row:
    """Build a class, cut it in every way, and save what was cut."""
    try:
        model: Any = make()
    except Exception as error:
        return Row(name, kind, NOT_BUILT, brief(error))
    refusals: list[str] = []
    generation: dict[str, None] = {}
    for blocks in SETS:
        try:
            generation[cut_and_saved(model, Cut(blocks=blocks))] = None
        except MainstemError as error:
            refusals.append(brief(error, whole=True))
    done = len(SETS) - len(refusals)
    silenced = (
        [part for part in ("attention", "feed_forward") if can_be_silenced(model, part)] if done else []
    )
    return Row(
        name,
        kind,
        REFUSED if not done else IN_PART if refusals else WORKS,
        next(iter(refusals), ""),
        done,
        ", ".join(silenced) or "none",
        "; ".join(generation),
    )


def cut_and_saved(model: Any, what: Cut) -> str:
    """Cut, save and read back; return what was found about generation."""
    depth = model.config.get_text_config().num_hidden_layers
    with tempfile.TemporaryDirectory() as folder:
        origin = Origin(source="small", num_blocks=depth, what=what)
        out = save_pruned(cut(model, what), None, Path(folder) / "out", origin)
        checks = json.loads((out / "prune.json").read_text("utf-8"))["checks"]
    rounded = checks["output"] != "equal to the bit"
    return checks["generation"] + (" (*aligned*)" if rounded else "")


def can_be_silenced(model: Any, part: str) -> bool:
    """Whether that sublayer of block 1 can be removed alone."""
    try:
        cut(model, Cut(**{part: (1,)}))
    except MainstemError:
        return False
    return True


HEADER = """# Architectures that can be cut

Made by `make prune-architectures`; do not edit. Every class that transformers lists for causal and masked
language modelling, built small from its own configuration ({width} wide, {blocks} blocks, random weights,
fp32); {versions}. {counts}.

From each, {number} sets of blocks are removed: {sets}. A set counts if `mainstem.surgery.cut` proves the
shorter model equal, bit for bit, to the whole one whose stream passes these blocks by, **and**
`save_pruned` reads its checkpoint back in plain transformers with the same weights and output to the bit, and
with the same tokens generated with a cache and without.

- **cuts**: how many of the sets.
- **alone**: which sublayers of block 1 can be removed alone (their last matrix zeroed; what they write is
  then exactly zero).
- *aligned*: equal to the bit once the weights of both models lie at the same alignment in memory, by which
  some kernels round.
- **why**: the first set that was refused, and the sentence that says why. Nothing is written then.
"""


def page(rows: list[Row]) -> str:
    """Return the page."""
    counts = Counter(row.outcome for row in rows)
    order = (WORKS, IN_PART, REFUSED, WRONG, NOT_BUILT)
    known = ", ".join(f"{k} {v}" for k, v in versions("transformers", "torch").items())
    lines = [
        HEADER.format(
            width=WIDTH,
            blocks=BLOCKS,
            versions=known,
            number=len(SETS),
            sets=", ".join(str(list(blocks)) for blocks in SETS),
            counts=f"{len(rows)} models; " + ", ".join(f"{o}: {counts[o]}" for o in order if counts[o]),
        )
    ]
    for outcome in (WORKS, IN_PART):
        if counts[outcome]:
            lines += [f"## {outcome.capitalize()}\n", "| class | kind | cuts | alone | generation | why |"]
            lines += ["|---" * 6 + "|", *(row.line() for row in rows if row.outcome == outcome), ""]
    for outcome, title in (
        (REFUSED, "Refused"),
        (WRONG, "Wrong"),
        (NOT_BUILT, "Not tried: no small model was built"),
    ):
        if counts[outcome]:
            lines += [f"## {title}\n", "| class | kind | why |", "|---|---|---|"]
            lines += [f"| `{r.name}` | {r.kind} | {r.why()} |" for r in rows if r.outcome == outcome]
            lines.append("")
    return "\n".join(lines)


def read_rows(kept: Path | None) -> dict[str, Row]:
    """Return the rows of a run that was interrupted, by name."""
    if kept is None or not kept.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in kept.read_text("utf-8").splitlines()]
    return {row.name: row for row in rows}


def main() -> None:
    """Try all classes and write the page; end with an error if one is wrong."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "prune-architectures.md")
    parser.add_argument("--only", nargs="*", default=None, help="names of classes; nothing is written")
    parser.add_argument(
        "--keep", type=Path, default=None, help="JSON lines to add rows to, and to go on from"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    known, rows, done = zoo_cases(), list[Row](), read_rows(arguments.keep)
    for name, kind in classes().items():
        if arguments.only is not None and name not in arguments.only:
            continue
        case = known.get(name)
        make = case.build if case else functools.partial(build, getattr(transformers, name))
        work = functools.partial(attempt, name, kind, make)
        row = done.get(name) or tried(work, functools.partial(Row, name, kind, WRONG))
        rows.append(row)
        print(f"{row.outcome}: {row.line()}", flush=True)
        if arguments.keep is not None and name not in done:
            with arguments.keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    if arguments.only is None:
        arguments.out.write_text(page(sorted(rows, key=lambda row: row.name)), encoding="utf-8")
        print(f"written: {arguments.out}")
    if wrong := [row.name for row in rows if row.outcome == WRONG]:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
