"""Interventions on a tower through its connections, for the schemes whose stream no data flow shows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from mainstem.connections import Connection
from mainstem.errors import ConfigError
from mainstem.intervene.kinds import Intervention, Place, Skip, Zero
from mainstem.observe import StreamMap, TowerMap
from mainstem.tower import Tower

Change = Callable[[Tensor, Tensor], Tensor]


def tower_of(model: nn.Module) -> Tower:
    """Return the tower that ``model`` is or holds.

    Raises:
        ConfigError: it is none.
    """
    for module in model.modules():
        if isinstance(module, Tower):
            return module
    raise ConfigError(
        f"{type(model).__name__} is no mainstem tower, so its stream must be found first: pass "
        "stream_map=mainstem.observe.find_stream(model, inputs)."
    )


def left_out(blocks: Sequence[int], stream_map: StreamMap | None = None) -> Intervention:
    """Return the intervention that leaves some blocks out of a pass.

    They are skipped: the stream passes them by. A history cannot, for each block makes it longer and later
    ones read it by place; there the sublayers of the blocks write nothing: 0 instead of what they worked out.

    Args:
        blocks: their numbers.
        stream_map: of the model.
    """
    if isinstance(stream_map, TowerMap) and stream_map.has_history:
        return Zero(blocks=blocks, part="writes")
    return Skip(blocks=blocks)


@contextmanager
def through_connections(model: nn.Module, interventions: Sequence[Intervention]) -> Generator[None]:
    """Hook the branches and blocks of a tower, and take the hooks away again.

    Raises:
        ConfigError: a block or part that the tower does not have, or an intervention that is not defined for
            its connection.
    """
    tower = tower_of(model)
    with ExitStack() as stack, torch.compiler.set_stance("force_eager"):
        for one in interventions:
            for block in one.blocks:
                if not 0 <= block < len(tower.blocks):
                    raise ConfigError(f"block {block} is not one of the tower's {len(tower.blocks)}.")
                for handle in _hooks(tower, one, block):
                    stack.callback(handle.remove)
        yield


def _hooks(tower: Tower, one: Intervention, block: int) -> list[Any]:
    module = tower.blocks[block]
    if one.part in ("block", "state"):
        _require_one_state(tower, one)
        return [module.register_forward_hook(_around(one, Place(block, one.part), tower.passes_values))]
    found: list[Any] = []
    own = [(c, branches) for index, c, branches in tower.sublayers() if index == block]
    for number, (connection, branches) in enumerate(own):
        for kind, branch in branches.items():
            if one.part in ("writes", kind):
                place = Place(block, kind, number)
                found.append(_sublayer_hook(tower, one, place, connection, (branch, len(branches))))
    if not found:
        kinds = [kind for _, branches in own for kind in branches]
        raise ConfigError(f"block {block} has no {one.part!r}; it has {', '.join(kinds)}.")
    return found


def _sublayer_hook(
    tower: Tower,
    one: Intervention,
    place: Place,
    connection: Connection,
    branch: tuple[nn.Module, int],
) -> Any:
    module, num_branches = branch
    if not isinstance(one, Skip):

        def changed(_module: nn.Module, _args: Any, out: Any) -> Any:
            return one.apply(cast(Tensor, out), place)

        return module.register_forward_hook(changed)
    if num_branches > 1:
        raise ConfigError(
            f"skipping {place.part!r} alone in block {place.block} is not defined: attention and "
            "feed-forward are written as one sum. Use Zero, or skip the block."
        )
    _require_one_state(tower, one)
    return connection.register_forward_hook(_around(one, place, False))


def _around(one: Intervention, place: Place, passes_values: bool) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        before = cast(Tensor, args[0])
        after = cast(Tensor, output[0] if passes_values else output)
        new = one.apply(after, place) if one.part == "state" else one.apply_update(before, after, place)
        return (new, *output[1:]) if passes_values else new

    return hook


def _require_one_state(tower: Tower, one: Intervention) -> None:
    if tower.config.scheme().properties.has_history:
        raise ConfigError(
            f"{type(one).__name__} at {one.part!r} is not defined for connection "
            f"{tower.config.connection!r}: its stream is a history of states or writes, which a block makes "
            "longer, and later blocks read by its place. Use Zero(part='writes'), which leaves every "
            "write its place."
        )
