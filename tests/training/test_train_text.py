"""From a text to windows: against tokenising it again by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import datasets
from tiny_runs import tiny

from mainstem.errors import ConfigError, SourceError
from mainstem.sources import load_text
from mainstem.training.data import END, TrainingText, prepare_text

WORDS = "Ein Käse, drei Mäuse: «naïve» façades — 雨が降る 🧀 "


def prepared(text: str, **changes: Any) -> TrainingText:
    config = tiny(text=text, **changes)
    return prepare_text(config, load_text(text, streaming=config.streaming))


def windows(text: TrainingText) -> list[list[int]]:
    """All windows in the order of the text: training and held-out ones choose from the same table."""
    return text.train._data.column("input_ids").to_pylist()


def byte_ids(*documents: str) -> list[int]:
    """Bytes by the byte tokenizer's own table, with the end of text around each document."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = {c: i for i, c in enumerate([END, *sorted(ByteLevel.alphabet())])}
    # GPT-2's table: printable bytes stand for themselves, the others are moved up from 256 in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    characters = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
    ids = [0]
    for document in documents:
        ids += [alphabet[characters[b]] for b in document.encode()] + [0]
    return ids


def cut(ids: list[int], window: int) -> list[list[int]]:
    return [ids[start : start + window] for start in range(0, len(ids) - window + 1, window)]


def test_windows_are_the_bytes_of_the_text() -> None:
    text = WORDS * 40
    found = prepared(f"text:{text}", held_out=0.1)
    assert windows(found) == cut(byte_ids(text), 16)


def test_documents_of_a_folder_are_joined_by_the_end_of_text(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second " * 60)
    (tmp_path / "a.txt").write_text("first " * 60)
    (tmp_path / ".hidden").write_text("no")
    assert windows(prepared(str(tmp_path))) == cut(byte_ids("first " * 60, "second " * 60), 16)


def test_a_bpe_is_trained_on_the_text(gpl_text: Path) -> None:
    found = prepared(str(gpl_text), tokenizer="bpe:400", window=32)
    assert len(found.tokenizer) == 400
    ids = [0, *found.tokenizer(gpl_text.read_text("utf-8"))["input_ids"], 0]
    assert windows(found) == cut(ids, 32)
    assert found.tokenizer.decode(ids[1:-1]) == gpl_text.read_text("utf-8")


def test_held_out_windows_are_in_no_training(gpl_text: Path) -> None:
    found = prepared(str(gpl_text), held_out=0.05)
    whole = windows(found)
    kept, train = found.held_out._indices.column(0).to_pylist(), found.train._indices.column(0).to_pylist()
    assert sorted(kept + train) == list(range(len(whole)))
    assert len(kept) == pytest.approx(0.05 * len(whole), rel=0.3)
    thirds = [sum(i * len(whole) <= 3 * k < (i + 1) * len(whole) for k in kept) for i in range(3)]
    assert min(thirds) > len(kept) // 6  # from all over the text
    assert found.held_out["input_ids"][:] == [whole[i] for i in kept]


def test_bytes_per_token_is_exact() -> None:
    """Every window begins and ends within a character now and then; each byte counts once all the same."""
    found = prepared(f"text:{WORDS * 60}", held_out=0.2)
    predicted = [token for row in found.held_out["input_ids"] for token in row[1:]]
    assert found.bytes_per_token == sum(token != 0 for token in predicted) / len(predicted)


def test_bytes_per_token_of_a_bpe(gpl_text: Path) -> None:
    found = prepared(str(gpl_text), tokenizer="bpe:500")
    rows = found.held_out["input_ids"][:]
    decode = found.tokenizer.decode
    assert all(ord(c) < 128 for row in rows for c in decode(row))  # so that decoding is exact too
    num_bytes = sum(len(decode(row[1:], skip_special_tokens=True)) for row in rows)
    assert found.bytes_per_token == num_bytes / sum(len(row) - 1 for row in rows)


def test_a_pretrained_tokenizer_from_a_folder(gpl_text: Path, tmp_path: Path) -> None:
    first = prepared(str(gpl_text), tokenizer="bpe:300")
    first.tokenizer.save_pretrained(tmp_path)
    second = prepared(str(gpl_text), tokenizer=str(tmp_path))
    assert windows(first) == windows(second)
    assert first.bytes_per_token == second.bytes_per_token


def packings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows whenever a text is packed."""
    made: list[int] = []
    pack = datasets.Dataset.from_generator

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return pack(*args, **kwargs)

    monkeypatch.setattr(datasets.Dataset, "from_generator", counted)
    return made


def test_packed_once_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path / "cache"))
    made = packings(monkeypatch)
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("some words " * 100)
    two.write_text("some words " * 100)
    a, b = prepared(str(one)), prepared(str(two))
    assert len(made) == 1
    assert windows(a) == windows(b)
    stamp = one.stat()
    one.write_text("more words " * 100)  # of the same length, at the same time
    os.utime(one, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert windows(prepared(str(one))) != windows(a)
    assert len(made) == 2
    prepared(str(two), window=8)
    assert len(made) == 3


def test_the_cache_of_datasets_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    prepared("text:" + "only here " * 100)
    assert not (tmp_path / "datasets").exists()
    (folder,) = (tmp_path / "cache" / "windows").iterdir()
    assert {path.suffix for path in folder.iterdir()} == {".arrow", ".json"}


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of JSON lines, as a dataset of the hub is one."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    folder = tmp_path / "rows"
    folder.mkdir()
    texts = [f"row {i}: " + "words of the row " * 4 for i in range(200)]
    datasets.Dataset.from_dict({"text": texts}).to_json(folder / "train.jsonl")
    return folder


def texts_of(folder: Path) -> list[str]:
    return [row["text"] for row in datasets.load_dataset(str(folder), split="train")]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # datasets leaves its reader of JSON open
def test_a_dataset_in_a_folder(rows: Path) -> None:
    found = prepared(f"dataset:{rows}")
    assert windows(found) == cut(byte_ids(*texts_of(rows)), 16)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_dataset_that_changed_is_packed_again(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = packings(monkeypatch)
    before = windows(prepared(f"dataset:{rows}"))
    texts = texts_of(rows)
    datasets.Dataset.from_dict({"text": [*texts[:-1], "a last row " * 4]}).to_json(rows / "train.jsonl")
    assert windows(prepared(f"dataset:{rows}")) != before
    assert len(made) == 2


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_streamed_dataset_holds_its_beginning_out(rows: Path) -> None:
    found = prepared(f"dataset:{rows}", streaming=True)
    expected = cut(byte_ids(*texts_of(rows)), 16)
    assert found.held_out["input_ids"][:] == expected[:128]
    assert [row["input_ids"] for row in found.train] == expected[128:]


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(SourceError, match="gives 1 windows of 16 tokens, too few"):
        prepared("text:twenty letters or so")


@pytest.mark.parametrize("spec", ["bpe:", "bpe:many", "bpe:256"])
def test_a_tokenizer_of_no_size(spec: str) -> None:
    with pytest.raises(ConfigError, match="at least 257, such as bpe:2048"):
        prepared("text:" + "words " * 100, tokenizer=spec)


def test_a_tokenizer_that_is_not_there() -> None:
    with pytest.raises(SourceError, match=r"No tokenizer 'nobody/nothing' could be loaded"):
        prepared("text:" + "words " * 100, tokenizer="nobody/nothing")
