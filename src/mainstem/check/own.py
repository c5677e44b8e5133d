"""Our own connections as factories: ``mainstem check mainstem.check.own:pre_norm`` (or ``:pre_norm_tower``).

``NAME`` is a `ResidualStack` of the scheme; ``NAME_tower`` a whole tower, a causal language model. Beside the
schemes' names there are those of `VARIANTS`, for what options alone decide, such as what mixes the streams.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from mainstem.check._subject import Factory
from mainstem.check.stack import ResidualStack
from mainstem.connections import Scheme, make_scheme, scheme_names
from mainstem.connections.mhc import CONVENTIONS
from mainstem.tower import Tower, TowerConfig

TOWER = "_tower"
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "frac_connections_static": ("frac_connections", {"dynamic": False}),
    "hyper_connections_static": ("hyper_connections", {"dynamic": False}),
    "mhc_cayley": ("mhc", {"mixing": "cayley"}),
    "mhc_deepseek_v4": ("mhc", CONVENTIONS["deepseek_v4"]),
    "mhc_exact": ("mhc", {"exact_start": True}),
    "mhc_kronecker": ("mhc", {"mixing": "kronecker"}),
    "mhc_megatron": ("mhc", CONVENTIONS["megatron"]),
    "mhc_permutation": ("mhc", {"mixing": "permutation"}),
}
"""Name -> the scheme it is of, and its options."""


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


def subject_names() -> list[str]:
    """Return every name that can be asked for, without ``_tower``."""
    return [*scheme_names(), *VARIANTS]


def __getattr__(name: str) -> Factory:
    stem = name.removesuffix(TOWER)
    if stem not in subject_names():
        names = ", ".join(subject_names())
        raise AttributeError(f"{name!r} is no connection of mainstem; they are: {names}.")
    scheme, options = VARIANTS.get(stem, (stem, {}))
    if name == stem:
        return functools.partial(stack_of, make_scheme(scheme, **options))
    return functools.partial(tower_of, scheme, **options)
