"""A GGUF is converted once, exactly, atomically; a torn one is refused in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import pytest
import torch
from tiny_sources import write_gguf
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from mainstem.errors import SourceError
from mainstem.sources import _gguf as gguf_module
from mainstem.sources import load_model
from mainstem.sources._cache import MANIFEST, cached_folder, is_whole


@pytest.fixture
def gguf_file(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tokenizer)


def test_weights_equal_transformers_own_dequantisation(gguf_file: Path, tmp_path: Path) -> None:
    loaded = load_model(gguf_file, cache_dir=tmp_path / "cache")
    reference = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    ours, theirs = loaded.model.state_dict(), reference.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    # Tied, as a GGUF without an output matrix means; and a second independent reader agrees.
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    packed = next(t for t in gguf.GGUFReader(str(gguf_file)).tensors if t.name == "blk.1.ffn_down.weight")
    direct = torch.from_numpy(gguf.dequantize(packed.data, packed.tensor_type).copy())
    assert torch.equal(loaded.model.model.layers[1].mlp.down_proj.weight, direct)


def test_the_tokenizer_comes_along(
    gguf_file: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    loaded = load_model(gguf_file, cache_dir=tmp_path / "cache")
    text = "This program is free software:\n  you can redistribute it"
    assert loaded.tokenizer(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)


def test_second_load_reads_the_cache(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_model(gguf_file, cache_dir=tmp_path / "cache")

    def refuse(*_: object) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(gguf_module, "_convert", refuse)
    moved = gguf_file.rename(tmp_path / "renamed.gguf")  # the key is the content, not the name
    second = load_model(moved, cache_dir=tmp_path / "cache")
    assert first.provenance["weights_sha256"] == second.provenance["weights_sha256"]
    before, after = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_other_content_is_another_entry(
    gguf_file: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    first = load_model(gguf_file, cache_dir=tmp_path / "cache")
    write_gguf(gguf_file, tokenizer, seed=1)
    second = load_model(gguf_file, cache_dir=tmp_path / "cache")
    assert first.provenance["weights_sha256"] != second.provenance["weights_sha256"]
    assert not torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)


def test_a_damaged_cache_entry_is_made_again(gguf_file: Path, tmp_path: Path) -> None:
    first = load_model(gguf_file, cache_dir=tmp_path / "cache")
    (entry,) = (tmp_path / "cache" / "gguf").iterdir()
    weights = entry / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 0xFF  # one byte of one weight: the size stays, the sum does not
    del first  # its tensors map the file
    weights.unlink()
    weights.write_bytes(data)
    assert not is_whole(entry)
    second = load_model(gguf_file, cache_dir=tmp_path / "cache")
    assert is_whole(entry)
    assert [path.name for path in (tmp_path / "cache" / "gguf").iterdir()] == [entry.name]
    reference = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    assert torch.equal(second.model.model.norm.weight, reference.model.norm.weight)


@pytest.mark.parametrize("keep", [0.01, 0.5, 0.999])
def test_a_torn_file_is_refused_and_leaves_nothing(gguf_file: Path, tmp_path: Path, keep: float) -> None:
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(SourceError, match=r"tiny\.gguf is torn"):
        load_model(gguf_file, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "not.gguf"
    path.write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(SourceError, match="is not a GGUF file: it begins with"):
        load_model(path)


def test_gguf_is_left_as_it_was(gguf_file: Path, tmp_path: Path) -> None:
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    load_model(gguf_file, cache_dir=tmp_path / "cache")
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before


class TestCachedFolder:
    def test_a_failure_leaves_nothing(self, tmp_path: Path) -> None:
        def half(folder: Path) -> dict[str, str]:
            (folder / "part").write_text("half")
            raise RuntimeError("power cut")

        with pytest.raises(RuntimeError, match="power cut"):
            cached_folder(tmp_path / "key", half)
        assert list(tmp_path.iterdir()) == []

    def test_many_at_once_get_one_whole_result(self, tmp_path: Path) -> None:
        barrier = threading.Barrier(4)
        results: list[str] = []

        def make(folder: Path) -> dict[str, str]:
            barrier.wait(timeout=10)  # all four are inside at the same time
            (folder / "data").write_text("the same")
            return {}

        def work() -> None:
            results.append((cached_folder(tmp_path / "key", make) / "data").read_text())

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == ["the same"] * 4
        assert [path.name for path in tmp_path.iterdir()] == ["key"]
        assert is_whole(tmp_path / "key")

    def test_a_folder_without_a_manifest_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "key").mkdir()
        (tmp_path / "key" / "data").write_text("of unknown origin")

        def make(folder: Path) -> dict[str, str]:
            (folder / "data").write_text("whole")
            return {"by": "test"}

        folder = cached_folder(tmp_path / "key", make)
        assert (folder / "data").read_text() == "whole"
        assert json.loads((folder / MANIFEST).read_text())["by"] == "test"


def test_importing_sources_imports_no_optional_package() -> None:
    code = (
        "import sys, mainstem.sources\n"
        "print([m for m in ('transformers', 'datasets', 'gguf', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
