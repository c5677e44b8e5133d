"""Skip, scale, break and patch a model's stream, and sweep over all its blocks."""

from mainstem.intervene.context import intervening
from mainstem.intervene.kinds import Intervention, Mean, Noise, Replace, Resample, Scale, Skip, Zero
from mainstem.intervene.means import WriteMeans

__all__ = [
    "Intervention",
    "Mean",
    "Noise",
    "Replace",
    "Resample",
    "Scale",
    "Skip",
    "WriteMeans",
    "Zero",
    "intervening",
]
