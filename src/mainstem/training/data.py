"""Text -> tokenizer -> packed windows of training and held-out text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mainstem.errors import ConfigError, SourceError
from mainstem.sources import TextSource, cache_root, cached_folder, quiet_datasets, require
from mainstem.training.config import TrainConfig

END = "<|endoftext|>"
"""Stands between two documents, and is the first and last token of a text."""
_RUN = 16  # held-out windows that follow each other, so that few of them border on training text
_STREAM_HELD_OUT = 128  # windows at the head of a stream
_BATCH = 64  # documents tokenised in one call


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingText:
    """What is trained on.

    Attributes:
        tokenizer: of ``transformers``.
        train, held_out: ``datasets`` with the column ``input_ids``, ``window`` tokens in every row.
        bytes_per_token: UTF-8 bytes of the held-out tokens that are predicted (all but each window's first)
            over their number; bits per byte are ``loss / ln 2 / bytes_per_token``.
        provenance: JSON-ready facts.
    """

    tokenizer: Any
    train: Any
    held_out: Any
    bytes_per_token: float
    provenance: dict[str, Any]


def prepare_text(config: TrainConfig, text: TextSource) -> TrainingText:
    """Tokenise and pack ``text``; the windows are cached by content, so that a second run starts at once.

    Documents are joined by the end-of-text token and cut into windows without regard to their borders. One
    in ``1 / held_out`` windows is held out, in runs of up to 16 windows spread evenly over the text; a
    tokenizer that is trained here is trained on all of it.

    Raises:
        SourceError: the text gives fewer windows than a training and a held-out one.
        ConfigError: the tokenizer is none that is known.
    """
    datasets = require("datasets", feature="Training", extra="train")
    tokenizer = make_tokenizer(config.tokenizer, text)
    facts = {"text": text.provenance, "tokenizer": config.tokenizer, "vocab_size": len(tokenizer)}
    if config.streaming:
        return _stream(datasets, config, text, tokenizer, facts)
    key = {
        "text": _text_hash(text),
        "tokenizer": _tokenizer_hash(tokenizer),
        "window": config.window,
        "format": 1,
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    folder = cached_folder(
        cache_root() / "windows" / name, lambda place: _pack(datasets, place, config, text, tokenizer, key)
    )
    windows = datasets.load_from_disk(str(folder))
    train, held_out = _split(len(windows), config.held_out)
    if not train or not held_out:
        raise SourceError(
            f"The text {text.name!r} gives {len(windows)} windows of {config.window} tokens, too few to "
            f"train on and to hold {config.held_out:.0%} out. Give a longer text, or a smaller window."
        )
    facts |= {"sha256": key["text"], "windows": len(windows), "held_out_windows": len(held_out)}
    kept = windows.select(held_out)
    return TrainingText(
        tokenizer=tokenizer,
        train=windows.select(train),
        held_out=kept,
        bytes_per_token=_bytes_per_token(tokenizer, kept["input_ids"]),
        provenance=facts,
    )


def make_tokenizer(spec: str, text: TextSource) -> Any:
    """Return the tokenizer that ``spec`` names.

    Args:
        spec: ``"byte"``: one token a byte, and the end of text. ``"bpe:SIZE"``: byte-level BPE (Sennrich et
            al. 2016, arXiv 1508.07909; bytes as in GPT-2) of SIZE tokens, trained on ``text``. Anything else
            is a hub id or a folder of ``transformers``.
        text: what a tokenizer is trained on.

    Raises:
        ConfigError: a size that is no number, or below the 257 tokens that every byte and the end need.
        SourceError: no such tokenizer.
    """
    if spec == "byte":
        return _train_bpe(257, [])
    if spec.startswith("bpe:"):
        size = spec.removeprefix("bpe:")
        if not size.isdecimal() or int(size) < 257:
            raise ConfigError(
                f"tokenizer {spec!r}: the size must be a number of at least 257, such as bpe:2048."
            )
        return _train_bpe(int(size), text.chunks())
    transformers = require("transformers", feature="Training", extra="train")
    try:
        return transformers.AutoTokenizer.from_pretrained(spec)
    except Exception as error:  # the hub's, the network's, and the file format's own errors
        reason = str(error).strip().partition("\n")[0]
        raise SourceError(
            f"No tokenizer {spec!r} could be loaded ({reason}). Give 'byte', 'bpe:2048', a hub id or "
            "a folder."
        ) from error


def _train_bpe(size: int, chunks: Iterable[str]) -> Any:
    tokenizers = require("tokenizers", feature="Training", extra="train")
    transformers = require("transformers", feature="Training", extra="train")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(_pieces(chunks), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
    )


def _pieces(chunks: Iterable[str], size: int = 1 << 16) -> Iterator[str]:
    """Pieces of bounded size: a trainer holds one whole."""
    for chunk in chunks:
        for start in range(0, len(chunk), size):
            yield chunk[start : start + size]


def _rows(text: TextSource, tokenizer: Any, window: int) -> Iterator[dict[str, list[int]]]:
    """Windows of ``window`` tokens; what is left over at the end is dropped."""
    end = tokenizer.eos_token_id
    pending: list[int] = [] if end is None else [end]
    batch: list[str] = []

    def take() -> Iterator[dict[str, list[int]]]:
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            pending.extend(ids if end is None else [*ids, end])
        batch.clear()
        full = len(pending) - len(pending) % window
        for start in range(0, full, window):
            yield {"input_ids": pending[start : start + window]}
        del pending[:full]

    for document in text.documents():
        batch.append("".join(document))
        if len(batch) == _BATCH:
            yield from take()
    if batch:
        yield from take()


def _pack(
    datasets: Any, place: Path, config: TrainConfig, text: TextSource, tokenizer: Any, key: dict[str, Any]
) -> dict[str, Any]:
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), config.window)})
    # datasets would keep what it builds in the user's cache; what is kept is in ours.
    with quiet_datasets(), tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        windows = datasets.Dataset.from_generator(
            _rows,
            features=features,
            cache_dir=scratch,
            gen_kwargs={"text": text, "tokenizer": tokenizer, "window": config.window},
            fingerprint=hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32],
        )
        windows.save_to_disk(str(place))
    return key


def _split(num_windows: int, held_out: float) -> tuple[list[int], list[int]]:
    period = max(1, min(round(1 / held_out), num_windows))
    run = max(1, min(_RUN, num_windows // (4 * period)))
    kept = [index for index in range(num_windows) if index // run % period == period // 2]
    return sorted(set(range(num_windows)) - set(kept)), kept


def _stream(
    datasets: Any, config: TrainConfig, text: TextSource, tokenizer: Any, facts: dict[str, Any]
) -> TrainingText:
    rows = datasets.IterableDataset.from_generator(
        _rows, gen_kwargs={"text": text, "tokenizer": tokenizer, "window": config.window}
    )
    held_out = datasets.Dataset.from_list(list(rows.take(_STREAM_HELD_OUT)))
    if len(held_out) < _STREAM_HELD_OUT:
        raise SourceError(
            f"The text {text.name!r} ends before the {_STREAM_HELD_OUT} windows that a stream holds out; "
            "leave out --streaming."
        )
    facts |= {"streaming": True, "held_out_windows": len(held_out)}
    return TrainingText(
        tokenizer=tokenizer,
        train=rows.skip(_STREAM_HELD_OUT),
        held_out=held_out,
        bytes_per_token=_bytes_per_token(tokenizer, held_out["input_ids"]),
        provenance=facts,
    )


def _bytes_per_token(tokenizer: Any, windows: Iterable[list[int]]) -> float:
    sizes = _token_sizes(tokenizer)
    num_bytes = num_tokens = 0
    for ids in windows:
        num_tokens += len(ids) - 1
        if sizes is not None:
            num_bytes += sum(map(sizes.__getitem__, ids[1:]))
        else:
            whole, first = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:1]))
            num_bytes += len(whole.encode()) - len(first.encode())
    return num_bytes / num_tokens


def _token_sizes(tokenizer: Any) -> list[int] | None:
    """Bytes that each token of a byte-level tokenizer stands for, 0 for special ones; None for another kind.

    Exact where a token is a part of a character, which decoding is not. A byte is a character of the
    vocabulary there (GPT-2).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or (json.loads(backend.to_str())["decoder"] or {}).get("type") != "ByteLevel":
        return None
    special = set(tokenizer.all_special_ids)
    added = tokenizer.added_tokens_decoder
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return [
        0 if i in special or token is None else len(token.encode()) if i in added else len(token)
        for i, token in enumerate(tokens)
    ]


def _text_hash(text: TextSource) -> str:
    """Hash all of a text; a dataset by the fingerprint that ``datasets`` keeps of its files."""
    if text.kind == "dataset":
        return hashlib.sha256(json.dumps(text.provenance, sort_keys=True).encode()).hexdigest()
    digest = hashlib.sha256()
    for number, document in enumerate(text.documents()):
        digest.update(b"\0" if number else b"")  # borders of documents count: a token stands there
        for chunk in document:
            digest.update(chunk.encode())
    return digest.hexdigest()


def _tokenizer_hash(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    says = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(says.encode()).hexdigest()
