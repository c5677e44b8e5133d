"""A language model from a hub id, a folder, a ``.gguf`` file or a packaged shorthand."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mainstem.errors import SourceError

from ._cache import cache_root, sha256_of_files
from ._extras import quiet_transformers, require, versions
from ._gguf import converted
from ._kinds import ModelKind, kind_of
from ._packaged import PACKAGED
from ._weights import check_finite, check_folder, local_tokenizer_files, weight_files

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to be looked at, and where it came from.

    Attributes:
        model: the ``transformers`` model, in ``eval`` mode.
        tokenizer: its tokenizer, or None where the source has none.
        provenance: JSON-ready facts:

            - ``requested``, ``source`` (``"hub"``, ``"folder"``, ``"gguf"``), ``resolved`` (path, or hub id),
              ``revision`` (commit hash, hub only), ``package`` (shorthand only);
            - ``architecture`` (class name), ``model_type``, ``kind`` (``"causal"``, ``"masked"``,
              ``"encoder"``);
            - ``dtype``, ``num_parameters`` (tied ones counted once), ``attention`` (implementation),
              ``device``;
            - ``weights_sha256`` and ``weights_sha256_of``, which says what was hashed: the ``.gguf`` file;
              the one safetensors file; or, of several shards, their ``sha256sum`` listing sorted by name;
            - ``versions``.
    """

    model: Any
    tokenizer: Any
    provenance: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Where the weights lie: what ``from_pretrained`` gets, and what the provenance says of it."""

    load_from: str
    says: dict[str, Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    @property
    def folder(self) -> Path | None:
        """The local folder, or None for a hub id."""
        return None if self.says["source"] == "hub" else Path(self.load_from)


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "float32",
    revision: str | None = None,
    trust_remote_code: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
) -> LoadedModel:
    """Load a causal, masked or encoder language model, check it, and say where it came from.

    Args:
        name: a folder with ``config.json`` and safetensors; a ``.gguf`` file (dequantised to float32 once and
            cached); a shorthand of `PACKAGED` (``"smollm2"``); or a hub id. What exists on disk wins over a
            hub id of that name.
        dtype: ``"float32"``, ``"float64"``, ``"bfloat16"``, ``"float16"``, a ``torch.dtype``, or ``"auto"``
            for the checkpoint's own (float32 for a GGUF).
        revision: hub branch, tag or commit.
        trust_remote_code: whether the source may run Python code of its own.
        cache_dir: folder for hub downloads and converted GGUFs instead of their defaults.
        device: where to put it, default CPU; ``"auto"`` spreads it by Accelerate's ``device_map``; ``"tp"``
            shares every weight between the processes that ``torchrun`` has started, by the ``tp_plan`` of
            its class. What is then done with it, all of them have to do.

    Raises:
        SourceError: no such model, no network, no config, no safetensors, a torn file, weights that are
            missing, NaN or infinite (the first such parameter is named), an unknown dtype, or not a language
            model.
        MissingExtraError: a package of the extra ``[hf]`` is missing.
    """
    torch_dtype = _parse_dtype(dtype)
    require("transformers", feature="Loading a model")
    _register_towers()
    place = _find(os.fspath(name), cache_dir=cache_dir, revision=revision)
    options = {**place.options, "trust_remote_code": trust_remote_code}
    with quiet_transformers():
        config = _read_config(place, options)
        kind = kind_of(config, given=os.fspath(name))
        model = _read_model(place, kind, {**options, "dtype": torch_dtype}, device)
        tokenizer = _read_tokenizer(place, options)
    check_finite(model)
    return LoadedModel(model=model, tokenizer=tokenizer, provenance=_provenance(place, kind, model))


def _parse_dtype(dtype: str | torch.dtype) -> torch.dtype | str:
    if dtype == "auto":
        return "auto"
    known = DTYPES.get(str(dtype).removeprefix("torch."))
    if known is None:
        raise SourceError(f"Unknown dtype {dtype!r}. Choose one of: auto, {', '.join(DTYPES)}.")
    return known


def _register_towers() -> None:
    """Teach transformers' Auto classes mainstem's own models, where that part is there."""
    if importlib.util.find_spec("mainstem.tower") and importlib.util.find_spec("mainstem.tower.hf"):
        importlib.import_module("mainstem.tower.hf")


def _find(name: str, *, cache_dir: str | os.PathLike[str] | None, revision: str | None) -> _Place:
    """Decide what ``name`` is; convert a GGUF if it is one."""
    path = Path(name).expanduser()
    package: dict[str, Any] = {}
    if not path.exists() and name in PACKAGED:
        path = PACKAGED[name].locate()
        package = {"package": PACKAGED[name].module}
    if path.is_dir():
        check_folder(path)
        return _Place(
            load_from=str(path),
            says={"requested": name, "source": "folder", "resolved": str(path.resolve()), **package},
        )
    if path.is_file():
        if path.suffix != ".gguf":
            raise SourceError(
                f"{path} is a file, but neither a .gguf nor a folder. Give the folder that holds config.json."
            )
        folder, digest = converted(path, Path(cache_dir) if cache_dir else cache_root())
        says = {
            "requested": name,
            "source": "gguf",
            "resolved": str(path.resolve()),
            "gguf_sha256": digest,
            **package,
        }
        return _Place(load_from=str(folder), says=says)
    if (
        name.startswith((".", "/", "~"))
        or name.endswith((".gguf", "/"))
        or name.count("/") > 1
        or "\\" in name
    ):
        raise SourceError(f"No such model: there is no file or folder {name!r}.")
    options: dict[str, Any] = {"revision": revision} if revision else {}
    if cache_dir:
        options["cache_dir"] = os.fspath(cache_dir)
    return _Place(
        load_from=name, says={"requested": name, "source": "hub", "resolved": name}, options=options
    )


def _read_config(place: _Place, options: dict[str, Any]) -> Any:
    transformers = require("transformers", feature="Loading a model")
    try:
        return transformers.AutoConfig.from_pretrained(place.load_from, **options)
    except (OSError, ValueError, KeyError) as error:
        raise _refused(place, error, "its configuration cannot be read") from error


def _read_model(
    place: _Place, kind: ModelKind, options: dict[str, Any], device: str | torch.device | None
) -> nn.Module:
    transformers = require("transformers", feature="Loading a model")
    if device == "auto":
        options = {**options, "device_map": "auto"}
    elif device == "tp":
        options = {**options, "distributed_config": _tensor_parallel()}
    auto = getattr(transformers, kind.auto_class)
    try:
        model, info = auto.from_pretrained(
            place.load_from, use_safetensors=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _refused(place, error, "its weights cannot be read") from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # derives from Exception alone
            raise
        raise _refused(place, error, "a weight file is torn") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise SourceError(
            f"The weights of {place.says['requested']!r} lack {len(missing)} parameter(s) of "
            f"{type(model).__name__}, first {missing[0]}; they would be random. "
            "Give a checkpoint that holds the whole language model."
        )
    if device not in (None, "auto", "tp"):
        model = model.to(device)
    return model.eval()


def _tensor_parallel() -> Any:
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SourceError(
            "device 'tp' shares a model between processes, but there is one; start several by "
            "torchrun --nproc-per-node N."
        )
    distributed = require("transformers.distributed", feature="Tensor parallelism")
    return distributed.DistributedConfig(tp_plan="auto")


def _num_sharing(model: nn.Module) -> int:
    """Return how many processes share the weights."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    return max((mesh.size() for mesh in meshes if mesh is not None), default=1)


