"""Rules of the house that no linter knows: who imports whom, how long a file is, which tests are skipped."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "mainstem"
TESTS = ROOT / "tests"

# docs/design.md, section 3: a room may import rooms of lower storeys, and `errors` is everyone's.
STOREYS = [
    {"connections"},
    {"tower"},
    {"sources", "observe", "measure"},
    {"surgery", "intervene", "training"},
    {"audit", "check"},
    {"server", "report"},
    {"cli"},
    {"__main__"},
]
STOREY = {room: number for number, rooms in enumerate(STOREYS) for room in rooms}
EVERYONES = {"errors"}
# Same storey: measure defines what a reducer is handed; what a removal costs is measured by intervening.
NEIGHBOURS = {("observe", "measure"), ("surgery", "intervene")}
STANDALONE = {"connections", "observe", "measure", "check"}
EXTRAS = ["transformers", "datasets", "rich", "typer", "accelerate", "gguf", "huggingface_hub", "tokenizers"]


def room_of(path: Path) -> str:
    """``src/mainstem/audit/run.py`` -> ``audit``; ``src/mainstem/errors.py`` -> ``errors``."""
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[tuple[int, str]]:
    """Line and room of every import of mainstem in a file, lazy ones in functions too."""
    package = ["mainstem", *path.relative_to(SRC).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "mainstem" else [module]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "mainstem" and len(parts) > 1:
                yield node.lineno, parts[1]


def test_imports_run_downwards() -> None:
    wrong: list[str] = []
    for path in sorted(SRC.rglob("*.py")):
        here = room_of(path)
        if here == "__init__" or here in EVERYONES:
            here_storey = -1
        else:
            assert here in STOREY, f"{path}: the room {here!r} has no storey in tests/test_house.py"
            here_storey = STOREY[here]
        for line, there in imported_rooms(path):
            if there == here or there in EVERYONES or there.startswith("__") or (here, there) in NEIGHBOURS:
                continue
            if STOREY.get(there, len(STOREYS)) >= here_storey:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {here} imports {there}")
    assert not wrong, "\n".join(wrong)


def test_the_design_says_which_rooms_are_built() -> None:
    """Docs/design.md lists every room of the house, and of these just the ones that are there as built."""
    text = (ROOT / "docs" / "design.md").read_text("utf-8")
    plan = re.findall(r"^      (\w+)(?:/|\.py) ", text, re.MULTILINE)
    assert set(plan) == {room for room in STOREY if room != "__main__"} | EVERYONES
    said = re.search(r"has a tenant: today (.*?); not yet (.*?)\.\n", text, re.DOTALL)
    assert said is not None
    built, missing = (set(re.findall(r"\w+", part)) - {"and", "py"} for part in said.groups())
    there = {room_of(path) for path in SRC.rglob("*.py")} - {"__init__", "__main__"} - EVERYONES
    assert built == there
    assert missing == set(plan) - there - EVERYONES


def test_the_checker_sees_imports_of_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SRC", tmp_path)
    path = tmp_path / "measure" / "deep" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import mainstem\nimport mainstem.tower\nimport torch, mainstem.audit.run\nfrom mainstem import cli\n"
        "from mainstem.report import a\nfrom ...errors import e\nfrom ..norms import f\nfrom . import g\n"
        "def lazy():\n    from mainstem.server import h\n"
    )
    assert [room for _, room in sorted(imported_rooms(path))] == [
        "tower", "audit", "cli", "report", "errors", "measure", "measure", "server"
    ]  # fmt: skip


@pytest.mark.parametrize("room", sorted(STANDALONE))
def test_what_stands_alone_pulls_in_no_extra(room: str) -> None:
    code = f"import sys, mainstem.{room}\nprint(*(m for m in {EXTRAS} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_importing_mainstem_imports_nothing_else() -> None:
    code = (
        "import sys, mainstem\nprint(*(m for m in sys.modules if m.startswith('mainstem.') or m == 'torch'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_files_and_functions_stay_small() -> None:
    large: list[str] = []
    for path in sorted(SRC.rglob("*.py")):
        text = path.read_text("utf-8")
        where = path.relative_to(ROOT)
        if (lines := text.count("\n")) > 600:
            large.append(f"{where}: {lines} lines; at most 600")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if (length := code_lines(node)) > 60:
                large.append(f"{where}:{node.lineno}: {node.name} has {length} lines; at most 60")
    assert not large, "\n".join(large)


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body, its docstring not counted."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


SKIPS = re.compile(r"pytest\.(?:mark\.)?(?:skip|skipif|xfail|importorskip)\b")


def test_every_skipped_test_is_in_quarantine() -> None:
    rows = (TESTS / "QUARANTINES.md").read_text("utf-8")
    missing: list[str] = []
    for path in sorted(TESTS.rglob("test_*.py")):
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            name = path.relative_to(TESTS).as_posix()
            if SKIPS.search(line) and name not in rows:
                missing.append(f"tests/{name}:{number} skips; give it a row in tests/QUARANTINES.md")
    assert not missing, "\n".join(missing)


def test_quarantine_names_only_tests_that_are_there() -> None:
    rows = re.findall(r"^\| `([^`]+\.py)", (TESTS / "QUARANTINES.md").read_text("utf-8"), re.MULTILINE)
    assert [row for row in rows if not (TESTS / row).is_file()] == []


def test_constraints_do_not_contradict_each_other() -> None:
    """`make test-oracle` installs under both files: a package pinned twice may not be installable."""
    pinned: dict[str, str] = {}
    for file in ("constraints.txt", "constraints-oracle.txt"):
        for line in (ROOT / file).read_text("utf-8").splitlines():
            if line and not line.startswith("#"):
                name = re.split(r"[=<>~! ]", line, maxsplit=1)[0].lower().replace("_", "-")
                assert name not in pinned, f"{name} stands in {pinned[name]} and in {file}; keep one row"
                pinned[name] = file
