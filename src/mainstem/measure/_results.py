"""What every result has in common: plain, frozen, and ready for JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import numpy as np

from mainstem.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Result:
    """Base of the result dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts; an undefined or not finite figure is None."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


@dataclasses.dataclass(frozen=True)
class Split(Result):
    """A mean over tokens, with the first token of every sequence apart (its norm is often a thousand times
    the rest's).

    Attributes:
        rest: over all real tokens but the first of each sequence; nan where there is none.
        first: over the first token of each sequence; nan where there is none.
        all: over both.
    """

    rest: float
    first: float
    all: float

    @classmethod
    def undefined(cls) -> Self:
        """The split of no tokens at all."""
        return cls(math.nan, math.nan, math.nan)


def require_positive(name: str, value: int) -> int:
    """Return ``value`` if it is at least 1.

    Raises:
        ConfigError: it is not.
    """
    if value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1.")
    return value
