"""How a write joins the residual stream. One file a family; nothing here knows a transformer.

Needs torch only.
"""

from mainstem.connections._base import (
    AffineStep,
    Connection,
    Context,
    MixingMatrix,
    ParameterGroup,
    Promise,
    Properties,
    Scheme,
    Stream,
    Trunk,
)
from mainstem.connections._norms import NormConfig, UnitOffsetRMSNorm, frozen_norm
from mainstem.connections._parameters import parameter_groups
from mainstem.connections._policy import StreamModule
from mainstem.connections._registry import SCHEMES, make_scheme, register, scheme_names
from mainstem.connections.admin import Admin, AdminConnection
from mainstem.connections.attention_residuals import AttentionResiduals, AttentionResidualsConnection
from mainstem.connections.b2t import B2T, B2TConnection
from mainstem.connections.backout import Backout, BackoutConnection
from mainstem.connections.deep_delta import DeepDelta, DeepDeltaConnection
from mainstem.connections.deep_norm import DeepNorm, DeepNormConnection
from mainstem.connections.delta_attention_residuals import (
    DeltaAttentionResiduals,
    DeltaAttentionResidualsConnection,
)
from mainstem.connections.dense_former import DenseFormer, DenseFormerConnection
from mainstem.connections.depth_scaled import DepthScaled, DepthScaledConnection, TrainingRules
from mainstem.connections.frac_connections import FracConnection, FracConnections
from mainstem.connections.gated_streams import GatedStreams, GatedStreamsConnection
from mainstem.connections.gru_gate import GRUGate, GRUGateConnection
from mainstem.connections.highway import Highway, HighwayConnection
from mainstem.connections.hyper_connections import HyperConnection, HyperConnections
from mainstem.connections.identity_hc import IdentityHC, IdentityHCConnection
from mainstem.connections.independent_hc import IndependentHC, IndependentHCConnection
from mainstem.connections.keel import Keel, KeelConnection
from mainstem.connections.laurel import Laurel, LaurelConnection
from mainstem.connections.layer_norm_scaling import LayerNormScaling, LayerNormScalingConnection
from mainstem.connections.layer_scale import LayerScale, LayerScaleConnection
from mainstem.connections.mhc import Mhc, MhcConnection
from mainstem.connections.mix_norm import MixNorm
from mainstem.connections.mudd import MUDD, MUDDConnection
from mainstem.connections.mv_split import MVSplit, MVSplitConnection
from mainstem.connections.ngpt import NGPT, NGPTConnection, normalize_matrices
from mainstem.connections.no_residual import NoResidual, NoResidualConnection
from mainstem.connections.orthogonal_update import OrthogonalUpdate, OrthogonalUpdateConnection
from mainstem.connections.post_norm import PostNorm, PostNormConnection
from mainstem.connections.pre_norm import PreNorm, PreNormConnection
from mainstem.connections.reordered_norm import ReorderedNorm, ReorderedNormConnection
from mainstem.connections.resi_dual import ResiDual, ResiDualConnection
from mainstem.connections.reversible import Reversible, ReversibleConnection
from mainstem.connections.rezero import ReZero
from mainstem.connections.sandwich_norm import SandwichNorm, SandwichNormConnection
from mainstem.connections.siamese_norm import SiameseNorm, SiameseNormConnection
from mainstem.connections.stochastic_depth import StochasticDepth, StochasticDepthConnection
from mainstem.connections.sub_norm import SubNorm
from mainstem.connections.unet_skips import UNetSkipConnection, UNetSkips
from mainstem.connections.x0_reinjection import X0Reinjection, X0ReinjectionConnection

__all__ = [
    "B2T",
    "MUDD",
    "NGPT",
    "SCHEMES",
    "Admin",
    "AdminConnection",
    "AffineStep",
    "AttentionResiduals",
    "AttentionResidualsConnection",
    "B2TConnection",
    "Backout",
    "BackoutConnection",
    "Connection",
    "Context",
    "DeepDelta",
    "DeepDeltaConnection",
    "DeepNorm",
    "DeepNormConnection",
    "DeltaAttentionResiduals",
    "DeltaAttentionResidualsConnection",
    "DenseFormer",
    "DenseFormerConnection",
    "DepthScaled",
    "DepthScaledConnection",
    "FracConnection",
    "FracConnections",
    "GRUGate",
    "GRUGateConnection",
    "GatedStreams",
    "GatedStreamsConnection",
    "Highway",
    "HighwayConnection",
    "HyperConnection",
    "HyperConnections",
    "IdentityHC",
    "IdentityHCConnection",
    "IndependentHC",
    "IndependentHCConnection",
    "Keel",
    "KeelConnection",
    "Laurel",
    "LaurelConnection",
    "LayerNormScaling",
    "LayerNormScalingConnection",
    "LayerScale",
    "LayerScaleConnection",
    "MUDDConnection",
    "MVSplit",
    "MVSplitConnection",
    "Mhc",
    "MhcConnection",
    "MixNorm",
    "MixingMatrix",
    "NGPTConnection",
    "NoResidual",
    "NoResidualConnection",
    "NormConfig",
    "OrthogonalUpdate",
    "OrthogonalUpdateConnection",
    "ParameterGroup",
    "PostNorm",
    "PostNormConnection",
    "PreNorm",
    "PreNormConnection",
    "Promise",
    "Properties",
    "ReZero",
    "ReorderedNorm",
    "ReorderedNormConnection",
    "ResiDual",
    "ResiDualConnection",
    "Reversible",
    "ReversibleConnection",
    "SandwichNorm",
    "SandwichNormConnection",
    "Scheme",
    "SiameseNorm",
    "SiameseNormConnection",
    "StochasticDepth",
    "StochasticDepthConnection",
    "Stream",
    "StreamModule",
    "SubNorm",
    "TrainingRules",
    "Trunk",
    "UNetSkipConnection",
    "UNetSkips",
    "UnitOffsetRMSNorm",
    "X0Reinjection",
    "X0ReinjectionConnection",
    "frozen_norm",
    "make_scheme",
    "normalize_matrices",
    "parameter_groups",
    "register",
    "scheme_names",
]
