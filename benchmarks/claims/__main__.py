"""Write ``docs/claims.md``: eight sentences of the textbook, each with a verdict.

    python -m benchmarks.claims

About 20 minutes on 2 cores, most of it the trainings of claims 4 and 5.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks._harness import versions
from benchmarks.claims import _bank, _floors, _training, _word
from benchmarks.claims._page import Claim
from benchmarks.claims._towers import tokens, trained

ROOT = Path(__file__).parents[2]

HEADER = """# The claims, measured

Made by `make claims`; do not edit. torch {torch}, CPU. The rule that gives a
verdict is in the docstring of the function that measures it (`benchmarks/claims/`), written before the
figure was seen (but for claim 1, whose probe was at first fitted on other token types only).

Towers *at the start* have initial values N(0, 1/width), width 64; the *trained* ones are the twin towers
that come with mainstem (96 blocks, same data, seed and budget; `mainstem audit` shows them). Text: 8
windows of 128 tokens (claim 1: 32) of what was held out of their training.

| | claim | verdict |
|---|---|---|
{summary}
"""


def measure(store: Path) -> list[Claim]:
    """Measure all of them; ``store`` holds the trainings that are done, so that a broken-off run goes on."""
    started = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {what}", file=sys.stderr, flush=True)

    towers: _word.Towers = {}
    for name, packaged in (("with, trained", "tower96"), ("without, trained", "tower96_no_residual")):
        tower, tokenizer = trained(packaged)
        towers[name] = (tower, tokens(tokenizer, 32))
    plain = towers["with, trained"][1]
    tell("measuring: word")
    claims = [_word.word(towers, plain)]
    towers = {name: (tower, ids[:8]) for name, (tower, ids) in towers.items()}
    plain = plain[:8]
    for function in (_word.ledger, _floors.bad_floor, _floors.gather, _word.growth):
        tell(f"measuring: {function.__name__}")
        claims.append(function(towers, plain))
    tell("measuring: meaning")
    claims.append(_bank.meaning())
    runs = _training.all_runs(tell, store)
    claims += [_training.deeper(runs), _training.signals(runs)]
    return sorted(claims, key=lambda claim: claim.number)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, default=ROOT / "out" / "claims-trainings.json")
    store = parser.parse_args().store
    store.parent.mkdir(parents=True, exist_ok=True)
    claims = measure(store)
    summary = "\n".join(
        f"| {c.number} | {c.text} | **{c.verdict}**{' ' + c.condition if c.condition else ''} |"
        for c in claims
    )
    page = HEADER.format(torch=versions("torch")["torch"], summary=summary)
    page += "\n" + "\n\n".join(claim.markdown() for claim in claims) + "\n"
    (ROOT / "docs" / "claims.md").write_text(page, "utf-8")
    print(json.dumps({str(claim.number): claim.verdict for claim in claims}))


if __name__ == "__main__":
    main()
