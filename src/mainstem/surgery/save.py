"""Save a cut model as a plain ``transformers`` folder, after it was read back and found equal to the bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mainstem.errors import MainstemError
from mainstem.sources import quiet_transformers, require, versions

from ._blocks import aligned_call, block_list, brief, loading_options, main_output, probe_inputs
from ._config import depth_of
from ._folder import check_out, new_folder
from ._mergekit import mergekit_yaml
from ._silence import last_modules
from .cut import Cut

SCHEMA = "mainstem.prune/1"
"""Of ``prune.json``."""
RECORD, RECIPE = "prune.json", "mergekit.yaml"
_AUTO = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")
_NEW_TOKENS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a cut model comes from.

    Attributes:
        source: hub id, folder or file of the whole model, as given by the user.
        num_blocks: how many blocks the whole model has.
        what: what was removed from it.
    """

    source: str
    num_blocks: int
    what: Cut


def save_pruned(
    model: nn.Module,
    tokenizer: Any,
    folder: str | Path,
    origin: Origin,
    record: Mapping[str, Any] | None = None,
) -> Path:
    """Write a cut model into a new folder that plain ``transformers`` loads, and nothing where that fails.

    Written are the weights (safetensors), ``config.json``, the generation config, the tokenizer, the cut as
    ``mergekit.yaml``, and ``prune.json`` (schema ``mainstem.prune/1``): ``source``, ``num_blocks`` (before
    and after), ``removed`` (0-based numbers, ``blocks``, ``attention``, ``feed_forward``),
    ``kept_ranges`` (half-open), ``checks``, ``versions``, and what ``record`` says besides.

    All is written beside its place first. There it is read by the ``Auto`` class of ``transformers``; every
    weight and the output on a few tokens must equal the given model's bit for bit, and greedy generation must
    give the same tokens with a cache and without, and from both models. Only then is it moved to ``folder``.

    Args:
        model: from `cut`, healed or not.
        tokenizer: travels along; None where there is none.
        folder: must not exist.
        origin: where the model comes from, and what was cut.
        record: more for ``prune.json``; JSON-ready, no key of those above.

    Returns:
        The folder.

    Raises:
        MainstemError: the folder is there, is the source, or cannot be written; the model does not have the
            blocks that ``origin`` says; what was read back is not the model that was given.
        MissingExtraError: ``transformers`` is missing.
    """
    out, given = Path(folder), cast(Any, model)
    check_out(out, origin.source)
    says = _record(given, origin, record or {})
    with quiet_transformers(), new_folder(out) as work:
        try:
            given.save_pretrained(work)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise MainstemError(
                f"transformers cannot save this {type(model).__name__}: {brief(error)}"
            ) from error
        if tokenizer is not None:
            tokenizer.save_pretrained(work)
        says["checks"] = _check_saved(given, work)
        dtype = str(given.dtype).removeprefix("torch.")
        recipe = mergekit_yaml(
            origin.source, origin.what.ranges(origin.num_blocks), _silenced(given, origin), dtype
        )
        (work / RECIPE).write_text(recipe, "utf-8")
        (work / RECORD).write_text(json.dumps(says, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return out


def _record(model: Any, origin: Origin, more: Mapping[str, Any]) -> dict[str, Any]:
    depth, kept = depth_of(model.config), origin.what.kept(origin.num_blocks)
    if depth != len(kept):
        raise MainstemError(
            f"the model has {depth} blocks, but {origin.num_blocks} without {list(origin.what.blocks)} are "
            f"{len(kept)}; give the model that cut returned for this cut."
        )
    says: dict[str, Any] = {
        "schema": SCHEMA,
        "source": origin.source,
        "num_blocks": {"before": origin.num_blocks, "after": depth},
        "removed": dataclasses.asdict(origin.what),
        "kept_ranges": origin.what.ranges(origin.num_blocks),
        "checks": {},
        "versions": versions("transformers", "tokenizers", "safetensors"),
    }
    if twice := says.keys() & more.keys():
        raise MainstemError(f"record may not say {min(twice)!r}, which prune.json says itself; rename it.")
    return {**says, **more}


def _silenced(model: Any, origin: Origin) -> dict[int, list[str]]:
    """Names of the modules that were zeroed, by the block's number in the whole model."""
    if not (origin.what.attention or origin.what.feed_forward):
        return {}
    _, blocks = block_list(model, depth_of(model.config))
    place = {block: number for number, block in enumerate(origin.what.kept(origin.num_blocks))}
    found: dict[int, list[str]] = {}
    for kind, numbers in (("attention", origin.what.attention), ("feed_forward", origin.what.feed_forward)):
        for number in numbers:
            found.setdefault(number, []).extend(last_modules(blocks[place[number]], kind))
    return found


def auto_class_of(model: Any) -> Any:
    """Return the ``Auto`` class that loads a model of this class.

    Raises:
        MainstemError: none does.
    """
    transformers = require("transformers", feature="Saving a model")
    for name in _AUTO:
        auto = getattr(transformers, name)
        known = auto._model_mapping.get(type(model.config), None)
        if type(model) is known or (isinstance(known, tuple) and type(model) in cast(Any, known)):
            return auto
    raise MainstemError(
        f"no Auto class of transformers loads a {type(model).__name__}; give a causal or masked language "
        "model or a text encoder."
    )


def _check_saved(model: Any, folder: Path) -> dict[str, str]:
    """Read the folder as anyone would, and compare.

    Raises:
        MainstemError: something differs; it is named.
    """
    read, info = auto_class_of(model).from_pretrained(
        folder, output_loading_info=True, **loading_options(model)
    )
    read = read.to(model.device).eval()
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            raise MainstemError(
                f"read back, the checkpoint has {kind.replace('_', ' ')}, first {min(map(str, info[kind]))}; "
                "it was not saved."
            )
    theirs = read.state_dict()
    for name, value in model.state_dict().items():
        if name not in theirs or theirs[name].dtype != value.dtype or not torch.equal(theirs[name], value):
            raise MainstemError(f"read back, the weights {name} are not those saved; nothing was saved.")
    return {
        "weights": "equal to the bit",
        "output": _check_output(model, read),
        "generation": _check_generation(model, read),
    }


def _check_output(model: Any, read: Any) -> str:
    inputs = probe_inputs(model)
    given, found = main_output(model, inputs), main_output(read, inputs)
    if torch.equal(given, found):
        return "equal to the bit"
    # Some kernels round by where a weight lies: in a mapped file it begins anywhere.
    if torch.equal(main_output(model, inputs, aligned_call), main_output(read, inputs, aligned_call)):
        off = float((given.double() - found.double()).abs().max())
        return f"equal to the bit with weights at the same alignment in memory; as they lie, {off:.1g} apart"
    raise MainstemError("read back, the model computes something else on a few tokens; it was not saved.")


def _check_generation(model: Any, read: Any) -> str:
    if not model.can_generate():
        return "does not generate"
    found: dict[str, Tensor] = {}
    failed: dict[str, str] = {}
    for name, which, cached in (("cached", read, True), ("uncached", read, False), ("given", model, True)):
        try:
            found[name] = _generated(which, cached=cached)
        except Exception as error:  # a model's own code can fail with anything
            failed[name] = brief(error)
    if not found:
        return f"does not generate: {failed['cached']}"
    if failed:
        name, reason = next(iter(failed.items()))
        raise MainstemError(f"generation fails ({name}: {reason}), so the model was not saved.")
    if not torch.equal(found["cached"], found["given"]):
        raise MainstemError("read back, the model generates other tokens; it was not saved.")
    if not torch.equal(found["cached"], found["uncached"]):
        gap, allowed = _gap(read, found["cached"], found["uncached"])
        if gap > allowed:
            raise MainstemError(
                f"generation with a cache gives other tokens than without (logits {gap:.2g} apart, "
                f"{allowed:.2g} is rounding); the model was not saved."
            )
        return f"cached and uncached part at a tie (logits {gap:.2g} apart)"
    return "cached and uncached give the same tokens"


def _generated(model: Any, *, cached: bool) -> Tensor:
    transformers = require("transformers", feature="Saving a model")
    inputs = {name: value[:, :6] for name, value in probe_inputs(model).items()}
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    config = transformers.GenerationConfig(
        max_new_tokens=_NEW_TOKENS,
        min_new_tokens=_NEW_TOKENS,
        do_sample=False,
        use_cache=cached,
        pad_token_id=0 if pad is None else pad,
    )
    training = model.training
    model.eval()
    try:
        return model.generate(**inputs, generation_config=config)
    finally:
        model.train(training)


def _gap(model: Any, one: Tensor, other: Tensor) -> tuple[float, float]:
    """How far apart the logits of the first different tokens are, and what rounding may make of them."""
    place = int((one != other).any(dim=0).nonzero()[0])
    ids = one[:, :place]
    logits = main_output(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})[0, -1].double()
    gap = float((logits[one[0, place]] - logits[other[0, place]]).abs())
    return gap, 32 * torch.finfo(model.dtype).eps * float(logits.abs().max())
