"""Schemes by name."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from typing import Any

from mainstem.connections._base import Scheme
from mainstem.connections.admin import Admin
from mainstem.connections.attention_residuals import AttentionResiduals
from mainstem.connections.b2t import B2T
from mainstem.connections.backout import Backout
from mainstem.connections.deep_delta import DeepDelta
from mainstem.connections.deep_norm import DeepNorm
from mainstem.connections.delta_attention_residuals import DeltaAttentionResiduals
from mainstem.connections.dense_former import DenseFormer
from mainstem.connections.depth_scaled import DepthScaled
from mainstem.connections.frac_connections import FracConnections
from mainstem.connections.gated_streams import GatedStreams
from mainstem.connections.gru_gate import GRUGate
from mainstem.connections.highway import Highway
from mainstem.connections.hyper_connections import HyperConnections
from mainstem.connections.identity_hc import IdentityHC
from mainstem.connections.independent_hc import IndependentHC
from mainstem.connections.keel import Keel
from mainstem.connections.laurel import Laurel
from mainstem.connections.layer_norm_scaling import LayerNormScaling
from mainstem.connections.layer_scale import LayerScale
from mainstem.connections.mhc import Mhc
from mainstem.connections.mix_norm import MixNorm
from mainstem.connections.mudd import MUDD
from mainstem.connections.mv_split import MVSplit
from mainstem.connections.ngpt import NGPT
from mainstem.connections.no_residual import NoResidual
from mainstem.connections.orthogonal_update import OrthogonalUpdate
from mainstem.connections.post_norm import PostNorm
from mainstem.connections.pre_norm import PreNorm
from mainstem.connections.reordered_norm import ReorderedNorm
from mainstem.connections.resi_dual import ResiDual
from mainstem.connections.reversible import Reversible
from mainstem.connections.rezero import ReZero
from mainstem.connections.sandwich_norm import SandwichNorm
from mainstem.connections.siamese_norm import SiameseNorm
from mainstem.connections.stochastic_depth import StochasticDepth
from mainstem.connections.sub_norm import SubNorm
from mainstem.connections.unet_skips import UNetSkips
from mainstem.connections.x0_reinjection import X0Reinjection
from mainstem.errors import ConfigError

SCHEMES: dict[str, type[Scheme]] = {
    scheme.name: scheme
    for scheme in (
        NoResidual,
        PreNorm,
        PostNorm,
        SandwichNorm,
        ReorderedNorm,
        DeepNorm,
        HyperConnections,
        X0Reinjection,
        Laurel,
        Highway,
        GRUGate,
        LayerScale,
        ReZero,
        LayerNormScaling,
        DepthScaled,
        StochasticDepth,
        MixNorm,
        ResiDual,
        B2T,
        SubNorm,
        Admin,
        Keel,
        SiameseNorm,
        MVSplit,
        IdentityHC,
        IndependentHC,
        Mhc,
        DenseFormer,
        MUDD,
        AttentionResiduals,
        DeltaAttentionResiduals,
        UNetSkips,
        Backout,
        FracConnections,
        GatedStreams,
        OrthogonalUpdate,
        DeepDelta,
        NGPT,
        Reversible,
    )
}


ENTRY_POINT_GROUP = "mainstem.connections"
"""Where an installed package names its schemes: ``my_scheme = "my_package.module:MyScheme"``."""


def register(scheme: type[Scheme]) -> type[Scheme]:
    """Make a scheme known by its name, to configs and to the command; usable as a class decorator.

    Raises:
        ConfigError: it is no `Scheme`, has no name, or its name is taken by another.
    """
    name = getattr(scheme, "name", None)
    if not isinstance(name, str) or not issubclass(scheme, Scheme):
        raise ConfigError(f"{scheme!r} is no connection scheme: expected a subclass of Scheme with a name.")
    if SCHEMES.setdefault(name, scheme) is not scheme:
        raise ConfigError(f"the name {name!r} is taken by {SCHEMES[name].__name__}; choose another.")
    return scheme


@functools.cache
def _load_entry_points() -> None:
    """Register what installed packages offer, once, when a name is first asked for.

    Raises:
        ConfigError: a package's entry point cannot be loaded.
    """
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            register(point.load())
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the connection {point.name!r} of an installed package cannot be loaded from "
                f"{point.value!r} ({error}); mend or uninstall that package."
            ) from error


def scheme_names() -> list[str]:
    """Return the names that :func:`make_scheme` takes: ours, registered ones, and those of other packages."""
    _load_entry_points()
    return sorted(SCHEMES)


def make_scheme(name: str, **options: Any) -> Scheme:
    """Return the scheme called ``name`` with the given options.

    Raises:
        ConfigError: no scheme has that name, or it has no such option.
    """
    if name not in SCHEMES:
        _load_entry_points()
    if name not in SCHEMES:
        raise ConfigError(f"no connection is called {name!r}; choose one of: {', '.join(scheme_names())}.")
    scheme = SCHEMES[name]
    known = {field.name for field in dataclasses.fields(scheme)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(
            f"connection {name!r} has no option {', '.join(unknown)}; "
            f"its options are: {', '.join(sorted(known)) or 'none'}."
        )
    return scheme(**options)
