"""The oracles judge the same architectures that tests/observe holds against the models' sources."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "observe"))
