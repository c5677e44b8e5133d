"""Write ``docs/identity-table.md``: the books of every architecture that the tests hold mainstem against.

The cases are those of ``tests/observe/zoo.py``; nothing here knows an architecture.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks._harness import versions
from mainstem.errors import StreamNotFoundError
from mainstem.observe import find_stream, ledger, record

ROOT = Path(__file__).parents[1]

HEADER = """# Identity errors

Made by `make identity-table`; do not edit. Small random models (64 wide, norm weights and biases shaken) in
fp32 on {versions}, 2 sequences of 11 tokens.

- **additivity**: largest `|after - (carried + writes)| / |after|` over sublayers and tokens.
- **continuity**: largest difference between what a sublayer carries and what the one before left; 0 where it
  is the very same tensor.
- **ledger**: `|sum of all contributions - final state| / |final state|`, all coefficients frozen.
- **carry**, **then**: what happens to the stream before and after each addition. `none`: no residual.
"""

COLUMNS = [
    "architecture",
    "blocks",
    "sublayers",
    "streams",
    "writes",
    "carry",
    "then",
    "additivity",
    "continuity",
    "ledger",
    "note",
]


def row(name: str, case: Any) -> str:
    """Return the table row of one case."""
    model, inputs = case.build(), case.inputs()
    stream_map = find_stream(model, inputs, source=case.source)
    with torch.no_grad():
        books = record(model, inputs, stream_map).books
    error = ledger(model, inputs, stream_map).error
    kinds = dict.fromkeys("+".join(w.kind for w in site.writes) for site in stream_map.sites)
    cells = [
        name,
        len(stream_map.blocks),
        len(stream_map.sites),
        stream_map.num_streams,
        ", ".join(kinds),
        "/".join(dict.fromkeys(site.carry for site in stream_map.sites)),
        "/".join(dict.fromkeys(site.then for site in stream_map.sites)),
        *(f"{value:.1e}" if value else "0" for value in (books.additivity, books.continuity, error)),
        case.note,
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def refusals(cases: dict[str, Any]) -> Iterator[str]:
    """Yield what is said about models that have no single stream."""
    yield "\n## What cannot be expressed\n"
    for name, case in cases.items():
        try:
            find_stream(case.build(), case.inputs())
        except StreamNotFoundError as error:
            yield f"- **{name}**: {case.note}. mainstem says: {error}"
        else:
            raise SystemExit(f"{name} was to be refused and was found; correct the zoo.")


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "identity-table.md")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "observe"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    import zoo  # only now is it on the path

    known = versions("torch", "transformers")
    lines = [HEADER.format(versions=", ".join(f"{k} {v}" for k, v in known.items()))]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    real = zoo.REAL if zoo.minilm_folder() is not None else {}
    for name, case in (zoo.CASES | real).items():
        lines.append(row(name, case))
        print(lines[-1], flush=True)
    lines += refusals(zoo.REFUSED)
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
