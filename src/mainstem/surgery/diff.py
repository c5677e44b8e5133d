"""Two checkpoints side by side: which blocks write otherwise, how the stream parts, what it does to loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.measure import Batch, Result
from mainstem.measure.loss import token_nll
from mainstem.observe import KeepStream, StreamMap, batch_of, recorded, stream_of, tower_in, tower_map
from mainstem.sources import LoadedModel, WindowBatch, load_model, load_text, make_windows, versions
from mainstem.surgery.convert_proof import kl_sum
from mainstem.surgery.diff_blocks import match_blocks, prune_record
from mainstem.surgery.diff_weights import WeightChange, Weights, compare_weights, relative

SCHEMA = "mainstem.diff/1"
"""Of ``diff.json``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffConfig:
    """What to compare, and on which text.

    Attributes:
        a, b: models, as `mainstem.sources.load_model` takes them; two checkpoints of one training too.
        text: as `mainstem.sources.load_text` takes it.
        tokens, window, batch_size, first_token: as `mainstem.sources.make_windows` takes them.
        dtype: of the weights.
        revision_a, revision_b: of hub models.
        trust_remote_code: of either.
    """

    a: str
    b: str
    text: str
    tokens: int | None = 2048
    window: int = 256
    batch_size: int = 1
    first_token: str = "none"
    dtype: str = "float32"
    revision_a: str | None = None
    revision_b: str | None = None
    trust_remote_code: bool = False


@dataclasses.dataclass(frozen=True)
class Change(Result):
    """The same vectors in two models, over all real tokens but the first of each window.

    The first token of a window often carries a hundred times the rest and would drown it.

    Attributes:
        change: ``|b - a| / |a|``, each the Frobenius norm over tokens and channels; inf where A is 0.
        cosine: ``<a, b> / (|a| |b|)`` over the same; nan where one is 0.
        size: ``|b| / |a|``.
    """

    change: float
    cosine: float
    size: float


@dataclasses.dataclass(frozen=True)
class BlockDiff(Result):
    """A block of A and its partner in B.

    Attributes:
        a, b: their numbers.
        writes: by kind (``"attn"``, ``"mlp"``, ...): what both write; a kind that only one has is not here.
        stream: the state after the block.
        weights: their parameters; None where the names of the two cannot be matched.
    """

    a: int
    b: int
    writes: dict[str, Change]
    stream: Change
    weights: WeightChange | None


@dataclasses.dataclass(frozen=True)
class LossDiff(Result):
    """Next-token loss of both on the same tokens, nats.

    Attributes:
        a, b: means over tokens.
        difference: ``b - a``.
        standard_error: of the difference over windows, weighed by their tokens; nan for one window.
        num_windows, num_tokens: windows and tokens scored.
        mean_kl: ``KL(A || B)``, mean over tokens, in fp64.
        max_logit_difference: over all logits.
    """

    a: float
    b: float
    difference: float
    standard_error: float
    num_windows: int
    num_tokens: int
    mean_kl: float
    max_logit_difference: float


@dataclasses.dataclass(frozen=True)
class Diff(Result):
    """Two models on one text.

    Attributes:
        schema: ``"mainstem.diff/1"``.
        matched: how blocks were paired.
        only_a, only_b: blocks without a partner.
        entry: the state before the lowest block of each.
        blocks: the pairs, in A's order.
        outside: parameters of no block; None where the names cannot be matched.
        loss: what it does to loss.
        models: provenance of both.
        text: provenance of the text.
        versions: of the packages.
    """

    schema: str
    matched: str
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    entry: Change
    blocks: tuple[BlockDiff, ...]
    outside: WeightChange | None
    loss: LossDiff
    models: dict[str, Any]
    text: dict[str, Any]
    versions: dict[str, Any]


class _Sums:
    """``|a|^2``, ``|b|^2``, ``|b - a|^2`` and ``<a, b>``, in fp64."""

    def __init__(self) -> None:
        self.values = torch.zeros(4, dtype=torch.float64)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Take the chosen tokens' vectors, ``[tokens, width]``."""
        first, second = a.double(), b.double()
        apart = second - first  # not from the other sums, which would cancel
        sums = [
            x.mul(y).sum() for x, y in ((first, first), (second, second), (apart, apart), (first, second))
        ]
        self.values += torch.stack(sums).cpu()

    def result(self) -> Change:
        """Return the figures so far."""
        a, b, apart, both = self.values.tolist()
        cosine = both / math.sqrt(a * b) if a > 0 and b > 0 else math.nan
        # A sum of products rounds past 1 where both are the same.
        cosine = max(-1.0, min(1.0, cosine)) if not math.isnan(cosine) else cosine
        return Change(
            change=relative(math.sqrt(apart), math.sqrt(a)),
            cosine=cosine,
            size=relative(math.sqrt(b), math.sqrt(a)) if a or b else 1.0,
        )


