"""Skip, scale, break and patch a model's stream, and sweep over all its blocks."""

from mainstem.intervene._damage import FloorDamage, StateDamage
from mainstem.intervene._tower import left_out
from mainstem.intervene.context import intervening
from mainstem.intervene.kinds import Intervention, Mean, Noise, Place, Replace, Resample, Scale, Skip, Zero
from mainstem.intervene.means import WriteMeans
from mainstem.intervene.removal import Removal, removal_loss
from mainstem.intervene.sweep import SweepConfig, SweepPlan, SweepResult, plan_sweep, sweep

__all__ = [
    "FloorDamage",
    "Intervention",
    "Mean",
    "Noise",
    "Place",
    "Removal",
    "Replace",
    "Resample",
    "Scale",
    "Skip",
    "StateDamage",
    "SweepConfig",
    "SweepPlan",
    "SweepResult",
    "WriteMeans",
    "Zero",
    "intervening",
    "left_out",
    "plan_sweep",
    "removal_loss",
    "sweep",
]
