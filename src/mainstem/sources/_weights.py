"""The weights on disk and in memory: are they there, of the safe kind, and finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mainstem.errors import SourceError

from ._extras import require

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds no model, or one only in pickled files.

    Raises:
        SourceError: no ``config.json``, or no ``*.safetensors``.
    """
    if not (folder / "config.json").is_file():
        inside = sorted(folder.glob("*.gguf"))
        hint = (
            f" Give the file itself: {inside[0]}"
            if inside
            else " Give the folder that save_pretrained wrote."
        )
        raise SourceError(f"{folder} is no model folder: it has no config.json.{hint}")
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
    if pickled:
        raise SourceError(
            f"{folder} has its weights only as {pickled[0]}, a pickle, which can run any code when read; "
            "mainstem reads safetensors. Convert it where you trust it: model.save_pretrained(folder)."
        )
    raise SourceError(f"{folder} has no weights: no *.safetensors file is in it.")


def local_tokenizer_files(folder: Path) -> list[Path]:
    """The files in ``folder`` that make a tokenizer."""
    return [path for name in _TOKENIZER_FILES if (path := folder / name).is_file()]


def weight_files(folder: Path | None, model: Any, options: dict[str, Any]) -> list[Path]:
    """The safetensors files the model was read from, in the folder or the hub's cache, sorted by name."""
    if folder is None:
        hub = require("huggingface_hub", feature="Loading a model")
        found = hub.try_to_load_from_cache(
            model.config._name_or_path,
            "config.json",
            cache_dir=options.get("cache_dir"),
            revision=getattr(model.config, "_commit_hash", None),
        )
        if not isinstance(found, str):
            return []
        folder = Path(found).parent
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    return sorted(folder.glob("*.safetensors"))


def check_finite(model: nn.Module) -> None:
    """Refuse a model with NaN or infinity in a parameter; reads each floating parameter once, no copy.

    Parameters that are not in memory (offloaded by ``device_map``) are passed over; of those that processes
    share, each reads its share.

    Raises:
        SourceError: names the first such parameter, in the model's own order.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.is_floating_point():
            continue
        values = parameter.detach()
        to_local = getattr(values, "to_local", None)  # of a DTensor
        values = values if to_local is None else to_local()
        if values.numel() == 0:
            continue
        if values.element_size() == 1:  # float8 has no min and max
            values = values.float()
        low, high = torch.aminmax(values)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            what = "NaN" if torch.isnan(low) or torch.isnan(high) else "infinity"
            raise SourceError(
                f"The weights hold {what}: first in parameter {name}. "
                "Check the file against its source, or load it with a wider dtype."
            )
