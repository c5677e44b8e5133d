"""Where a model keeps its blocks, what it does without some of them, and whether a block is still itself."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from mainstem.errors import ConfigError
from mainstem.sources import require

_PROBE_TOKENS = 12
# No settings of a block: whether it trains, and whether blocks above read its keys (Gemma 4), which depends
# on which of them are there and which the outputs prove.
_PASSING = ("training", "store_full_length_kv")
_PLAIN = (bool, int, float, str, type(None))


def block_list(model: nn.Module, depth: int) -> tuple[str, nn.ModuleList]:
    """Return the path and the list that holds the model's blocks.

    Raises:
        ConfigError: none is as long as the model is deep, as where one block is shared over depth (ALBERT),
            or more than one is.
    """
    found: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) != depth:
            continue
        if not any(path.startswith(f"{outer}.") for outer, _ in found):
            found.append((path, module))
    name = type(model).__name__
    found = _those_of_the_text(model, found)
    if not found:
        raise ConfigError(
            f"{name} has no list of its {depth} blocks: its blocks are shared over depth or kept otherwise, "
            "so none can be removed alone; give a model with a module list of blocks."
        )
    if len(found) > 1:
        raise ConfigError(
            f"{name} has {len(found)} lists of {depth} modules ({', '.join(path for path, _ in found)}), and "
            "which of them are its blocks cannot be told; give a model with one."
        )
    path, blocks = found[0]
    if len({id(block) for block in blocks}) != depth:
        raise ConfigError(f"{name} uses one block at several depths, so none can be removed alone.")
    return path, blocks


def _those_of_the_text(model: Any, found: list[tuple[str, nn.ModuleList]]) -> list[tuple[str, nn.ModuleList]]:
    """Of several lists, keep those of the decoder, and of these those whose modules are blocks."""
    if len(found) > 1 and hasattr(model, "get_decoder"):
        inside = {id(module) for module in model.get_decoder().modules()}
        found = [one for one in found if id(one[1]) in inside] or found
    if len(found) > 1:
        named = set(getattr(model, "_no_split_modules", None) or ())
        found = [one for one in found if {type(block).__name__ for block in one[1]} <= named] or found
    return found


def probe_inputs(model: Any) -> dict[str, Any]:
    """Return a sequence of a few different tokens, on the model's device.

    Raises:
        ConfigError: the model reads no tokens.
    """
    vocab = getattr(model.config.get_text_config(), "vocab_size", None)
    if not isinstance(vocab, int):
        raise ConfigError(f"{type(model).__name__} reads no tokens; give a language model or a text encoder.")
    ids = (torch.arange(_PROBE_TOKENS) * 7 + 3) % vocab
    device = next(model.parameters()).device
    return {"input_ids": ids[None].to(device), "attention_mask": torch.ones_like(ids)[None].to(device)}


def _plain_call(model: nn.Module, inputs: dict[str, Any]) -> Any:
    return model(**inputs)


def aligned_call(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Call the model with its weights copied to memory that begins where kernels like it."""
    copied = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    return torch.func.functional_call(model, copied, (), inputs)


def brief(error: BaseException) -> str:
    """Return an error of somebody else's code in a line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def main_output(
    model: Any, inputs: dict[str, Any], call: Callable[[Any, dict[str, Any]], Any] = _plain_call
) -> Tensor:
    """Return the model's logits, or its last states where it has no head; in eval mode, without gradients.

    Raises:
        ConfigError: the model does not run.
    """
    training = model.training
    model.eval()
    takes = inspect.signature(model.forward).parameters
    if "use_cache" in takes or ("kwargs" in takes and model.can_generate()):
        inputs = {**inputs, "use_cache": False}  # a hybrid's cache may want an attention that is not there
    try:
        with torch.no_grad():
            output = call(model, inputs)
    except Exception as error:  # a model's own code can fail with anything
        raise ConfigError(f"{type(model).__name__} does not run on a few tokens: {brief(error)}") from error
    finally:
        model.train(training)
    logits = getattr(output, "logits", None)
    return output[0] if logits is None else logits


@contextlib.contextmanager
def passed_by(blocks: nn.ModuleList, removed: Sequence[int]) -> Generator[None]:
    """Inside the block, the stream passes the ``removed`` blocks by unchanged."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = args[0] if args else kwargs["hidden_states"]
        entered.append(state.clone())  # some blocks add to it in place

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        state = entered.pop()
        if isinstance(output, (tuple, list)):
            entries = cast(Sequence[Any], output)
            return type(output)((state, *entries[1:]))
        return state

    entered: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        for number in removed:
            block = blocks[number]
            stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leave).remove)
        yield


def first_difference(old: nn.Module, new: nn.Module, was: int, now: int) -> str | None:
    """Say in what a kept block differs from what it was, its number apart; None where it is the same."""
    theirs = dict(new.named_modules())
    if [*theirs] != [path for path, _ in old.named_modules()]:
        return "its modules"
    for path, module in old.named_modules():
        other = theirs[path]
        if type(module) is not type(other):
            return f"{path or 'itself'} ({type(module).__name__}, now {type(other).__name__})"
        for name, value, after in _plain_attributes(module, other):
            renumbered = (value, after) == (was, now) and any(
                word in name for word in ("layer", "idx", "index")
            )
            if value != after and not renumbered:
                return f"{f'{path}.' if path else ''}{name} ({value!r}, now {after!r})"
    return None


def changed_buffer(whole: nn.Module, shorter: nn.Module, path: str) -> str | None:
    """Name a buffer outside the blocks, such as rotary frequencies, that is not as the class makes it.

    A model that was converted by ``.to(bfloat16)`` has rounded ones, which are in no checkpoint.
    """
    made = dict(shorter.named_buffers())
    for name, buffer in whole.named_buffers():
        if name.startswith(f"{path}.") or name not in made or made[name].is_meta:
            continue
        other = made[name].to(buffer.device)
        if other.dtype != buffer.dtype or not torch.equal(other, buffer):
            return f"the buffer {name} ({buffer.dtype})"
    return None


def _plain_attributes(module: nn.Module, other: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    for name, value in vars(module).items():
        if name in _PASSING or name.startswith("_") or not isinstance(value, _PLAIN):
            continue
        yield name, value, vars(other).get(name)


def built_without_weights(model: Any, config: Any) -> Any:
    """Build a model of the same class from ``config``; its weights are whatever memory held."""
    initialization = require("transformers.initialization", feature="Cutting a model")
    with initialization.no_init_weights():
        return type(model)._from_config(config, **loading_options(model))


def loading_options(model: Any) -> dict[str, Any]:
    """Return the dtype, and the implementations of attention and experts, which no configuration keeps."""
    options: dict[str, Any] = {"dtype": model.dtype}
    for kind in ("attn", "experts"):
        private, config = f"_{kind}_implementation", model.config
        parts = {"": config, **{key: getattr(config, key, None) for key in config.sub_configs}}
        chosen = {key: getattr(part, private, None) for key, part in parts.items()}
        chosen = {key: value for key, value in chosen.items() if value is not None}
        if chosen:
            options[private.removeprefix("_")] = chosen if len(parts) > 1 else chosen[""]
    return options
