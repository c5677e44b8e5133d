"""Windows: the right tokens, masks and positions, and no more of the text read than needed."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_sources import llama_config, train_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    BertForMaskedLM,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

from mainstem.errors import SourceError
from mainstem.sources import TextSource, WindowStream, load_text, make_windows
from mainstem.sources import _tokens as tokens_module
from mainstem.sources._tokens import first_tokens

TEXT = "This program is distributed in the hope that it will be useful, but WITHOUT ANY WARRANTY"


def wrap(core: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def unigram(text: str) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.train_from_iterator(
        text.splitlines(),
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        ),
    )
    return wrap(core)


def wordpiece(text: str) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.train_from_iterator(
        [text], trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    )
    return wrap(core)


def unsplit_bpe(text: str) -> PreTrainedTokenizerFast:
    """As Gemma's: no pre-tokeniser, the whole text is one piece."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.train_from_iterator(
        text.splitlines(), trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    )
    return wrap(core)


@pytest.fixture(scope="module")
def tokenizers_of_all_kinds(gpl_text: Path) -> dict[str, PreTrainedTokenizerFast]:
    text = gpl_text.read_text("utf-8")[:6000]
    makers = {"bytes": train_tokenizer, "unigram": unigram, "wordpiece": wordpiece, "unsplit": unsplit_bpe}
    return {name: make(text) for name, make in makers.items()}


