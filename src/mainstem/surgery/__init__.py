"""Models changed on evidence: what a change costs or keeps is measured before anything is saved."""

from mainstem.surgery._folder import check_out, new_folder
from mainstem.surgery.convert import Conversion, ConvertConfig, convert, convert_tower, save_conversion
from mainstem.surgery.convert_layout import LAYOUTS, convert_layout
from mainstem.surgery.convert_proof import Distance, measure_distance
from mainstem.surgery.cut import Cut, cut
from mainstem.surgery.diff import Diff, DiffConfig, diff, diff_models
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
from mainstem.surgery.save import Origin, save_pruned

__all__ = [
    "LAYOUTS",
    "PLANNERS",
    "Angular",
    "Beam",
    "Conversion",
    "ConvertConfig",
    "Cost",
    "Cut",
    "Diff",
    "DiffConfig",
    "Distance",
    "Greedy",
    "Influence",
    "Judge",
    "Origin",
    "Plan",
    "Planner",
    "Single",
    "check_out",
    "convert",
    "convert_layout",
    "convert_tower",
    "cut",
    "diff",
    "diff_models",
    "make_plan",
    "measure_distance",
    "new_folder",
    "planner_named",
    "save_conversion",
    "save_pruned",
]
