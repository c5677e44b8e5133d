"""Remove blocks, or single sublayers, of a ``transformers`` model, and prove that nothing else changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mainstem.errors import ConfigError
from mainstem.sources import quiet_transformers, require

from ._blocks import (
    block_list,
    brief,
    built_without_weights,
    changed_buffer,
    first_difference,
    main_output,
    passed_by,
    probe_inputs,
)
from ._config import cut_config, depth_of
from ._silence import silence


@dataclasses.dataclass(frozen=True)
class Cut:
    """What is removed from a model: numbers of blocks, 0-based, as they are in the whole model.

    Attributes:
        blocks: removed whole.
        attention: blocks of which only the attention is removed.
        feed_forward: blocks of which only the feed-forward is removed.

    Raises:
        ConfigError: a number that is negative or no whole number, or a sublayer of a block that is removed
            anyway.
    """

    blocks: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()
    feed_forward: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in given):
                raise ConfigError(
                    f"{field.name}={given!r}: expected numbers of blocks, 0-based, such as (1, 2)."
                )
            object.__setattr__(self, field.name, tuple(sorted(set(given))))
        for name in ("attention", "feed_forward"):
            if twice := set(self.blocks) & set(getattr(self, name)):
                raise ConfigError(
                    f"block {min(twice)} is removed whole, and its {name} once more; name it in one of them."
                )

    def kept(self, depth: int) -> tuple[int, ...]:
        """Return the numbers of the blocks that stay of ``depth``, in order."""
        return tuple(block for block in range(depth) if block not in self.blocks)

    def ranges(self, depth: int) -> tuple[tuple[int, int], ...]:
        """Return the blocks that stay as half-open ranges: 4 without block 1 are ``((0, 1), (2, 4))``."""
        found: list[tuple[int, int]] = []
        for block in self.kept(depth):
            if found and found[-1][1] == block:
                found[-1] = (found[-1][0], block + 1)
            else:
                found.append((block, block + 1))
        return tuple(found)


def cut(model: nn.Module, what: Cut) -> nn.Module:
    """Return a new model of the same class without some blocks; the given one stays as it is.

    The new model is built from a cut configuration by its own class, so every number that a block or a
    configuration keeps of the depth is that of the shorter model. Its weights **share memory** with those of
    the given model (no copy is made); deep-copy it before training. Those of a silenced sublayer are its own,
    and so are weights outside the blocks of which a share belongs to each (per-layer embeddings).

    Three things are proven before it is returned: the shorter model takes the weights strictly, none missing
    and none left over; every kept block has the classes and settings it had, its number apart; and on a few
    tokens its output equals, bit for bit, that of the whole model whose stream passes the removed blocks by.

    Single sublayers stay in the model with a last matrix and bias of zeros, because no configuration of
    ``transformers`` can leave them out: what they write is exactly zero, and their parameters remain.

    Args:
        model: a causal or masked language model, or a text encoder, of ``transformers``, in memory, whose
            blocks are a module list; not quantised.
        what: what is removed.

    Raises:
        ConfigError: a block that is not there, no block left, blocks that cannot be told or are shared over
            depth, weights that are packed or not in memory, a cut that the configuration cannot express
            (the setting that would change is named), or a sublayer that zeros do not silence.
        MissingExtraError: ``transformers`` is missing.
    """
    transformers = require("transformers", feature="Cutting a model")
    if not isinstance(model, transformers.PreTrainedModel):
        raise ConfigError(
            f"{type(model).__name__} is no model of transformers; give one that load_model returns."
        )
    whole: Any = model
    depth = depth_of(whole.config)
    path, blocks = block_list(model, depth)
    _check(what, depth)
    _check_weights(model)
    probe_inputs(model)
    with quiet_transformers():
        shorter = _shorter(whole, what.blocks, path, depth)
        _prove(whole, shorter, what, path, blocks)
        place = {block: number for number, block in enumerate(what.kept(depth))}
        for kind, numbers in (("attention", what.attention), ("feed_forward", what.feed_forward)):
            for number in numbers:
                silence(shorter, shorter.get_submodule(path), place[number], kind, named=number)
    return shorter


def _check(what: Cut, depth: int) -> None:
    for number in (*what.blocks, *what.attention, *what.feed_forward):
        if number >= depth:
            raise ConfigError(f"there is no block {number}: the model has {depth}, 0 to {depth - 1}.")
    if not what.kept(depth):
        raise ConfigError(f"all {depth} blocks are to be removed; leave at least one.")


def _check_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(f"{name} is not in memory; load the model without device_map to cut it.")
        if not parameter.is_floating_point() or parameter.element_size() == 1:
            raise ConfigError(f"{name} is {parameter.dtype}, quantised; load the model dense to cut it.")


def _shorter(whole: Any, removed: Sequence[int], path: str, depth: int) -> Any:
    """Build the shorter model and give it the weights of the whole one."""
    name = type(whole).__name__
    try:
        shorter = built_without_weights(whole, cut_config(whole.config, removed))
        weights = _renumbered(whole.state_dict(), path, removed, depth)
        shares = {name: tuple(value.shape) for name, value in shorter.state_dict().items()}
        kept = [block for block in range(depth) if block not in set(removed)]
        weights = {key: _kept_shares(value, shares.get(key), kept, depth) for key, value in weights.items()}
        told, problems = shorter.load_state_dict(weights, assign=True, strict=False)
    except Exception as error:  # a class's own checks can fail with anything
        raise ConfigError(f"{name} cannot be built without blocks {list(removed)}: {brief(error)}") from error
    if told or problems:
        first = (told or problems)[0]
        raise ConfigError(
            f"{name} without blocks {list(removed)} {'lacks' if told else 'has no place for'} {first}: its "
            "configuration cannot say which blocks stay; remove others."
        )
    shorter.tie_weights()
    if whole.can_generate():
        shorter.generation_config = whole.generation_config
    return shorter.train(whole.training)


def _renumbered(state: dict[str, Tensor], path: str, removed: Sequence[int], depth: int) -> dict[str, Tensor]:
    number = {str(b): n for n, b in enumerate(b for b in range(depth) if b not in set(removed))}
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if not name.startswith(f"{path}."):
            found[name] = value
            continue
        block, dot, rest = name.removeprefix(f"{path}.").partition(".")
        if block in number:
            found[f"{path}.{number[block]}{dot}{rest}"] = value
    return found


def _kept_shares(weight: Tensor, shape: tuple[int, ...] | None, kept: list[int], depth: int) -> Tensor:
    """Of a weight that has one share a block, side by side in one dimension, return those of kept blocks.

    Gemma 3n and 4 keep their per-layer embeddings so.
    """
    if shape is None or shape == tuple(weight.shape) or len(shape) != weight.ndim:
        return weight
    differing = [dim for dim in range(weight.ndim) if weight.shape[dim] != shape[dim]]
    dim = differing[0]
    each, rest = divmod(weight.shape[dim], depth)
    if len(differing) > 1 or rest or shape[dim] != each * len(kept):
        return weight
    chosen = torch.tensor(kept, device=weight.device)
    return weight.unflatten(dim, (depth, each)).index_select(dim, chosen).flatten(dim, dim + 1)


def _prove(whole: Any, shorter: Any, what: Cut, path: str, blocks: nn.ModuleList) -> None:
    """Raise where the shorter model is not the whole one without the removed blocks."""
    depth, after = len(blocks), shorter.get_submodule(path)
    name = f"{type(whole).__name__} without blocks {list(what.blocks)}"
    for now, was in enumerate(what.kept(depth)):
        if difference := first_difference(blocks[was], after[now], was, now):
            raise ConfigError(
                f"{name} cannot be said in its configuration: block {was} would change in {difference}; "
                "remove others."
            )
    if strange := changed_buffer(whole, shorter, path):
        raise ConfigError(
            f"{strange} of {type(whole).__name__} is not what its configuration makes, so no checkpoint "
            "keeps it; load the model in the dtype it shall have instead of converting it."
        )
    inputs = probe_inputs(whole)
    with passed_by(blocks, what.blocks):
        expected = main_output(whole, inputs)
    if not torch.equal(main_output(shorter, inputs), expected):
        raise ConfigError(
            f"{name} does not compute what the whole model does when its stream passes them by: a "
            "block's work depends on its number; remove others."
        )
