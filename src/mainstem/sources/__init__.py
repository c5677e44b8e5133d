"""Where models and texts come from: hub, folder, ``.gguf`` file, package; string, file, folder, dataset.

Needs the extra ``[hf]`` when used, not when imported: ``import mainstem.sources`` loads no third-party
package but torch, and a missing one is reported with its install command.

    >>> from mainstem.sources import load_model, load_text, make_windows
    loaded = load_model("smollm2")
    text = load_text("my_text.txt")
    windows = make_windows(loaded.tokenizer, text, num_tokens=2048, window=256, batch_size=4)
"""

from ._cache import cache_root, cached_folder, is_whole, obey_umask, write_manifest
from ._extras import quiet_datasets, quiet_transformers, require, versions
from ._models import LoadedModel, load_model
from ._packaged import PACKAGED, PACKAGED_TEXTS, TWINS, PackagedModel
from ._stream import WindowStream
from ._texts import TextSource, load_text
from ._tokens import encode
from ._windows import WindowBatch, Windows, make_windows

__all__ = [
    "PACKAGED",
    "PACKAGED_TEXTS",
    "TWINS",
    "LoadedModel",
    "PackagedModel",
    "TextSource",
    "WindowBatch",
    "WindowStream",
    "Windows",
    "cache_root",
    "cached_folder",
    "encode",
    "is_whole",
    "load_model",
    "load_text",
    "make_windows",
    "obey_umask",
    "quiet_datasets",
    "quiet_transformers",
    "require",
    "versions",
    "write_manifest",
]
