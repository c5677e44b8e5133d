"""One thread, and the small models of tests/observe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for _room in ("observe", "sources", "audit"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _room))


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
