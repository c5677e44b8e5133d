"""From reducers' results to an `AuditResult`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mainstem.audit._attribution import Attributed
from mainstem.audit._probes import Probed
from mainstem.audit._sweep import Swept
from mainstem.audit.config import QUESTIONS
from mainstem.audit.findings import make_findings
from mainstem.audit.result import (
    AngularDistance,
    AttributedPart,
    Attribution,
    AuditResult,
    BlockFigures,
    BooksSummary,
    Gradient,
    Identity,
    Loss,
    Outlier,
)
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
    effective_depth,
    random_walk_angle,
)
from mainstem.measure.probe import MAX_HELD_OUT, TEXT_EVERY, TYPES_EVERY
from mainstem.measure.spectra import CKA_TOKENS
from mainstem.observe import Books, StreamMap


class _Results:
    """The default reducers' results by name, each with its type."""

    def __init__(self, results: Mapping[str, Any], lens: LensResult | None, probed: Probed):
        self.norms: StreamNormResult = results["stream_norms"]
        self.writes: WriteSizeResult = results["write_sizes"]
        self.influence: BlockInfluenceResult = results["block_influence"]
        self.angles: AngularDistanceResult = results["angular_distances"]
        self.extremes: ExtremesResult = results["largest_activations"]
        self.absorbed: AbsorptionResult = results["rounding_absorption"]
        self.nonfinite: NonFiniteResult = results["first_nonfinite"]
        self.lens = lens
        self.identity, self.gradients = probed.identity, probed.gradients
        self.carried_share, self.final_share = probed.carried_share, probed.final_share


def assemble(
    *,
    provenance: dict[str, Any],
    stream_map: StreamMap,
    reducers: Mapping[str, Any],
    lens: LensResult | None,
    loss: LossSums | None,
    probed: Probed,
    swept: Swept,
    books: Books,
    tolerance: float,
    decode: Callable[[int], str],
) -> AuditResult:
    """Put the parts of an audit together."""
    found = _Results(reducers, lens, probed)
    provenance["sampling"] = _sampling(found, probed, swept)
    provenance["notes"].extend([*probed.notes, *swept.notes])
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
        identity=_identity(found),
        gradient=_gradient(found),
        effective_depth=None if lens is None else effective_depth([s.kl.all for s in lens.states[1:]]),
        first_nonfinite=None if first is None else first.to_dict(),
        findings=(),
        damage=swept.damage,
        spectra=None if probed.spectra is None else probed.spectra.states,
        probe=probed.probe,
        attribution=None if probed.attributed is None else _attribution(probed.attributed, decode),
        streams=probed.streams,
    )
    asked = {QUESTIONS[name] for name in provenance["options"]["only"] or QUESTIONS}
    return make_findings(result, asked)


def _sampling(found: _Results, probed: Probed, swept: Swept) -> dict[str, str]:
    """Say which figures come from a part of the tokens."""
    sampling = {
        "angular_distance": f"the last token of each of {found.angles.num_tokens} windows",
    }
    if found.absorbed.num_tokens:
        sampling["absorbed"] = f"every {found.absorbed.every}. position, {found.absorbed.num_tokens} tokens"
    if found.identity is not None:
        sampling["nearest_embedding"] = (
            f"every {found.identity.every}. position, {found.identity.num_tokens} tokens"
        )
        sampling["carried_share, final_share"] = "the first window"
    if probed.spectra is not None:
        looked_at = ", ".join(str(s.state) for s in probed.spectra.states)
        sampling["spectra"] = (
            f"states {looked_at}, all tokens but the windows' first; for CKA at most {CKA_TOKENS} a window"
        )
    if probed.probe is not None:
        sampling["probe"] = (
            f"{probed.probe.num_train} tokens trained on; every {TEXT_EVERY}. window and one token type in "
            f"{TYPES_EVERY} held out, and of the held-out tokens at most {MAX_HELD_OUT} judged"
        )
    if found.gradients is not None:
        sampling["gradient_norm"] = f"the first window, {found.gradients.num_tokens} tokens"
    if probed.streams is not None:
        sampling["streams"] = f"the first window, {probed.streams.tokens} tokens"
    if swept.damage is not None:
        sampling["damage"] = f"the first {swept.damage.windows} windows, {swept.damage.tokens} tokens"
    return sampling


def _identity(found: _Results) -> Identity | None:
    if found.identity is None:
        return None
    carried, final = found.carried_share, found.final_share
    return Identity(
        nearest_before=found.identity.states[0].nearest.rest,
        majority=found.identity.majority.rest,
        carried_share=None if carried is None else carried.rest,
        carried_share_first=None if carried is None else carried.first,
        final_share=None if final is None else final.rest,
        final_share_first=None if final is None else final.first,
        tokens=found.identity.num_tokens,
    )


def _gradient(found: _Results) -> Gradient | None:
    gradients = found.gradients
    if gradients is None:
        return None
    return Gradient(
        norm_before=gradients.states[0].norm.rest,
        bottom_to_top=gradients.bottom_to_top,
        tokens=gradients.num_tokens,
    )


def _attribution(attributed: Attributed, decode: Callable[[int], str]) -> Attribution:
    found = attributed.found
    token, *others = found.tokens
    signs = torch.tensor([1.0, -1.0][: len(found.tokens)], dtype=torch.float64)
    parts = (found.parts @ signs).tolist()
    return Attribution(
        position=attributed.position,
        token_id=token,
        token=decode(token),
        against_id=others[0] if others else None,
        against=decode(others[0]) if others else None,
        before=float(found.before @ signs),
        after=float(found.after @ signs),
        transforms=found.transforms,
        error=found.error,
        parts=[
            AttributedPart(
                label=label, block=int(label.split("_")[0]) if label[0].isdigit() else None, logit=x
            )
            for label, x in zip(found.labels, parts, strict=True)
        ],
    )


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
        random_walk_angle=random_walk_angle(writes.total_ratio.rest) if carried else None,
        nearest_embedding=found.identity.states[index + 1].nearest.rest if found.identity else None,
        gradient_norm=found.gradients.states[index + 1].norm.rest if found.gradients else None,
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
