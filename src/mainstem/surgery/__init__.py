"""Models changed on evidence: what is kept is measured before anything is saved."""

from mainstem.surgery.convert import Conversion, ConvertConfig, convert, convert_tower, save_conversion
from mainstem.surgery.convert_proof import Distance, measure_distance

__all__ = [
    "Conversion",
    "ConvertConfig",
    "Distance",
    "convert",
    "convert_tower",
    "measure_distance",
    "save_conversion",
]
