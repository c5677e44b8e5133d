"""A ``.gguf`` file becomes a folder of plain safetensors, once."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from mainstem.errors import SourceError

from ._cache import cached_folder, sha256_of_file
from ._extras import quiet_transformers, require, versions

_FORMAT = 1  # of the cached folder; raise it when what is written changes


def converted(path: Path, root: Path) -> tuple[Path, str]:
    """Dequantise a GGUF to float32 once; later calls return the cached folder.

    The weights are those that transformers' own reader gives, bit for bit.

    Args:
        path: the ``.gguf`` file.
        root: cache root; the result lies in ``root/gguf/SHA256-vFORMAT``.

    Returns:
        The folder (config, safetensors, tokenizer if the file has one) and the file's SHA-256.

    Raises:
        SourceError: not a GGUF file, a torn one, or an architecture that transformers cannot read.
        MissingExtraError: a package of the extra ``[hf]`` is missing.
    """
    _check_magic(path)
    digest = sha256_of_file(path)
    folder = cached_folder(root / "gguf" / f"{digest}-v{_FORMAT}", functools.partial(_convert, path, digest))
    return folder, digest


def _check_magic(path: Path) -> None:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise SourceError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'.")


def _convert(path: Path, digest: str, folder: Path) -> dict[str, Any]:
    """Write the float32 model and its tokenizer into the empty ``folder``."""
    for package in ("transformers", "gguf", "accelerate"):
        require(package, feature="Reading a .gguf file")
    with quiet_transformers(), _parsed_once():
        has_tokenizer = _check_readable(path)
        _save(_read_model(path), folder)
        if has_tokenizer:
            _save_tokenizer(path, folder)
    return {"source_sha256": digest, "source_name": path.name, "versions": versions("transformers", "gguf")}


@contextlib.contextmanager
def _parsed_once() -> Generator[None]:
    """Parse each GGUF header once inside the block.

    transformers reads a GGUF's header three times in pure Python and rebuilds gguf's table of tensor names
    for every
    tensor: 20 of the 24 seconds of SmolLM2. Both are pure functions of their arguments, so they are memoised
        here;
    should transformers cease to call them, the block is merely slower.
    """
    gguf = require("gguf", feature="Reading a .gguf file")
    names = [name for name in ("GGUFReader", "get_tensor_name_map") if hasattr(gguf, name)]
    originals = {name: getattr(gguf, name) for name in names}
    try:
        for name, original in originals.items():
            setattr(gguf, name, functools.lru_cache(maxsize=4)(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)


def _check_readable(path: Path) -> bool:
    """Read the header and the place of every tensor; return whether the file has a tokenizer.

    Raises:
        SourceError: the file ends early or its header makes no sense.
    """
    gguf = require("gguf", feature="Reading a .gguf file")
    try:
        # A str, spelled as transformers spells it, so that _parsed_once sees the same argument.
        reader = gguf.GGUFReader(str(path))
    except (
        Exception
    ) as error:  # the reader trusts its input: a torn file can fail anywhere in it, with anything
        raise SourceError(
            f"{path} is torn: reading its header or tensors fails ({type(error).__name__}: {error}). "
            "Copy or download it again."
        ) from error
    return "tokenizer.ggml.tokens" in reader.fields


def _read_model(path: Path) -> Any:
    transformers = require("transformers", feature="Reading a .gguf file")
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting turns off
            return transformers.AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            )
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        raise SourceError(
            f"transformers cannot read {path} as a causal language model: {_first_line(error)}"
        ) from error


def _save(packed: Any, folder: Path) -> None:
    """Save a GGUF-loaded model, which transformers refuses to do itself.

    The object is dense float32, but stays marked as quantised; its weights move into a plain model of the
    same class.
    """
    settings: dict[str, Any] = packed.config.to_dict()
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        model = type(packed)(type(packed.config).from_dict(settings))
    model.load_state_dict(packed.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = packed.generation_config
    model.save_pretrained(folder)


def _save_tokenizer(path: Path, folder: Path) -> None:
    transformers = require("transformers", feature="Reading a .gguf file")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        raise SourceError(
            f"transformers cannot read the tokenizer of {path}: {_first_line(error)}"
        ) from error
    tokenizer.save_pretrained(folder)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