class _Losses:
    """Losses of both by window, and the distance of what they predict."""

    def __init__(self) -> None:
        self.windows: list[tuple[float, float, int]] = []
        self.kl, self.num_tokens = 0.0, 0
        self.largest = torch.zeros((), dtype=torch.float64)

    def add(self, window: WindowBatch, a: Tensor, b: Tensor) -> None:
        """Take the logits of one batch, ``[batch, pos, vocab]``."""
        real = window.attention_mask.bool()
        for row in range(len(real)):
            scored = real[row, :-1] & real[row, 1:]
            targets = window.input_ids[row, 1:][scored]
            losses = [float(token_nll(x[row, :-1][scored], targets)[0].double().sum()) for x in (a, b)]
            if len(targets):
                self.windows.append((losses[0], losses[1], len(targets)))
        for first, second in zip(a[real].split(256), b[real].split(256), strict=True):
            self.largest = torch.maximum(self.largest, (first.double() - second.double()).abs().max().cpu())
            self.kl += kl_sum(first, second)
        self.num_tokens += int(real.sum())

    def result(self) -> LossDiff:
        """Return the figures so far."""
        total = sum(count for *_, count in self.windows)
        a, b = (sum(entry[i] for entry in self.windows) / total for i in (0, 1))
        n = len(self.windows)
        # Of a ratio of sums over windows (Cochran 1977, eq. 2.45); equal windows give std / sqrt(n).
        spread = sum((second - first - count * (b - a)) ** 2 for first, second, count in self.windows)
        error = math.sqrt(spread * n / (n - 1)) / total if n > 1 else math.nan
        return LossDiff(a, b, b - a, error, n, total, self.kl / self.num_tokens, float(self.largest))


def diff(config: DiffConfig) -> Diff:
    """Load two models, run both on a text, and compare.

    Raises:
        ConfigError: their tokens or their widths differ, so nothing can be laid side by side.
        SourceError: a model or the text cannot be had.
        StreamNotFoundError: a model has no residual stream.
    """
    loaded = [
        load_model(name, dtype=config.dtype, revision=revision, trust_remote_code=config.trust_remote_code)
        for name, revision in ((config.a, config.revision_a), (config.b, config.revision_b))
    ]
    text = load_text(config.text)
    both = [
        make_windows(
            one.tokenizer,
            text,
            num_tokens=config.tokens,
            window=config.window,
            batch_size=config.batch_size,
            first_token=config.first_token,
        )
        for one in loaded
    ]
    if not torch.equal(both[0].token_ids, both[1].token_ids):
        raise ConfigError(
            f"{config.a} and {config.b} cut the text into other tokens, so nothing can be laid side by side; "
            "give two models with one tokenizer."
        )
    records = (prune_record(config.a), prune_record(config.b))
    return diff_models((loaded[0], loaded[1]), list(both[0]), both[0].provenance, records)


@torch.no_grad()
def diff_models(
    models: tuple[LoadedModel, LoadedModel],
    windows: Sequence[WindowBatch],
    text: dict[str, Any],
    records: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None),
) -> Diff:
    """Compare two loaded models on the same windows.

    Args:
        models: A and B, in eval mode.
        windows: of a text.
        text: its provenance.
        records: ``prune.json`` of each, where there is one.
    """
    maps = _maps(models[0].model, models[1].model, windows[0])
    pairs, matched = match_blocks(len(maps[0].blocks), len(maps[1].blocks), *records)
    sums: dict[tuple[int, str], _Sums] = {}
    losses = _Losses()
    for window in windows:
        kept, logits = _passes(models, maps, window)
        batch = batch_of(window.inputs_for(models[0].model))
        for key, first, second in _points(kept, pairs):
            sums.setdefault(key, _Sums()).add(_rest(first, batch), _rest(second, batch))
        losses.add(window, *logits)
    weights = _weights(models[0].model, models[1].model, maps)
    return Diff(
        schema=SCHEMA,
        matched=matched,
        only_a=_alone(len(maps[0].blocks), [a for a, _ in pairs]),
        only_b=_alone(len(maps[1].blocks), [b for _, b in pairs]),
        entry=sums[-1, "stream"].result(),
        blocks=tuple(_block(number, pair, sums, weights) for number, pair in enumerate(pairs)),
        outside=None if weights is None else compare_weights(weights[0].outside(), weights[1].outside()),
        loss=losses.result(),
        models={"a": models[0].provenance, "b": models[1].provenance},
        text=text,
        versions=dict(versions("mainstem", "torch", "transformers")),
    )


