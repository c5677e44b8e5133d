"""What every test starts from: no network, two threads, fixed seeds, a cache of its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

# Before transformers is imported, for it reads them then.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Processes of a test meet on this machine, whether or not its name can be resolved.
if sys.platform == "linux":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import torch

if "OMP_NUM_THREADS" not in os.environ:  # whoever sets it knows how many cores are free
    torch.set_num_threads(2)

# A shell's background job ignores Ctrl-C and so would all that it starts; some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_cache(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fast tests never touch the user's cache; slow ones share it: converting real weights takes its time."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path_factory.getbasetemp() / "mainstem-cache"))


@pytest.fixture(scope="session")
def gpl_text() -> Path:
    """Path of the text that the reference numbers were measured on."""
    return DATA / "gpl-3.0.txt"
