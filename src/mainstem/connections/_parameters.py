"""Which parameters of a whole model are trained alike."""

from __future__ import annotations

from torch import nn

from mainstem.connections._base import Connection, ParameterGroup
from mainstem.errors import ConfigError


def parameter_groups(module: nn.Module) -> list[ParameterGroup]:
    """Partition all parameters of ``module`` into groups that are trained alike.

    Every :class:`Connection` inside is asked for its own groups; of the rest, matrices (two or more
    dimensions) are decayed and vectors are not. Groups with the same learning-rate multiplier and decay are
    merged, so that an optimiser sees few of them; a tied parameter appears once.

    Args:
        module: any module: a trunk, a tower, a model of someone else.

    Returns:
        Non-empty groups whose parameters are exactly those of ``module.parameters()``, each once.

    Raises:
        ConfigError: a connection's own groups leave out, repeat or invent a parameter.
    """
    merged: dict[tuple[float, bool], list[nn.Parameter]] = {}
    seen: set[int] = set()
    for name, connection in module.named_modules():
        if isinstance(connection, Connection):
            own = connection.parameter_groups()
            _check_partition(name or type(connection).__name__, connection, own)
            for group in own:
                new = [p for p in group.parameters if id(p) not in seen]
                seen.update(id(p) for p in new)
                merged.setdefault((group.lr_multiplier, group.weight_decay), []).extend(new)
    for parameter in module.parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            merged.setdefault((1.0, parameter.ndim >= 2), []).append(parameter)
    groups = [
        ParameterGroup(tuple(parameters), lr_multiplier=lr_multiplier, weight_decay=weight_decay)
        for (lr_multiplier, weight_decay), parameters in merged.items()
        if parameters
    ]
    grouped = [id(p) for group in groups for p in group.parameters]
    assert sorted(grouped) == sorted(id(p) for p in module.parameters()), (
        "groups must partition the parameters"
    )
    return groups


def _check_partition(name: str, connection: Connection, groups: list[ParameterGroup]) -> None:
    claimed = [id(p) for group in groups for p in group.parameters]
    owned = [id(p) for p in connection.parameters()]
    if sorted(claimed) != sorted(owned):
        raise ConfigError(
            f"the parameter groups of connection {name!r} ({type(connection).__name__}) hold {len(claimed)} "
            f"parameters, of which {len(set(claimed) & set(owned))} are its own; it has {len(owned)}. "
            f"Each of its parameters must be in exactly one group of parameter_groups()."
        )