def _read_tokenizer(place: _Place, options: dict[str, Any]) -> Any:
    """The tokenizer, or None where the source has none."""
    transformers = require("transformers", feature="Loading a model")
    if place.folder is not None and not local_tokenizer_files(place.folder):
        return None  # without its files some tokenizer classes come up empty instead of failing
    try:
        return transformers.AutoTokenizer.from_pretrained(place.load_from, **options)
    except (OSError, ValueError, KeyError) as error:
        if place.folder is None:
            return None
        raise _refused(place, error, "its tokenizer cannot be read") from error


def _refused(place: _Place, error: Exception, what: str) -> SourceError:
    """One sentence for what transformers says in a page."""
    name = place.says["requested"]
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if place.says["source"] != "hub":
        return SourceError(f"Cannot load {name!r}: {what} ({type(error).__name__}: {reason}).")
    chain = _chain_names(error)
    near = difflib.get_close_matches(name, PACKAGED, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if "GatedRepoError" in chain:
        return SourceError(
            f"The hub model {name!r} is gated: accept its terms on the hub, then log in with: hf auth login"
        )
    if "RepositoryNotFoundError" in chain or "HFValidationError" in chain:
        return SourceError(
            f"No such model: {name!r} is no file, folder, shorthand or public hub model.{hint}"
        )
    if "RevisionNotFoundError" in chain:
        return SourceError(f"The hub model {name!r} has no revision {place.options.get('revision')!r}.")
    if (
        chain & {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "ConnectionError"}
        or "connect" in reason
    ):
        return SourceError(
            f"No such model here: {name!r} is no file, folder or shorthand ({', '.join(PACKAGED)}), "
            f"is not in the local cache, and the hub cannot be reached.{hint}"
        )
    return SourceError(f"Cannot load the hub model {name!r}: {what} ({reason}).{hint}")


def _chain_names(error: BaseException | None) -> set[str]:
    """Class names (bases too) of the error and of what caused it."""
    names: set[str] = set()
    while error is not None:
        names |= {cls.__name__ for cls in type(error).__mro__}
        error = error.__cause__ or error.__context__
    return names


def _places_of(model: Any) -> Iterator[str]:
    """Yield where the parameters lie, in the model's order; ``offloaded`` is anywhere but in memory."""
    for parameter in model.parameters():
        yield "offloaded" if parameter.is_meta else str(parameter.device)


def _provenance(place: _Place, kind: ModelKind, model: Any) -> dict[str, Any]:
    says = dict(place.says)
    sharing = _num_sharing(model)
    if digest := says.pop("gguf_sha256", None):
        hashed, what = digest, "the .gguf file"
    elif files := weight_files(place.folder, model, place.options):
        hashed = sha256_of_files(files)
        what = (
            files[0].name
            if len(files) == 1
            else f"the sha256sum listing of {len(files)} safetensors files, by name"
        )
    else:
        hashed, what = None, "nothing: the weight files were not found on disk"
    return {
        **says,
        "revision": getattr(model.config, "_commit_hash", None),
        "architecture": type(model).__name__,
        "model_type": model.config.model_type,
        "kind": kind.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "attention": getattr(model.config, "_attn_implementation", None),
        "device": ", ".join(dict.fromkeys(_places_of(model)))
        + (f", shared by {sharing} processes" if sharing > 1 else ""),
        "weights_sha256": hashed,
        "weights_sha256_of": what,
        "versions": versions("transformers", "tokenizers", "safetensors", "numpy"),
    }
