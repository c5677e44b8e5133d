"""The end of a model, from its final state to its output, to be run again on other states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands for a tensor that the tail makes, in the arguments of a taped call."""

    number: int


@dataclasses.dataclass(frozen=True)
class Taped:
    """A call with a `Slot` for every tensor that depends on the final state, and the slots that it makes."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: list[int | None]


class Tail:
    """The calls from the final state to the output, as a function of the state.

    Norm statistics are recomputed for each state; caps, scales and biases of the head are all there, because
    they are the model's own calls. A state must have the shape of the pass that was recorded.

    Attributes:
        calls: in order; slot 0 is the final state.
        output: slot of what comes out.
        shape: of the final state.
    """

    def __init__(self, calls: list[Taped], output: int, shape: Sequence[int]):
        self.calls, self.output, self.shape = calls, output, shape

    def __call__(self, state: Tensor) -> Tensor:
        """``[batch, pos, (n,) width]`` -> the model's output, ``[batch, pos, vocab]`` for a language
        model."""
        made: dict[int, Any] = {0: state}

        def fill(x: Any) -> Any:
            return made[x.number] if isinstance(x, Slot) else x

        last_use = {
            leaf.number: i
            for i, call in enumerate(self.calls)
            for leaf in pytree.tree_leaves((call.args, call.kwargs))
            if isinstance(leaf, Slot)
        }
        for i, call in enumerate(self.calls):
            args, kwargs = pytree.tree_map(fill, (call.args, call.kwargs))
            out = call.func(*args, **kwargs)
            for number, t in zip(call.makes, pytree.tree_leaves(out), strict=True):
                if number is not None:
                    made[number] = t
            for number in [n for n in made if last_use.get(n, -1) <= i and n != self.output]:
                del made[number]
        return made[self.output]


class TailRecorder:
    """Tapes calls that depend on the final state."""

    def __init__(self) -> None:
        self.is_open = False
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._calls: list[Taped] = []

    def open(self, state: Tensor) -> None:
        """Begin with the final state."""
        self.is_open = True
        self._number(state)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call, taping it if it depends on the state."""
        template = pytree.tree_map(self._template, (args, kwargs))
        out = func(*args, **kwargs)
        makes = pytree.tree_leaves(out)
        if any(isinstance(leaf, Slot) for leaf in pytree.tree_leaves(template)) and any(
            isinstance(t, Tensor) for t in makes
        ):
            numbers = [self._number(t) if isinstance(t, Tensor) else None for t in makes]
            self._calls.append(Taped(func, template[0], template[1], numbers))
        return out

    def close(self, output: Any, name: str) -> Tail | None:
        """Return the tail that makes the model's main output, or None where it is not a tensor made here."""
        self.is_open = False
        candidates = (
            [output[name]] if isinstance(output, Mapping) and name in output else pytree.tree_leaves(output)
        )
        numbers = [
            self._numbers[id(t)] for t in candidates if isinstance(t, Tensor) and id(t) in self._numbers
        ]
        shape = self._alive[0].shape if self._alive else ()
        self._alive.clear()
        self._numbers = {}
        return Tail(self._calls, numbers[0], shape) if numbers else None

    def _template(self, x: Any) -> Any:
        return Slot(self._numbers[id(x)]) if isinstance(x, Tensor) and id(x) in self._numbers else x

    def _number(self, t: Tensor) -> int:
        if id(t) not in self._numbers:
            self._numbers[id(t)] = len(self._numbers)
            self._alive.append(t)
        return self._numbers[id(t)]
