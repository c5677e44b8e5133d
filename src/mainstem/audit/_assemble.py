"""From reducers' results to an `AuditResult`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mainstem.audit.findings import make_findings
from mainstem.audit.result import AngularDistance, AuditResult, BlockFigures, BooksSummary, Loss, Outlier
from mainstem.measure import (
    AbsorptionResult,
    AngularDistanceResult,
    BlockInfluenceResult,
    BlockWrites,
    ExtremesResult,
    LensResult,
    LossSums,
    NonFiniteResult,
    Split,
    StreamNormResult,
    WriteSizeResult,
)
from mainstem.observe import Books, StreamMap


class _Results:
    """The default reducers' results by name, each with its type."""

    def __init__(self, results: Mapping[str, Any], lens: LensResult | None):
        self.norms: StreamNormResult = results["stream_norms"]
        self.writes: WriteSizeResult = results["write_sizes"]
        self.influence: BlockInfluenceResult = results["block_influence"]
        self.angles: AngularDistanceResult = results["angular_distances"]
        self.extremes: ExtremesResult = results["largest_activations"]
        self.absorbed: AbsorptionResult = results["rounding_absorption"]
        self.nonfinite: NonFiniteResult = results["first_nonfinite"]
        self.lens = lens


def assemble(
    *,
    provenance: dict[str, Any],
    stream_map: StreamMap,
    reducers: Mapping[str, Any],
    lens: LensResult | None,
    loss: LossSums | None,
    books: Books,
    tolerance: float,
    decode: Callable[[int], str],
) -> AuditResult:
    """Put the parts of an audit together."""
    found = _Results(reducers, lens)
    provenance["sampling"] = {
        "angular_distance": f"the last token of each of {found.angles.num_tokens} windows",
        "absorbed": f"every {found.absorbed.every}. position, {found.absorbed.num_tokens} tokens",
    }
    blocks = tuple(_block(i, stream_map, found) for i in range(len(stream_map.blocks)))
    outliers = tuple(o for i in range(len(blocks)) if (o := _outlier(i, found, decode)) is not None)
    distances = found.angles.distances
    best = [
        {"blocks": n, "start": start, "distance": distances[n - 1][start]}
        for n in range(1, len(distances) + 1)
        for start in [found.angles.best_start(n)]
    ]
    first = found.nonfinite.first
    result = AuditResult(
        provenance=provenance,
        loss=None
        if loss is None
        else Loss(nll=loss.nll, perplexity=loss.perplexity, accuracy=loss.accuracy, tokens=loss.num_tokens),
        books=BooksSummary(
            additivity=books.additivity,
            continuity=books.continuity,
            tolerance=tolerance,
            sublayers=len(stream_map.sites),
            passes=books.passes,
        ),
        outliers=outliers,
        blocks=blocks,
        angular_distance=AngularDistance(distances=distances, best=best),
        first_nonfinite=None if first is None else first.to_dict(),
        findings=(),
    )
    return make_findings(result)


def _block(index: int, stream_map: StreamMap, found: _Results) -> BlockFigures:
    writes = found.writes.blocks[index]
    influence = found.influence.blocks[index]
    norm = found.norms.states[index + 1]
    extremes = found.extremes.states[index + 1]
    lens = found.lens.states[index + 1] if found.lens is not None else None
    carried = stream_map.sites[stream_map.blocks[index].first_site].carry != "none"
    return BlockFigures(
        block=index,
        module=stream_map.blocks[index].module,
        block_influence=influence.influence.rest,
        angular_distance_next=found.angles.distances[0][index],
        attn_write_ratio=_ratio(writes, "attn"),
        mlp_write_ratio=_ratio(writes, "mlp"),
        cross_attn_write_ratio=_ratio(writes, "cross_attn"),
        mixer_write_ratio=_ratio(writes, "mixer"),
        write_ratio=writes.total_ratio.rest if carried else None,
        write_cosine=writes.total_cosine.rest if carried else None,
        resid_norm_mean=norm.mean.rest,
        resid_norm_median=norm.median,
        resid_norm_p5=norm.p5,
        resid_norm_p95=norm.p95,
        resid_norm_first=norm.mean.first,
        resid_outlier_tokens=norm.num_outliers,
        max_abs=abs(extremes.largest.value) if extremes.largest is not None else float("nan"),
        headroom_bits=extremes.headroom_bits,
        absorbed_bfloat16=_absorbed(index, "bfloat16", found),
        absorbed_float16=_absorbed(index, "float16", found),
        lens_kl=lens.kl.all if lens is not None else None,
        lens_reverse_kl=lens.reverse_kl.all if lens is not None else None,
        lens_top1=lens.top1.all if lens is not None else None,
        first={
            "block_influence": influence.influence.first,
            "attn_write_ratio": _ratio(writes, "attn", "first"),
            "mlp_write_ratio": _ratio(writes, "mlp", "first"),
            "cross_attn_write_ratio": _ratio(writes, "cross_attn", "first"),
            "mixer_write_ratio": _ratio(writes, "mixer", "first"),
            "write_ratio": writes.total_ratio.first if carried else None,
            "write_cosine": writes.total_cosine.first if carried else None,
            "lens_kl": lens.kl.first if lens is not None else None,
            "lens_top1": lens.top1.first if lens is not None else None,
        },
    )


def _ratio(writes: BlockWrites, kind: str, tokens: str = "rest") -> float | None:
    figures = writes.of_kind(kind)
    return None if figures is None else getattr(figures.ratio, tokens)


def _absorbed(index: int, dtype: str, found: _Results) -> dict[str, dict[str, float]]:
    shares: dict[str, dict[str, float]] = {}
    for write in found.absorbed.writes:
        if write.block == index:
            split: Split = next(f.absorbed for f in write.figures if f.dtype == dtype)
            shares[write.kind] = {"rest": split.rest, "first": split.first}
    return shares


def _outlier(index: int, found: _Results, decode: Callable[[int], str]) -> Outlier | None:
    state = found.extremes.states[index + 1]
    largest = state.largest
    if largest is None:
        return None
    return Outlier(
        block=index,
        position=largest.position,
        channel=largest.channel,
        stream=largest.stream,
        value=largest.value,
        sequence=largest.sequence,
        token_id=largest.token_id,
        token=None if largest.token_id is None else decode(largest.token_id),
        median_ratio=state.median_ratio,
        massive=state.massive,
    )
