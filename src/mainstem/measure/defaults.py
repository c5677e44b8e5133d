"""The reducers an audit runs with."""

from __future__ import annotations

from mainstem.measure.events import Reducer
from mainstem.measure.extremes import FirstNonFinite, LargestActivations
from mainstem.measure.norms import StreamNorms
from mainstem.measure.rounding import RoundingAbsorption
from mainstem.measure.similarity import AngularDistances, BlockInfluence
from mainstem.measure.writes import WriteSizes


def default_reducers(*, rounding_every: int = 32, median_samples: int | None = 4096) -> list[Reducer]:
    """Return fresh reducers of every kind but the lens, which needs a model's tail. Each goes by its
    ``name``.

    Args:
        rounding_every: see `RoundingAbsorption`.
        median_samples: see `LargestActivations`.
    """
    return [
        StreamNorms(),
        WriteSizes(),
        BlockInfluence(),
        AngularDistances("last"),
        LargestActivations(median_samples),
        RoundingAbsorption(rounding_every),
        FirstNonFinite(),
    ]
