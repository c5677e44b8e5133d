"""`mainstem check` on published releases, each in an environment of its own, and the page of what it found.

``make check-releases`` makes the environments and asserts; ``make check-report`` runs this file, which writes
``docs/check-report.md`` from the command's JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from mainstem.check import check, load_factory
from mainstem.check.own import subject_names
from mainstem.report.check import rows

ROOT = Path(__file__).parents[2]
FACTORIES = Path(__file__).with_name("release_factories.py")
ENVIRONMENTS = os.environ.get("MAINSTEM_CHECK_ENVIRONMENTS", str(ROOT / ".venv-check-"))
"""What the folders of the environments begin with; the release follows."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One factory of one release.

    Attributes:
        release: name and version.
        factory: its name in release_factories.py.
        options: what is special about it, for the page.
        kinds: the findings that are expected.
    """

    release: str
    factory: str
    options: str
    kinds: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return f"{self.release}-{self.factory}"

    @property
    def python(self) -> Path:
        return Path(f"{ENVIRONMENTS}{self.release}/bin/python")

    def run(self) -> tuple[int, dict[str, Any]]:
        """Return the command's status and its JSON."""
        command = [str(self.python), "-m", "mainstem", "check", f"{FACTORIES}:{self.factory}", "--json"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "LOGURU_LEVEL": "ERROR"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-2000:]}")
        return done.returncode, json.loads(done.stdout)


XT_NEW, XT_OLD, HC = "x-transformers-2.31.10", "x-transformers-2.12.2", "hyper-connections-0.4.11"
CASES = [
    Case(XT_NEW, "x_transformers_plain", "defaults"),
    Case(
        XT_NEW,
        "x_transformers_4_streams",
        "`num_residual_streams=4`",
        frozenset({"growth", "non-finite", "mixing-sums"}),
    ),
    Case(XT_NEW, "x_transformers_orthogonal", "`orthog_residual=True`", frozenset({"future-leak"})),
    Case(XT_NEW, "x_transformers_mv_split", "`mv_split_residual=True`", frozenset({"future-leak"})),
    Case(XT_OLD, "x_transformers_plain", "defaults"),
    Case(XT_OLD, "x_transformers_4_streams", "`num_residual_streams=4`"),
    Case(HC, "hyper_connections", "classic, 4 streams"),
    Case(HC, "mhc_v1", "mHC v1, 4 streams"),
    Case(HC, "mhc_v1_4_fractions", "mHC v1, 4 streams, `num_fracs=4`", frozenset({"mixing-sums"})),
]

OWN = [name + form for name in subject_names() for form in ("", "_tower")]

HEADER = """# What `mainstem check` finds in published releases

Made by `make check-report` from the command's JSON; do not edit. Each release runs in an environment of its
own, built small by [release_factories.py](../tests/check/release_factories.py) (width 32, fp32, weights as
the package initialises them) at depths 2, 4, 8, 16 and 24, on {versions}. `make check-releases` asserts the
findings. A figure is that of the smallest case that shows the fault; what was not looked at is named below
each table. What each check does: [check.md](check.md).
"""


def page(
    results: list[tuple[Case, dict[str, Any]]], own: list[tuple[str, dict[str, Any]]], versions: str
) -> str:
    """Return the page."""
    lines = [HEADER.format(versions=versions)]
    lines += ["| release | options | findings |", "| --- | --- | --- |"]
    for case, found in results:
        kinds = list(dict.fromkeys(f["kind"] for f in found["findings"]))
        lines.append(f"| {case.release} | {case.options} | {', '.join(kinds) or 'none'} |")
    bad = [name for name, found in own if found["findings"]]
    lines += ["", "## Our own connections", ""]
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(n.removesuffix("_tower") for n, _ in own))
    lines.append(
        f"{len(own)} subjects (`mainstem check mainstem.check.own:NAME` and `:NAME_tower`), all checks, "
        f"{'no finding' if not bad else 'findings in ' + ', '.join(bad)}: {names}."
    )
    for case, found in results:
        lines += [
            "",
            f"## {case.release}, {case.options}",
            "",
            "| check | verdict | figure | what was found |",
        ]
        lines.append("| --- | --- | ---: | --- |")
        lines += [f"| {' | '.join(row)} |" for row in rows(found) if row[1] != "skipped"]
        skipped = [f"{s['kind']} ({s['reason']})" for s in found["skipped"]]
        lines += ["", f"Not looked at: {'; '.join(skipped)}."] if skipped else []
    return "\n".join(lines) + "\n"


def run_all(folder: Path) -> None:
    """Run everything and keep each JSON in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        print(case.name, file=sys.stderr, flush=True)
        (folder / f"{case.name}.json").write_text(json.dumps(case.run()[1], indent=1) + "\n")
    for name in OWN:
        print(name, file=sys.stderr, flush=True)
        found = check(load_factory(f"mainstem.check.own:{name}"), name=name).to_dict()
        (folder / f"own-{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def write_page(folder: Path) -> None:
    """Make the page of the JSON in ``folder``."""

    def read(name: str) -> dict[str, Any]:
        return json.loads((folder / f"{name}.json").read_text())

    text = page(
        [(case, read(case.name)) for case in CASES],
        [(name, read(f"own-{name}")) for name in OWN],
        f"torch {torch.__version__.partition('+')[0]}",
    )
    (ROOT / "docs" / "check-report.md").write_text(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(Path(sys.argv[1]))
    write_page(Path(sys.argv[1]))
