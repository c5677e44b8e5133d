"""Processes that share one audit, its text or its weights; all end with the same figures."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Generator

import torch
from torch import distributed

from mainstem.errors import MainstemError
from mainstem.tower import process_group_left

_PATIENCE = datetime.timedelta(days=30)
"""How long a process waits for the others: a launcher ends it sooner where one of them has failed."""


@dataclasses.dataclass(frozen=True)
class Ranks:
    """One process of several, as ``torchrun`` has started them; alone without it.

    Attributes:
        rank: number of this process, 0-based; ``size``: how many there are.
        weights: whether they share the weights of one model, and so see the same text, rather than the text.
    """

    rank: int = 0
    size: int = 1
    weights: bool = False

    def takes(self, batch: int) -> bool:
        """Say whether a batch of the text is this process's: they are dealt out in turn."""
        return self.weights or batch % self.size == self.rank

    def device(self, device: str | None) -> str | None:
        """Return where this process's copy of the model goes: of several accelerators one each.

        Raises:
            MainstemError: every process would spread its copy over the same devices.
        """
        if self.size > 1 and device == "auto":
            raise MainstemError(
                f"--device auto spreads a model over all devices, but {self.size} processes have one each. "
                "Use one process, or leave it out."
            )
        if self.size == 1 or device != "cuda":
            return device
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % max(1, torch.cuda.device_count())}"

    def gather(self, data: bytes) -> list[bytes]:
        """Return what every process gives, by rank, on all of them; of a shared model, what one gives.

        Raises:
            MainstemError: another process has ended.
        """
        if self.size == 1 or self.weights:
            return [data]
        try:
            mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            distributed.all_gather(sizes, torch.tensor([len(mine)]))
            longest = max(int(size) for size in sizes)
            padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
            found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
            distributed.all_gather(found, padded)
        except RuntimeError as error:
            raise MainstemError(
                f"Process {self.rank} of {self.size} waited for the figures of the others and one of them "
                "has ended; its own message says why."
            ) from error
        return [bytes(t[: int(n)].numpy()) for t, n in zip(found, sizes, strict=True)]


@contextlib.contextmanager
def joined(device: str | None = None) -> Generator[Ranks]:
    """Join the processes that ``torchrun`` has started, and leave them at the end of the block.

    A block within another one changes nothing.

    Args:
        device: of the audit; ``"tp"`` has the processes share the weights of one model.

    Raises:
        MainstemError: a mistake of this process, with its number; the launcher ends the others.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    ranks = Ranks(int(os.environ["RANK"]), size, weights=device == "tp")
    if distributed.is_initialized():
        yield ranks
        return
    with process_group_left():
        # Sums travel on the host; shared weights where the model is.
        backend = "cpu:gloo,cuda:nccl" if ranks.weights and torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, timeout=_PATIENCE)
        try:
            yield ranks
        except MainstemError as error:
            raise MainstemError(f"process {ranks.rank} of {ranks.size}: {error}") from error
