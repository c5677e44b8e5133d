"""Where a state of the stream goes into a block's module and out of it, so that a pass can begin in the
middle."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mainstem.errors import StreamNotFoundError
from mainstem.intervene._mode import InterveneMode
from mainstem.observe import StreamMap
from mainstem.observe.find import probe

Turn = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class NoDoorsError(Exception):
    """The blocks of a model cannot be passed over; the message says why."""


class Doors:
    """The way into and out of every block.

    Found on a few tokens: each block must be one call of its module that takes the state as an argument and
    returns it, and no other tensor. The map says that the state is a dominator, so nothing else of the blocks
    below reaches the ones above.

    Raises:
        NoDoorsError: it is not so.
    """

    def __init__(self, model: nn.Module, stream_map: StreamMap, inputs: Mapping[str, Any]):
        modules = dict(model.named_modules())
        self.blocks = [modules[b.module] for b in stream_map.blocks if b.module in modules]
        if len(self.blocks) != len(stream_map.blocks):
            raise NoDoorsError("its blocks are no modules of their own")
        self._slots: list[int] = []
        self._outs: list[tuple[list[Any], pytree.TreeSpec, int]] = []
        states: dict[int, Tensor] = {}
        mode = InterveneMode(model, stream_map, [], on_state=states.__setitem__)
        with (
            torch.random.fork_rng(),
            torch.no_grad(),
            mode.tracker,
            mode,
            replaced(self.blocks, self._look(states)),
        ):
            model(**probe(inputs))
        if len(self._outs) != len(self.blocks):
            raise NoDoorsError("its blocks are not called one after another")

    def _look(self, states: dict[int, Tensor]) -> Turn:
        def turn(
            block: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            given = pytree.tree_leaves((args, kwargs))
            slot = _find(given, states.get(block))
            out = forward(*args, **kwargs)
            leaves, spec = pytree.tree_flatten(out)
            place = _find(leaves, states.get(block + 1))
            if slot is None or place is None:
                raise NoDoorsError(f"the state does not pass the door of block {block} as it is")
            if sum(isinstance(leaf, Tensor) for leaf in leaves) > 1:
                raise NoDoorsError(f"block {block} returns more tensors than the state")
            self._slots.append(slot)
            template = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self._outs.append((template, spec, place))
            return out

        return turn

    def passing(
        self,
        first: int,
        entries: Mapping[int, list[tuple[range, Tensor]]],
        on_state: Callable[[int, Tensor], None],
        seconds: list[float] | None = None,
        skipped: Collection[int] = (),
    ) -> AbstractContextManager[None]:
        """Have the one pass inside do nothing in blocks below ``first``, nor in those that are skipped.

        Args:
            first: the first block that runs.
            entries: by block, which rows of the state that enters it are put in place of what was made.
                ``num_blocks`` stands for the end of the model.
            on_state: told of the state that enters each block from ``first`` on, as it enters.
            seconds: filled with the time of each block.
            skipped: blocks from ``first`` on that the state passes by.
        """

        def turn(
            block: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            begin = time.perf_counter()
            template, spec, place = self._outs[block]
            if block < first or block in skipped:
                state = pytree.tree_leaves((args, kwargs))[self._slots[block]]
                leaves = list(template)
            else:
                leaves = pytree.tree_leaves(forward(*args, **kwargs))
                state = leaves[place]
            for rows, cached in entries.get(block + 1, ()):
                state = torch.cat([state[: rows.start], cached, state[rows.stop :]])
            if block + 1 >= first:
                on_state(block + 1, state)
            leaves[place] = state
            if seconds is not None:
                seconds.append(time.perf_counter() - begin)
            return pytree.tree_unflatten(leaves, spec)

        return replaced(self.blocks, turn)


@contextmanager
def replaced(blocks: Sequence[nn.Module], turn: Turn) -> Generator[None]:
    """Have ``turn`` called for every block of the passes inside, in this order.

    Raises:
        StreamNotFoundError: they are called in another order.
    """
    calls = iter(range(len(blocks)))

    def through(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            block = next(calls, None)
            if block is None or blocks[block] is not module:
                raise StreamNotFoundError("the blocks were called in another order than in the map.")
            return turn(block, forward, args, kwargs)

        return call

    own = {m: vars(m).get("forward") for m in dict.fromkeys(blocks)}
    try:
        for module in own:
            module.forward = through(module, module.forward)
        yield
    finally:
        for module, forward in own.items():
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward


def _find(leaves: list[Any], state: Tensor | None) -> int | None:
    return next((i for i, leaf in enumerate(leaves) if leaf is state and state is not None), None)
