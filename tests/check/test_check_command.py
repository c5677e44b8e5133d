"""`mainstem check` as people use and misuse it: statuses 0, 1 and 2, and nothing but JSON with --json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from mainstem import cli

BROKEN = Path(__file__).parent / "broken.py"
FEW = ("--depths", "2,4", "--only", "future-leak,growth,start-distance")

FACTORIES = f"""
import sys
sys.path.insert(0, {str(BROKEN.parent)!r})
from broken import LookAhead, Clean, clean, plain_stack

print("Hello from somebody's code")

def leaking(depth):
    print("Hello from somebody's factory")
    return Clean(depth, LookAhead)

def wide(depth, width):
    from mainstem.check import ResidualStack
    from broken import Plain
    return ResidualStack([Plain() for _ in range(depth)], width=width)

class Models:
    @staticmethod
    def build(depth):
        return clean(depth)

number = 3
"""


class Ran(NamedTuple):
    code: object
    out: str
    err: str


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Ran]:
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "syntax.py").write_text("def build(depth)\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit('usage: script.py [-h]')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setenv("COLUMNS", "120")

    def command(*args: object) -> Ran:
        capsys.readouterr()
        for name in ("factories", "syntax", "script"):
            sys.modules.pop(name, None)
        monkeypatch.setattr(sys, "argv", ["mainstem", "check", *map(str, args)])
        code: object = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = leaving.code or 0
        return Ran(code, *capsys.readouterr())

    return command


@pytest.mark.parametrize("place", ["factories:", "factories.py:", "./factories.py:"])
def test_a_finding_is_status_1(run: Callable[..., Ran], place: str) -> None:
    ran = run(place + "leaking", *FEW)
    assert ran.code == 1
    assert "future-leak" in ran.out
    assert "2 findings" in ran.out
    assert "Hello" not in ran.out
    assert "Hello from somebody's factory" in ran.err
    assert "future-leak 0/3" in ran.err


@pytest.mark.parametrize("name", ["clean", "Models.build", "plain_stack"])
def test_no_finding_is_status_0(run: Callable[..., Ran], name: str) -> None:
    ran = run(f"factories:{name}", *FEW)
    assert ran.code == 0
    assert "no finding" in ran.out


def test_json(run: Callable[..., Ran]) -> None:
    ran = run("factories:leaking", *FEW, "--json")
    assert ran.code == 1
    found = json.loads(ran.out)
    assert found["schema"] == "mainstem.check/1"
    assert found["subject"] == "factories:leaking"
    assert found["depths"] == [2, 4]
    assert {f["kind"] for f in found["findings"]} == {"future-leak"}
    for finding in found["findings"]:
        assert finding["figure"] > 0
        assert finding["where"] == "position 0, first in blocks.0.extra"
    assert [p["kind"] for p in found["passed"]] == ["growth"]
    assert [(s["kind"], bool(s["reason"])) for s in found["skipped"]] == [("start-distance", True)]


def test_width_and_tokens_are_passed_on(run: Callable[..., Ran]) -> None:
    found = json.loads(run("factories:wide", *FEW, "--width", 8, "--tokens", 5, "--json").out)
    assert found["subject_kind"] == "residual stack"
    assert found["findings"] == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("factories",), "'factories' names no factory; expected package.module:factory"),
        (("nowhere:build",), "nowhere cannot be imported (ModuleNotFoundError"),
        (("gone.py:build",), "there is no file 'gone.py'"),
        (("syntax.py:build",), "syntax.py cannot be imported (SyntaxError"),
        (("script.py:build",), "script.py cannot be imported (SystemExit: usage: script.py [-h])."),
        (("script:build",), "script cannot be imported (SystemExit: usage: script.py [-h])."),
        (("factories:gone",), "factories has no 'gone'"),
        (("factories:number",), "factories:number is a int; expected a callable"),
        (("factories:clean", "--width", "8"), "the factory, called with 2, width=8, raised TypeError"),
        (("factories:clean", "--depths", "2,x"), "depths '2,x' are no numbers"),
        (("factories:clean", "--depths", "0"), "depths [0] must be"),
        (("factories:clean", "--tokens", "1"), "a check with 1 token(s)"),
        (("factories:clean", "--only", "leak"), "there is no check 'leak'"),
        (("factories:clean", "--colour"), "--colour"),
        ((), "FACTORY"),
    ],
)
def test_misuse_is_status_2_and_one_sentence(
    run: Callable[..., Ran], args: tuple[str, ...], says: str
) -> None:
    ran = run(*args)
    assert ran.code == 2
    assert ran.out == ""
    assert says in ran.err
    assert "Traceback" not in ran.err


def test_the_path_is_as_it_was(run: Callable[..., Ran]) -> None:
    before = list(sys.path)
    run("factories:number")
    run("factories.py:number")
    assert [p for p in sys.path if p != str(BROKEN.parent)] == [p for p in before if p != str(BROKEN.parent)]


@pytest.mark.parametrize("name", ["pre_norm", "mhc_tower"])
def test_a_connection_of_ours_by_name(run: Callable[..., Ran], name: str) -> None:
    """All of them are checked by test_own_connections.py."""
    ran = run(f"mainstem.check.own:{name}", *FEW, "--json")
    assert ran.code == 0, ran.out


def test_what_is_no_connection_of_ours(run: Callable[..., Ran]) -> None:
    ran = run("mainstem.check.own:post_nrom")
    assert ran.code == 2
    assert "mainstem.check.own has no 'post_nrom'" in ran.err
