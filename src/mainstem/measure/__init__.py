"""Numbers from the residual stream: pure functions and mergeable, streaming reducers. Needs torch only.

Conventions, in every figure: state ``l`` is the stream before block ``l`` and the last one is after the last
block, before any final norm; padding is left out by mask; the first token of each sequence is kept apart from
the rest; several streams are measured as one vector per token; inner products in fp32 (fp64 for fp64), sums
over tokens in fp64.
"""

from mainstem.measure._results import Result, Split
from mainstem.measure._state import from_bytes as state_from_bytes
from mainstem.measure._state import to_bytes as state_to_bytes
from mainstem.measure.defaults import default_reducers
from mainstem.measure.depth import Crossing, EffectiveDepth, effective_depth, random_walk_angle
from mainstem.measure.events import Batch, BlockEvent, HostBatch, Reducer, SublayerEvent, Write
from mainstem.measure.extremes import (
    Activation,
    ExtremesResult,
    FirstNonFinite,
    LargestActivations,
    NonFiniteResult,
    NonFiniteSite,
    StateExtremes,
    headroom_bits,
)
from mainstem.measure.geometry import BlockGeometry, WriteGeometry, token_dot, token_largest, token_norm
from mainstem.measure.gradients import GradientResult, StateGradient, StreamGradients
from mainstem.measure.identity import IdentityResult, NearestEmbedding, StateIdentity, nearest_embedding
from mainstem.measure.lens import Divergence, LensResult, LogitLens, StateLens, lens_divergence
from mainstem.measure.loss import LossSums, loss_sums, next_token_loss, token_nll
from mainstem.measure.norms import NamedNorm, StateNorm, StreamNormResult, StreamNorms
from mainstem.measure.probe import LinearProbe, ProbeBaseline, ProbeFigures, ProbeResult
from mainstem.measure.rounding import (
    Absorption,
    AbsorptionFigures,
    AbsorptionResult,
    RoundingAbsorption,
    WriteAbsorption,
    absorption,
)
from mainstem.measure.similarity import (
    AngularDistanceResult,
    AngularDistances,
    BlockInfluence,
    BlockInfluenceFigures,
    BlockInfluenceResult,
    angular_distance,
    block_influence,
)
from mainstem.measure.sketch import QuantileSketch
from mainstem.measure.spectra import SpectraResult, Spectrum, StateSpectra, StreamSpectra
from mainstem.measure.streams import (
    BlockStreams,
    Joined,
    StreamFigures,
    StreamRead,
    StreamsEvent,
    StreamsResult,
    StreamsState,
    StreamWrite,
)
from mainstem.measure.writes import (
    BlockWrites,
    WriteFigures,
    WriteSizeResult,
    WriteSizes,
    growth_per_block,
    write_cosine,
    write_ratio,
)

__all__ = [
    "Absorption",
    "AbsorptionFigures",
    "AbsorptionResult",
    "Activation",
    "AngularDistanceResult",
    "AngularDistances",
    "Batch",
    "BlockEvent",
    "BlockGeometry",
    "BlockInfluence",
    "BlockInfluenceFigures",
    "BlockInfluenceResult",
    "BlockStreams",
    "BlockWrites",
    "Crossing",
    "Divergence",
    "EffectiveDepth",
    "ExtremesResult",
    "FirstNonFinite",
    "GradientResult",
    "HostBatch",
    "IdentityResult",
    "Joined",
    "LargestActivations",
    "LensResult",
    "LinearProbe",
    "LogitLens",
    "LossSums",
    "NamedNorm",
    "NearestEmbedding",
    "NonFiniteResult",
    "NonFiniteSite",
    "ProbeBaseline",
    "ProbeFigures",
    "ProbeResult",
    "QuantileSketch",
    "Reducer",
    "Result",
    "RoundingAbsorption",
    "SpectraResult",
    "Spectrum",
    "Split",
    "StateExtremes",
    "StateGradient",
    "StateIdentity",
    "StateLens",
    "StateNorm",
    "StateSpectra",
    "StreamFigures",
    "StreamGradients",
    "StreamNormResult",
    "StreamNorms",
    "StreamRead",
    "StreamSpectra",
    "StreamWrite",
    "StreamsEvent",
    "StreamsResult",
    "StreamsState",
    "SublayerEvent",
    "Write",
    "WriteAbsorption",
    "WriteFigures",
    "WriteGeometry",
    "WriteSizeResult",
    "WriteSizes",
    "absorption",
    "angular_distance",
    "block_influence",
    "default_reducers",
    "effective_depth",
    "growth_per_block",
    "headroom_bits",
    "lens_divergence",
    "loss_sums",
    "nearest_embedding",
    "next_token_loss",
    "random_walk_angle",
    "state_from_bytes",
    "state_to_bytes",
    "token_dot",
    "token_largest",
    "token_nll",
    "token_norm",
    "write_cosine",
    "write_ratio",
]
