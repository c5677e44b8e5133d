"""Our own connections as factories: ``mainstem check mainstem.check.own:pre_norm`` (or ``:pre_norm_tower``).

``NAME`` is a `ResidualStack` of the scheme; ``NAME_tower`` a whole tower, a causal language model.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from mainstem.check._subject import Factory
from mainstem.check.stack import ResidualStack
from mainstem.connections import Scheme, make_scheme, scheme_names
from mainstem.tower import Tower, TowerConfig

TOWER = "_tower"


def stack_of(scheme: Scheme, depth: int, width: int = 32) -> ResidualStack:
    """Return a stack of ``depth`` sublayers joined by ``scheme``."""
    trunk = scheme.build(width=width, num_sublayers=depth)
    stack = ResidualStack(
        trunk.release_connections(),
        width=width,
        expand=trunk.expand,
        collapse=trunk.collapse,
        norm_branches=False,
        final_norm=trunk.final_norm,
        exact_start=scheme.exact_start or scheme.properties.equals_pre_norm_at_start,
    )
    stack.trunk = trunk  # a way in or out may have parameters of its own
    return stack


def tower_of(connection: str, depth: int, width: int = 32, **options: Any) -> nn.Module:
    """Return a language model of ``depth`` blocks joined by the scheme called ``connection``."""
    config = TowerConfig(
        vocab_size=61,
        width=width,
        num_blocks=depth,
        num_heads=2,
        connection=connection,
        connection_options=options,
    )
    return Tower(config)


def __getattr__(name: str) -> Factory:
    if name in scheme_names():
        return functools.partial(stack_of, make_scheme(name))
    if name.removesuffix(TOWER) in scheme_names():
        return functools.partial(tower_of, name.removesuffix(TOWER))
    raise AttributeError(f"{name!r} is no connection of mainstem; they are: {', '.join(scheme_names())}.")