def _maps(a: Any, b: Any, window: WindowBatch) -> tuple[StreamMap, StreamMap]:
    maps = [stream_of(model, window.inputs_for(model)) for model in (a, b)]
    if maps[0].num_streams != maps[1].num_streams:
        # A tower of several streams has one state too: what its way out makes of them.
        maps = [
            tower_map(model, window.input_ids) if tower_in(model) is not None else found
            for model, found in zip((a, b), maps, strict=True)
        ]
    if (maps[0].num_streams, maps[0].width) != (maps[1].num_streams, maps[1].width):
        sizes = [f"{found.num_streams} x {found.width}" for found in maps]
        raise ConfigError(
            f"the streams of A ({sizes[0]}) and B ({sizes[1]}) differ in size, so their writes cannot be "
            "laid side by side; compare two versions of one model."
        )
    return maps[0], maps[1]


def _passes(
    models: tuple[LoadedModel, LoadedModel], maps: tuple[StreamMap, StreamMap], window: WindowBatch
) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    kept: list[dict[str, Tensor]] = []
    logits: list[Tensor] = []
    for loaded, found in zip(models, maps, strict=True):
        keep, inputs = KeepStream(lambda name: "resid_mid" not in name), window.inputs_for(loaded.model)
        seen = recorded(loaded.model, inputs, found, [keep], batch=batch_of(inputs))
        kept.append(keep.points)
        logits.append(seen.output.logits)
    return kept, logits


def _points(
    kept: Sequence[dict[str, Tensor]], pairs: Sequence[tuple[int, int]]
) -> list[tuple[tuple[int, str], Tensor, Tensor]]:
    """Return what is compared: ``(number of the pair, what)`` and both tensors; -1 is below all blocks."""
    a, b = kept
    found = [((-1, "stream"), a["blocks.0.hook_resid_pre"], b["blocks.0.hook_resid_pre"])]
    for number, (first, second) in enumerate(pairs):
        prefix, other = f"blocks.{first}.hook_", f"blocks.{second}.hook_"
        for name in (key.removeprefix(prefix) for key in a if key.startswith(prefix)):
            if name == "resid_pre" or other + name not in b:
                continue
            what = "stream" if name == "resid_post" else name.removesuffix("_out")
            found.append(((number, what), a[prefix + name], b[other + name]))
    return found


def _rest(value: Tensor, batch: Batch) -> Tensor:
    """Return the vectors of all real tokens but the first of each window, ``[tokens, width]``."""
    return value.reshape(batch.mask.numel(), -1)[batch.places("rest", value.device)]


def _weights(a: Any, b: Any, maps: tuple[StreamMap, StreamMap]) -> tuple[Weights, Weights] | None:
    towers = [tower_in(model) is not None for model in (a, b)]
    found = [Weights(model, where, as_tower=any(towers)) for model, where in zip((a, b), maps, strict=True)]
    if any(one.is_foreign for one in found) or (type(a) is not type(b) and not any(towers)):
        return None
    return found[0], found[1]


def _block(
    number: int,
    pair: tuple[int, int],
    sums: dict[tuple[int, str], _Sums],
    weights: tuple[Weights, Weights] | None,
) -> BlockDiff:
    mine = {what: found.result() for (place, what), found in sums.items() if place == number}
    stream = mine.pop("stream")
    change = None
    if weights is not None:
        change = compare_weights(weights[0].of_block(pair[0]), weights[1].of_block(pair[1]))
    return BlockDiff(a=pair[0], b=pair[1], writes=mine, stream=stream, weights=change)


def _alone(depth: int, paired: Sequence[int]) -> tuple[int, ...]:
    return tuple(block for block in range(depth) if block not in paired)