@pytest.fixture
def tiny_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of about 200 characters instead of 260,000, so that short texts have many seams."""
    for name, value in {
        "_SEGMENT": 200,
        "_SMALLEST": 120,
        "_MARGIN": 40,
        "_OVERLAP": 80,
        "_AGREE": 6,
    }.items():
        monkeypatch.setattr(tokens_module, name, value)


@pytest.mark.usefixtures("tiny_segments")
@pytest.mark.parametrize("kind", ["bytes", "unigram", "wordpiece", "unsplit"])
@pytest.mark.parametrize("limit", [None, 2, 50, 777])
def test_segments_give_the_tokens_of_the_whole(
    tokenizers_of_all_kinds: dict[str, Any], gpl_text: Path, kind: str, limit: int | None
) -> None:
    tokenizer = tokenizers_of_all_kinds[kind]
    words = gpl_text.read_text("utf-8")[:9000] + " 🌊🌊 naïve зима 雪が降る " * 20 + " " * 300 + "the end"
    whole = tokenizer(words, add_special_tokens=False)["input_ids"]
    text = load_text(words, kind="literal")
    # Without an error: no need here of tokenising a growing prefix again and again.
    stitcher = tokens_module._Stitcher(tokenizer, tokens_module._Reader(text), 777)
    assert [token for piece in stitcher.pieces() for token in piece][:777] == whole[:777]
    found = first_tokens(tokenizer, text, limit)
    assert list(found.ids) == whole[:limit]
    assert found.whole_text == (limit is None or limit >= len(whole))


@pytest.mark.usefixtures("tiny_segments")
@settings(max_examples=60, deadline=None)
@given(
    words=st.text(st.sampled_from("ab e\n\t.'é🌊雪"), min_size=300, max_size=900), limit=st.integers(2, 400)
)
def test_no_text_is_cut_differently_at_a_seam(words: str, limit: int) -> None:
    tokenizer = _session_tokenizer()
    text = TextSource(
        kind="literal", name="t", documents=lambda: [[words[i : i + 50] for i in range(0, 900, 50)]]
    )
    found = first_tokens(tokenizer, text, limit)
    assert list(found.ids) == tokenizer(words, add_special_tokens=False)["input_ids"][:limit]


_TOKENIZER: list[PreTrainedTokenizerFast] = []


def _session_tokenizer() -> PreTrainedTokenizerFast:
    if not _TOKENIZER:
        _TOKENIZER.append(train_tokenizer(TEXT * 3 + "aaaa abab bbb    \n\n\n eeee"))
    return _TOKENIZER[0]


@pytest.mark.usefixtures("tiny_segments")
def test_a_slow_tokenizer_gets_the_same_tokens(
    tokenizers_of_all_kinds: dict[str, Any], gpl_text: Path
) -> None:
    fast = tokenizers_of_all_kinds["bytes"]

    class Slow:
        is_fast = False

        def __call__(self, text: str, **options: Any) -> Any:
            return fast(text, **options)

    words = gpl_text.read_text("utf-8")[:5000]
    whole = fast(words, add_special_tokens=False)["input_ids"]
    for limit in (3, 400, None):
        assert list(first_tokens(Slow(), load_text(words), limit).ids) == whole[:limit]


def test_a_huge_text_is_not_read_through(tokenizer: PreTrainedTokenizerFast) -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += len(TEXT)
            yield TEXT

    text = TextSource(kind="dataset", name="endless", documents=lambda: [endless()])
    windows = make_windows(tokenizer, text, num_tokens=1000, window=10)
    assert windows.num_tokens == 1000
    assert read < 20_000
    says = windows.provenance
    assert says["whole_text"] is False
    assert says["text"]["sha256_of"] == "its first 16384 characters, as UTF-8"


def test_windows_partition_the_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode(TEXT)
    windows = make_windows(tokenizer, TEXT, num_tokens=None, window=7, batch_size=2)
    batches = list(windows)
    assert len(batches) == len(windows)
    rows = [
        row[mask.bool()] for b in batches for row, mask in zip(b.input_ids, b.attention_mask, strict=True)
    ]
    assert torch.cat(rows).tolist() == ids
    assert [row.numel() for row in rows[:-1]] == [7] * (len(rows) - 1)
    assert [b.first_sequence for b in batches] == list(range(0, windows.num_windows, 2))
    assert windows.provenance["first_ids"] == ids[:6]
    assert windows.provenance["first_token_policy"].startswith("nothing is added")
    assert [b.input_ids.tolist() for b in windows] == [b.input_ids.tolist() for b in batches]  # again


def test_an_exact_fit_has_no_padding(tokenizer: PreTrainedTokenizerFast) -> None:
    windows = make_windows(tokenizer, TEXT, num_tokens=20, window=5, batch_size=3)
    assert [tuple(b.input_ids.shape) for b in windows] == [(3, 5), (1, 5)]
    assert all(bool(b.attention_mask.all()) for b in windows)


@pytest.mark.parametrize("pad_side", ["right", "left"])
def test_padding_and_positions(tokenizer: PreTrainedTokenizerFast, pad_side: Any) -> None:
    windows = make_windows(tokenizer, TEXT, num_tokens=8, window=5, batch_size=4, pad_side=pad_side)
    (batch,) = windows
    ids, pad = tokenizer.encode(TEXT), tokenizer.pad_token_id
    short, full = ids[5:8], [0, 1, 2, 3, 4]
    if pad_side == "right":
        assert batch.input_ids.tolist() == [ids[:5], [*short, pad, pad]]
        assert batch.attention_mask.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
        assert batch.position_ids.tolist() == [full, [0, 1, 2, 0, 0]]
    else:
        assert batch.input_ids.tolist() == [ids[:5], [pad, pad, *short]]
        assert batch.attention_mask.tolist() == [[1] * 5, [0, 0, 1, 1, 1]]
        assert batch.position_ids.tolist() == [full, [0, 0, 0, 1, 2]]


@pytest.mark.parametrize(("first", "expected"), [("bos", 1), ("eos", 2), ("</s>", 2), ("\n", None)])
def test_the_first_token_is_a_choice(
    tokenizer: PreTrainedTokenizerFast, first: str, expected: int | None
) -> None:
    expected = tokenizer.encode(first)[0] if expected is None else expected
    windows = make_windows(tokenizer, TEXT, num_tokens=9, window=4, batch_size=8, first_token=first)
    (batch,) = windows
    ids = tokenizer.encode(TEXT)
    assert batch.input_ids.tolist() == [[expected, *ids[i : i + 3]] for i in (0, 3, 6)]
    assert batch.num_added == 1
    assert windows.num_tokens == 9
    assert windows.provenance["first_token_id"] == expected


def test_a_first_token_that_is_not_one(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(SourceError, match="is not one token that this tokenizer knows"):
        make_windows(tokenizer, TEXT, first_token="<|endoftext|>")
    bare = wrap(Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")))
    with pytest.raises(SourceError, match="no bos token"):
        make_windows(bare, TEXT, first_token="bos")


def test_too_short_a_text(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(SourceError, match=r"is 1 token\(s\) long; at least two"):
        make_windows(tokenizer, "a")
    assert make_windows(tokenizer, "a b c d").num_tokens >= 2


@pytest.mark.parametrize("bad", [{"num_tokens": 1}, {"window": 1}, {"batch_size": 0}, {"pad_side": "up"}])
def test_numbers_that_make_no_sense(tokenizer: PreTrainedTokenizerFast, bad: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match=next(iter(bad))):
        make_windows(tokenizer, TEXT, **bad)


def test_no_tokenizer() -> None:
    with pytest.raises(SourceError, match="comes without a tokenizer"):
        make_windows(None, TEXT)


def _logits(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch.inputs_for(model)).logits[batch.attention_mask.bool()]


@pytest.mark.parametrize("architecture", ["llama", "roberta"])
def test_the_side_of_padding_does_not_change_the_model(
    tokenizer: PreTrainedTokenizerFast, architecture: str
) -> None:
    """RoBERTa counts positions after its padding index: handing it 0, 1, 2, ... would be wrong in silence."""
    torch.manual_seed(0)
    if architecture == "llama":
        model: Any = LlamaForCausalLM(llama_config()).double().eval()
    else:
        config = RobertaConfig(
            vocab_size=384, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=66, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        model = RobertaForMaskedLM(config).double().eval()
    windows = make_windows(tokenizer, TEXT, num_tokens=20, window=12)
    (right,) = windows
    (left,) = dataclasses.replace(windows, pad_side="left")
    assert ("position_ids" in left.inputs_for(model)) == (architecture == "llama")
    assert "position_ids" not in right.inputs_for(model)
    # fp64, and the same tokens in another place of the batch: only the order of sums differs.
    torch.testing.assert_close(_logits(model, left), _logits(model, right), rtol=0, atol=1e-12)


def test_an_encoder_reads_the_batches(bert_folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = BertForMaskedLM.from_pretrained(bert_folder)
    (batch,) = make_windows(tokenizer, "aaaa", num_tokens=2, window=4)
    assert set(batch.to("cpu").inputs_for(model)) == {"input_ids", "attention_mask"}


@pytest.mark.usefixtures("tiny_segments")
@pytest.mark.parametrize("kind", ["bytes", "unsplit"])
@pytest.mark.parametrize("limit", [None, 49, 400])
@pytest.mark.parametrize("first", ["none", "e"])
def test_a_stream_gives_the_same_batches(
    tokenizers_of_all_kinds: dict[str, Any], gpl_text: Path, kind: str, limit: int | None, first: str
) -> None:
    tokenizer, text = tokenizers_of_all_kinds[kind], load_text(gpl_text.read_text("utf-8")[:5000])
    cut: dict[str, Any] = {"num_tokens": limit, "window": 7, "batch_size": 3, "first_token": first}
    whole, stream = make_windows(tokenizer, text, **cut), WindowStream(tokenizer, text, **cut)
    for _ in range(2):  # as often as wanted
        for one, other in zip(whole, stream, strict=True):
            assert torch.equal(one.input_ids, other.input_ids)
            assert torch.equal(one.attention_mask, other.attention_mask)
            assert (one.first_sequence, one.num_added) == (other.first_sequence, other.num_added)
        assert stream.provenance == whole.provenance
        assert stream.expected_batches == len(whole)


def test_a_stream_holds_a_segment_however_long_the_text(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and characters handed out so far are gone: what is held after 10 segments is held after 40."""
    for name, value in {"_SEGMENT": 4000, "_MARGIN": 100, "_OVERLAP": 100}.items():
        monkeypatch.setattr(tokens_module, name, value)

    def held(num_segments: int) -> int:
        pieces = [TEXT] * (4000 * num_segments // len(TEXT))
        text = TextSource(kind="dataset", name="long", documents=lambda: [pieces])
        stream = WindowStream(tokenizer, text, num_tokens=None, window=50)
        tracemalloc.start()
        for _ in stream:
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    held(2)
    assert held(40) < 1.1 * held(10)


def test_a_stream_that_ends_too_early(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(SourceError, match=r"is 1 token\(s\) long; at least two"):
        list(WindowStream(tokenizer, load_text("a", kind="literal")))


@pytest.mark.usefixtures("tiny_segments")
def test_a_stream_never_mixes_two_ways_to_cut(gpl_text: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A tokenizer that looks back over everything: no two segments agree; what was handed out was wrong."""

    class LooksBack:
        is_fast = True

        def __call__(self, text: str, **options: Any) -> Any:
            ids = [(len(text) // 300 + ord(c)) % 300 for c in text]
            return {"input_ids": ids, "offset_mapping": [(i, i + 1) for i in range(len(text))]}

    text = load_text(gpl_text.read_text("utf-8")[:3000])
    assert len(first_tokens(LooksBack(), text, None).ids) == 3000
    with pytest.raises(SourceError, match="cannot be read piece by piece"):
        list(tokens_module.TokenStream(LooksBack(), text, None))
