"""What a reducer has seen as plain numbers, text and tensors, and these as bytes: for a file or another rank.

Nothing here is a pickle: bytes of another's making can hold wrong figures but run no code.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Protocol, Self, TypeVar, cast

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from mainstem.measure._results import Result


class Storable(Protocol):
    """A part of a reducer that has a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Return it as values that `encode` knows."""
        ...

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the part anew."""
        ...


_STORABLE: dict[str, type[Storable]] = {}
_Class = TypeVar("_Class", bound=type[Storable])


def storable(cls: _Class) -> _Class:
    """Let `encode` and `decode` know a class by its name."""
    _STORABLE[cls.__name__] = cls
    return cls


def encode(value: Any) -> Any:
    """Return a value as JSON holds it, but for tensors, which are in it as they are.

    Lists stay lists; what JSON does not have is a dict with one key that says what it is. Exact: ``decode``
    gives an equal value, floats to the bit.

    Raises:
        TypeError: a value of a kind that is not known here.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray):
        return {"array": torch.from_numpy(np.array(value))}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Result):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"result": [type(value).__name__, fields]}
    if type(value).__name__ in _STORABLE:
        state = cast("Storable", value).state_dict()
        return {"part": [type(value).__name__, {name: encode(v) for name, v in state.items()}]}
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value)
        return {"dict": [[encode(key), encode(entry)] for key, entry in pairs.items()]}
    if isinstance(value, list):
        return [encode(entry) for entry in cast("list[Any]", value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(entry) for entry in cast("tuple[Any, ...]", value)]}
    raise TypeError(f"A state holds a {type(value).__name__}, which has no form of its own in a file.")


def decode(value: Any) -> Any:
    """Return what ``encode`` was given; nothing in it is shared with ``value``."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list):
        return [decode(entry) for entry in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = cast("dict[str, Any]", value).items()
    if kind == "array":
        return inner.clone().numpy()
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "tuple":
        return tuple(decode(entry) for entry in inner)
    if kind == "dict":
        return {decode(key): decode(entry) for key, entry in inner}
    name, fields = inner
    values = {field: decode(entry) for field, entry in fields.items()}
    return _STORABLE[name].from_state_dict(values) if kind == "part" else _results()[name](**values)


def _results() -> dict[str, type[Result]]:
    found: dict[str, type[Result]] = {}
    waiting: list[type[Result]] = [Result]
    while waiting:
        cls = waiting.pop()
        found[cls.__name__] = cls
        waiting += cls.__subclasses__()
    return found


def to_bytes(state: Any) -> bytes:
    """Return an encoded state as one safetensors file, the JSON in its header."""
    tensors: dict[str, Tensor] = {}

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = str(len(tensors))
            tensors[name] = value.contiguous()
            return {"tensor": name}
        if isinstance(value, list):
            return [take(entry) for entry in cast("list[Any]", value)]
        if isinstance(value, dict):
            return {key: take(entry) for key, entry in cast("dict[str, Any]", value).items()}
        return value

    tree = json.dumps(take(state))
    return safetensors.torch.save(tensors or {"none": torch.zeros(0)}, {"state": tree})


def from_bytes(data: bytes) -> Any:
    """Return the state that ``to_bytes`` was given.

    Raises:
        ValueError: these are no such bytes, or not all of them.
    """
    try:
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        tree = json.loads(data[8 : 8 + length])["__metadata__"]["state"]
    except (safetensors.SafetensorError, KeyError) as error:
        raise ValueError(f"This is no state of reducers: {error}.") from error

    def put(value: Any) -> Any:
        if isinstance(value, list):
            return [put(entry) for entry in cast("list[Any]", value)]
        if isinstance(value, dict):
            entries = cast("dict[str, Any]", value)
            if entries.keys() == {"tensor"}:
                return tensors[entries["tensor"]]
            return {key: put(entry) for key, entry in entries.items()}
        return value

    return put(json.loads(tree))
