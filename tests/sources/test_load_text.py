"""Texts: what a name means, what is read, and what is refused."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.errors import MissingExtraError, SourceError
from mainstem.sources import load_text
from mainstem.sources._files import read_utf8


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    data = "une ligne\r\n雪\n\tfin 🌊".encode()
    path = tmp_path / "a b.txt"
    path.write_bytes(data)
    text = load_text(str(path))
    assert text.kind == "file"
    assert text.read().encode() == data
    assert text.read().encode() == data  # and again
    assert text.sha256() == hashlib.sha256(data).hexdigest()


def test_the_shipped_text_is_the_one_that_was_measured(gpl_text: Path) -> None:
    assert load_text(gpl_text).sha256() == "3972dc9744f6499f0f9b2dbf76696f2ae7ad8af9b23dde66d6af86c9dfb36986"


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfword")
    assert load_text(tmp_path / "bom.txt").read() == "word"


@given(text=st.text(min_size=1), chunk=st.integers(1, 7))
def test_pieces_join_to_the_file(text: str, chunk: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("pieces") / "t.txt"
    path.write_bytes(text.encode())
    assert "".join(read_utf8(path, chunk)) == text.removeprefix("\ufeff")


@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 18])
@pytest.mark.parametrize(
    ("data", "byte"),
    [(b"good \xe9 bad", 5), ("зима".encode() + b"\xd0", 8), (b"\xef\xbb\xbfab\xff", 5), (b"\x80", 0)],
)
def test_a_bad_byte_is_named_with_its_place(tmp_path: Path, data: bytes, byte: int, chunk: int) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=rf"latin\.txt is not UTF-8: byte {byte} is 0x{data[byte]:02x} "):
        list(read_utf8(path, chunk))


def test_a_folder_is_its_files_by_sorted_path(tmp_path: Path) -> None:
    for name, words in {"b.txt": "two", "a/z.txt": "one", "c.md": "three", ".hidden/x.txt": "no"}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(words)
    assert load_text(tmp_path).read() == "one\n\ntwo\n\nthree"
    only = load_text(tmp_path, pattern="**/*.txt", separator="|")
    assert only.read() == "one|two"
    assert only.provenance["num_files"] == 2
    with pytest.raises(SourceError, match=r"no file that matches '\*\.rst'"):
        load_text(tmp_path, pattern="*.rst")


@pytest.mark.parametrize("words", ["two words", "a/b\nis text by its second line", "text:lonely", "x " * 300])
def test_words_are_taken_as_words(words: str) -> None:
    text = load_text(words)
    assert text.kind == "literal"
    assert text.read() == words.removeprefix("text:")


@pytest.mark.parametrize(
    "spec",
    ["data/no such.txt", "gpl.txt", "./gpl", "~/texts", "no/such/folder", "either this/that", "my notes.md"],
)
def test_what_looks_like_a_path_is_never_audited_as_words(spec: str) -> None:
    with pytest.raises(SourceError, match="There is no file or folder") as error:
        load_text(spec)
    assert "text:WORDS" in str(error.value)
    assert load_text(spec, kind="literal").read() == spec


def test_one_unknown_word_is_no_text_either() -> None:
    with pytest.raises(SourceError, match="no file, folder or reachable dataset 'someword'"):
        load_text("someword")


@pytest.mark.parametrize("empty", ["", "  \n", "text:", "text: \t"])
def test_an_empty_text_is_refused(empty: str) -> None:
    with pytest.raises(SourceError, match="text is empty"):
        load_text(empty)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n" * 10)
    with pytest.raises(SourceError, match=r"file '.*empty\.txt' holds nothing but white space"):
        load_text(tmp_path / "empty.txt")


class TestDatasets:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        rows = [
            {"text": "first row", "id": "a"},
            {"text": None, "id": "b"},
            {"text": "second row", "id": "c"},
        ]
        folder = tmp_path / "set"
        folder.mkdir()
        (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        return folder

    def test_rows_are_joined(self, folder: Path) -> None:
        text = load_text(f"dataset:{folder}")
        assert text.read() == "first row\n\nsecond row"
        assert text.provenance["column"] == "text"
        assert text.sha256() is None
        assert load_text(folder, kind="dataset", column="id", separator=" ").read() == "a b c"

    def test_split_and_column_are_named_when_unknown(self, folder: Path) -> None:
        with pytest.raises(SourceError, match=r"no column 'body'\. It has: text, id"):
            load_text(folder, kind="dataset", column="body")
        with pytest.raises(SourceError, match="Cannot open dataset"):
            load_text(folder, kind="dataset", split="nosuch")

    def test_a_missing_package_names_its_command(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'mainstem\[hf\]'"):
            load_text(folder, kind="dataset")
