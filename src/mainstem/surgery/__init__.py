"""Models changed on evidence: what a change costs or keeps is measured before anything is saved."""

from mainstem.surgery.convert import Conversion, ConvertConfig, convert, convert_tower, save_conversion
from mainstem.surgery.convert_proof import Distance, measure_distance
from mainstem.surgery.cut import Cut, cut
from mainstem.surgery.judge import Cost, Judge
from mainstem.surgery.planners import (
    PLANNERS,
    Angular,
    Beam,
    Greedy,
    Influence,
    Plan,
    Planner,
    Single,
    make_plan,
    planner_named,
)

__all__ = [
    "PLANNERS",
    "Angular",
    "Beam",
    "Conversion",
    "ConvertConfig",
    "Cost",
    "Cut",
    "Distance",
    "Greedy",
    "Influence",
    "Judge",
    "Plan",
    "Planner",
    "Single",
    "convert",
    "convert_tower",
    "cut",
    "make_plan",
    "measure_distance",
    "planner_named",
    "save_conversion",
]
