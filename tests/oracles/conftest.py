"""Where the oracles find what other tests know, and how they report what they measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

# The same architectures that tests/observe holds against the models' sources, the reference stack of
# tests/connections, and the models of tests/tower.
for room in ("observe", "connections", "tower"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))

from agreement import Row, Run, measure  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def agree(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """``agree(row, ours, theirs)`` holds ours to theirs and reports the errors, for docs/oracles.md.

    Reported through ``record_property``, so that ``pytest --junitxml`` writes it down.
    """

    def hold(row: Row, ours: Run, theirs: Run) -> None:
        errors = measure(ours, theirs)
        record_property("oracle", json.dumps({**row._asdict(), "version": version(row.package)} | errors))

    return hold
