"""Forward passes made of random writes, fed to reducers as a recorder would."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from mainstem.measure import Batch, BlockEvent, Reducer, SublayerEvent, Write


@dataclasses.dataclass
class Pass:
    """States 0..L and writes of one pass; ``rows[i]`` are the columns of sequence i's real tokens."""

    batch: Batch
    states: list[Tensor]
    mids: list[Tensor]
    attn: list[Tensor]
    mlp: list[Tensor]

    def events(self) -> Iterable[BlockEvent]:
        for block in range(len(self.attn)):
            h, mid, after = self.states[block], self.mids[block], self.states[block + 1]
            sublayers = (
                SublayerEvent(2 * block, h, (Write("attn", self.attn[block]),), mid),
                SublayerEvent(2 * block + 1, mid, (Write("mlp", self.mlp[block]),), after),
            )
            yield BlockEvent(block, len(self.attn), h, sublayers, after, self.batch)

    def feed(self, *reducers: Reducer) -> None:
        for event in self.events():
            for reducer in reducers:
                reducer.update(event)
        for reducer in reducers:
            reducer.end_pass(self.batch)

    def real(self, x: Tensor, which: str = "all") -> np.ndarray:
        """Rows ``[tokens, n * width]`` of some real tokens in fp64, found by a plain loop over the mask."""
        rows = []
        for sequence, mask in zip(x, self.batch.mask, strict=True):
            columns = [i for i, real in enumerate(mask.tolist()) if real]
            chosen = {"all": columns, "first": columns[:1], "rest": columns[1:], "last": columns[-1:]}[which]
            rows += [sequence[i].double().numpy().reshape(-1) for i in chosen]
        return np.array(rows).reshape(len(rows), -1)


def make_pass(
    lengths: Sequence[int] = (9, 6, 12),
    *,
    width: int = 16,
    blocks: int = 3,
    streams: int | None = None,
    pad: str = "right",
    extra: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Pass:
    """Random passes whose real content depends on the seed alone, whatever the padding, which is full of nan.

    The first token of every sequence carries a spike of 3,000 in channel 5 from state 1 on.
    """
    generator = np.random.default_rng(seed)
    inner = (width,) if streams is None else (streams, width)
    pos = max(lengths) + (0 if pad == "none" else extra)
    mask = torch.zeros(len(lengths), pos, dtype=torch.bool)
    ids = torch.full((len(lengths), pos), -7)
    parts = [torch.full((len(lengths), pos, *inner), torch.nan, dtype=dtype) for _ in range(1 + 2 * blocks)]
    for row, length in enumerate(lengths):
        place = slice(pos - length, pos) if pad == "left" else slice(0, length)
        mask[row, place] = True
        ids[row, place] = torch.from_numpy(generator.integers(0, 100, length))
        for i, part in enumerate(parts):
            values = generator.normal(size=(length, *inner)) * (
                3.0 if i == 0 else generator.uniform(0.2, 2.0)
            )
            if i == 1:
                values[0, ..., 5] += 3000.0
            part[row, place] = torch.from_numpy(values).to(dtype)
    states, mids = [parts[0]], []
    for block in range(blocks):
        mids.append(states[-1] + parts[1 + 2 * block])
        states.append(mids[-1] + parts[2 + 2 * block])
    return Pass(Batch(mask, ids, 100 * seed), states, mids, parts[1::2], parts[2::2])


def means(values: dict[str, np.ndarray]) -> tuple[float, float, float]:
    """Rest, first and all, as a `Split` gives them."""
    both = np.concatenate([values["rest"], values["first"]])
    return values["rest"].mean(), values["first"].mean(), both.mean()
