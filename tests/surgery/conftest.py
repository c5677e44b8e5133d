"""One thread; models as tests/observe and tests/tower make them, tokenizers as tests/sources does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for room in ("observe", "sources", "tower"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
