"""Schemes by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from mainstem.connections._base import Scheme
from mainstem.connections.admin import Admin
from mainstem.connections.attention_residuals import AttentionResiduals
from mainstem.connections.b2t import B2T
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
from mainstem.connections.no_residual import NoResidual
from mainstem.connections.post_norm import PostNorm
from mainstem.connections.pre_norm import PreNorm
from mainstem.connections.reordered_norm import ReorderedNorm
from mainstem.connections.resi_dual import ResiDual
from mainstem.connections.rezero import ReZero
from mainstem.connections.sandwich_norm import SandwichNorm
from mainstem.connections.siamese_norm import SiameseNorm
from mainstem.connections.stochastic_depth import StochasticDepth
from mainstem.connections.sub_norm import SubNorm
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
        X0Reinjection,
        HyperConnections,
        IdentityHC,
        IndependentHC,
        Mhc,
        Laurel,
        Highway,
        GRUGate,
        LayerScale,
        ReZero,
        LayerNormScaling,
        DepthScaled,
        StochasticDepth,
        MVSplit,
        FracConnections,
        GatedStreams,
        MixNorm,
        ResiDual,
        B2T,
        SubNorm,
        Admin,
        Keel,
        SiameseNorm,
        DenseFormer,
        MUDD,
        AttentionResiduals,
        DeltaAttentionResiduals,
    )
}


def scheme_names() -> list[str]:
    """Return the names that :func:`make_scheme` takes."""
    return sorted(SCHEMES)


def make_scheme(name: str, **options: Any) -> Scheme:
    """Return the scheme called ``name`` with the given options.

    Raises:
        ConfigError: no scheme has that name, or it has no such option.
    """
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
