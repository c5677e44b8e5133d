"""One mHC as several implementations lay it out: which index is read, how Sinkhorn begins and is guarded."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mainstem.connections.mhc import CONVENTIONS, Mhc, transpose_orientation
from mainstem.errors import ConfigError
from mainstem.tower import Tower

LAYOUTS = tuple(CONVENTIONS)
"""What :func:`convert_layout` takes; see `mainstem.connections.mhc.CONVENTIONS`."""


@torch.no_grad()
def convert_layout(source: Tower, layout: str) -> tuple[Tower, dict[str, list[str]]]:
    """Return a tower whose mHC connections are laid out as an implementation has them.

    Where the mixing matrix is kept transposed, the rows of its bias and projection are put in that order,
    which changes nothing. What else the layouts differ in is not the same function: an epsilon of 1e-6
    beside sums and reads, and whether rows or columns are divided last; so the distance is to be measured.
    Streams that were averaged at the end are summed by a head of equal weights where the layout has one.

    Args:
        source: a tower with ``connection="mhc"`` and a Sinkhorn mix; not changed.
        layout: ``"paper"``, ``"deepseek_v4"`` or ``"megatron"``.

    Returns:
        The tower in eval mode; and ``{"new": names, "left_out": names}`` of its and of the source's state.

    Raises:
        ConfigError: the layout is not known, or the tower has other connections or another mix.
    """
    if layout not in CONVENTIONS:
        raise ConfigError(f"no layout is called {layout!r}; choose one of: {', '.join(LAYOUTS)}.")
    if source.config.connection != "mhc":
        raise ConfigError(
            f"layouts are known of 'mhc', not of {source.config.connection!r}; add --connection mhc."
        )
    options = dict(source.config.connection_options)
    there: Any = source.config.scheme()
    if there.mixing != "sinkhorn":
        raise ConfigError(f"layouts are known of a Sinkhorn mix, not of mixing={there.mixing!r}.")
    state = source.state_dict()
    wanted = _options(options, layout)
    if Mhc(**wanted).orientation != there.orientation:
        state, _ = transpose_orientation(state, options)
    config = dataclasses.replace(source.config, connection_options=wanted)
    tower = Tower(config).to(source.token_embedding.weight.dtype)
    started = tower.state_dict()
    shared = {name: value for name, value in state.items() if name in started}
    tower.load_state_dict({**started, **shared})
    tower.tie_weights()
    return tower.eval(), {
        "new": [name for name in started if name not in shared],
        "left_out": [name for name in state if name not in shared],
    }


def _options(options: dict[str, Any], layout: str) -> dict[str, Any]:
    """Return a layout's options; what no layout speaks of stays, the way out too where this one is silent."""
    spoken = {name for convention in CONVENTIONS.values() for name in convention} - {"collapse"}
    kept = {name: value for name, value in options.items() if name not in {*spoken, "exact_start"}}
    if kept.get("collapse") is None and options.get("exact_start"):
        kept["collapse"] = "mean"  # which is what exact_start means by None
    return {**kept, **CONVENTIONS[layout]}
