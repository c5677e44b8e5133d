"""What a shorter model saves: tokens a second, weights, and the cache of keys and values."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mainstem.measure import Result

_NEW_TOKENS, _PROMPT = 16, 32


@dataclasses.dataclass(frozen=True)
class Speed(Result):
    """Tokens a second over rounds in which the models take turns.

    Attributes:
        median: over the rounds; ``low`` and ``high`` are the slowest and the fastest.
        rounds: how many.
    """

    median: float
    low: float
    high: float
    rounds: int


@dataclasses.dataclass(frozen=True)
class Size(Result):
    """What a model takes and gives.

    Attributes:
        num_blocks: blocks.
        num_parameters: parameters, shared ones once.
        weight_bytes: of parameters and buffers, shared ones once.
        cache_bytes_per_token: keys and values that the model keeps for each token of one sequence, counted in
            a cache it filled; None for a model that keeps none that grows with its text.
        reading: forward passes over a batch of whole windows, no cache.
        writing: greedy generation of one sequence with a cache; None for a model that does not generate.
    """

    num_blocks: int
    num_parameters: int
    weight_bytes: int
    cache_bytes_per_token: int | None
    reading: Speed
    writing: Speed | None


def measure_sizes(
    models: Mapping[str, nn.Module], inputs: Mapping[str, Any], depths: Mapping[str, int], rounds: int
) -> dict[str, Size]:
    """Measure models side by side, round by round, after one round to be warm.

    Args:
        models: by name, in eval mode.
        inputs: keyword arguments of their forward; ids and mask ``[batch, pos]``.
        depths: blocks of each.
        rounds: how often each is timed.
    """
    ids: Tensor = inputs["input_ids"]
    reading = _in_turn(models, lambda model: _read(model, inputs), ids.numel(), rounds)
    generates = all(
        callable(getattr(m, "can_generate", None)) and _any(m).can_generate() for m in models.values()
    )
    prompt = ids[:1, :_PROMPT]
    writing = _in_turn(models, lambda m: _write(m, prompt), _NEW_TOKENS, rounds) if generates else {}
    return {
        name: Size(
            num_blocks=depths[name],
            num_parameters=sum(p.numel() for p in model.parameters()),
            weight_bytes=_weight_bytes(model),
            cache_bytes_per_token=_cache_bytes(model, prompt),
            reading=reading[name],
            writing=writing.get(name),
        )
        for name, model in models.items()
    }


def reading_ratio(one: nn.Module, other: nn.Module, inputs: Mapping[str, Any], rounds: int) -> float:
    """Return how many times faster than ``one`` the ``other`` reads, by medians."""
    ids: Tensor = inputs["input_ids"]
    speeds = _in_turn({"one": one, "other": other}, lambda m: _read(m, inputs), ids.numel(), rounds)
    return speeds["other"].median / speeds["one"].median


def _in_turn(
    models: Mapping[str, nn.Module], run: Callable[[nn.Module], None], num_tokens: int, rounds: int
) -> dict[str, Speed]:
    found: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    for number in range(rounds + 1):
        for name in names if number % 2 else names[::-1]:
            begin = time.perf_counter()
            run(models[name])
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number:  # the first is to be warm
                found[name].append(num_tokens / (time.perf_counter() - begin))
    return {n: Speed(statistics.median(s), min(s), max(s), rounds) for n, s in found.items()}


@torch.no_grad()
def _read(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    model(**inputs)


@torch.no_grad()
def _write(model: nn.Module, prompt: Tensor) -> None:
    _any(model).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=_NEW_TOKENS,
        max_new_tokens=_NEW_TOKENS,
        pad_token_id=0,
        use_cache=True,
    )


def _weight_bytes(model: nn.Module) -> int:
    """Tensors that lie at one place count once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors}.values())


@torch.no_grad()
def _cache_bytes(model: nn.Module, prompt: Tensor) -> int | None:
    """Twice as long a text, and what the cache grew by, a token."""
    if prompt.shape[1] < 2 or not getattr(_any(model).config, "use_cache", False):
        return None
    half = prompt.shape[1] // 2
    sizes = [_held(model, prompt[:, :n]) for n in (half, 2 * half)]
    return (sizes[1] - sizes[0]) // half or None


def _held(model: nn.Module, ids: Tensor) -> int:
    cache = getattr(model(input_ids=ids, use_cache=True), "past_key_values", None)
    layers = getattr(cache, "layers", ())
    tensors = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _any(model: nn.Module) -> Any:
    return model
