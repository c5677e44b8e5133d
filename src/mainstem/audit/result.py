"""What an audit found, in a versioned schema (``schema.json`` beside this file, docs/audit-schema.md)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mainstem.measure import EffectiveDepth, ProbeResult, StateSpectra, StreamsResult

SCHEMA = "mainstem.audit/1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """Next-token prediction on the text.

    Attributes:
        nll: mean negative log-likelihood, nats a token.
        perplexity: ``exp(nll)``.
        accuracy: share of tokens that had the largest logit.
        tokens: tokens scored: all real ones but the first of each window.
    """

    nll: float
    perplexity: float
    accuracy: float
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BooksSummary:
    """Whether the books balance.

    Attributes:
        additivity: largest ``|after - (carried + writes)| / |after|`` over all sublayers and tokens.
        continuity: largest ``|taken - left| / |left|`` between what a sublayer carries and what the one
            before left.
        tolerance: what was allowed for this dtype; an audit beyond it is refused.
        sublayers: sublayers checked in each pass; ``passes``: forward passes checked.
    """

    additivity: float
    continuity: float
    tolerance: float
    sublayers: int
    passes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlier:
    """The largest activation of the stream after one block.

    Attributes:
        block: the block.
        position: place of the token in its window, 0-based, padding not counted.
        channel: entry of the width; ``stream``: which of several streams.
        value: signed.
        sequence: number of the window; ``token_id`` and ``token``: which token.
        median_ratio: ``|value|`` over the median of ``|h|`` after this block.
        massive: ``|value| > 100`` and ``>= 1000`` medians (Sun et al., arXiv 2402.17762).
    """

    block: int
    position: int
    channel: int
    stream: int
    value: float
    sequence: int
    token_id: int | None
    token: str | None
    median_ratio: float
    massive: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFigures:
    """One block. Means over all tokens but padding and the first of each window, unless said otherwise.

    Attributes:
        block: 0-based number; ``module``: its path in the model.
        block_influence: mean of ``1 - cos(h_l, h_{l+1})`` (ShortGPT, arXiv 2403.03853).
        angular_distance_next: ``arccos(cos(h_l, h_{l+1})) / pi`` of each window's last token (arXiv
            2403.17887).
        attn_write_ratio: ``|a| / |h|``; ``mlp_write_ratio``: ``|m| / |h + a|``; ``mixer_write_ratio``,
            ``cross_attn_write_ratio`` likewise; None where the block has no such write or carries nothing.
        write_ratio: ``|a + m| / |h|``; ``write_cosine``: ``cos(a + m, h)``.
        resid_norm_mean, resid_norm_median, resid_norm_p5, resid_norm_p95: of ``|h_{l+1}|``.
        resid_norm_first: mean of ``|h_{l+1}|`` over the windows' first tokens.
        resid_outlier_tokens: tokens with a norm beyond 5 medians.
        max_abs: largest ``|h_{l+1}|`` entry, first tokens too; ``headroom_bits``: doublings left before it
            leaves float16, bfloat16 and the model's own dtype.
        absorbed_bfloat16, absorbed_float16: share of the block's non-zero write entries that would not change
            a stream kept in that dtype, by kind of write, ``rest`` and ``first`` tokens apart.
        lens_kl: mean over all tokens of ``KL(p_final || p_lens)`` of the state after the block, nats;
            ``lens_reverse_kl`` the other direction; ``lens_top1``: share of tokens with the model's own top
            word.
        random_walk_angle: angular distance that a random write of the block's mean size would give,
            ``arctan(write_ratio) / pi``.
        nearest_embedding: share of the sampled tokens whose own embedding is nearest to ``h_{l+1}`` by
            cosine; None where it was not looked for.
        gradient_norm: mean of ``|dL/dh_{l+1}|`` over the first window's tokens, L its summed loss; None
            where there was no backward pass.
        first: figures of the first tokens alone.
    """

    block: int
    module: str
    block_influence: float
    angular_distance_next: float
    attn_write_ratio: float | None
    mlp_write_ratio: float | None
    cross_attn_write_ratio: float | None
    mixer_write_ratio: float | None
    write_ratio: float | None
    write_cosine: float | None
    resid_norm_mean: float
    resid_norm_median: float
    resid_norm_p5: float
    resid_norm_p95: float
    resid_norm_first: float
    resid_outlier_tokens: int
    max_abs: float
    headroom_bits: Mapping[str, float]
    absorbed_bfloat16: Mapping[str, Mapping[str, float]]
    absorbed_float16: Mapping[str, Mapping[str, float]]
    lens_kl: float | None
    lens_reverse_kl: float | None
    lens_top1: float | None
    random_walk_angle: float | None
    nearest_embedding: float | None
    gradient_norm: float | None
    first: Mapping[str, float | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AngularDistance:
    """Angular distances over n blocks, of each window's last token.

    Attributes:
        distances: ``distances[n - 1][l]``: between the states before block ``l`` and before block ``l + n``.
        best: for each n, the start with the least distance.
    """

    distances: Sequence[Sequence[float]]
    best: Sequence[Mapping[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """Whether the word is still there, beside the figures by block.

    Attributes:
        nearest_before: share before block 0 of the tokens whose own embedding is nearest.
        majority: share that always naming the commonest of these tokens would get.
        carried_share: mean over the first window but its first token of ``<row, e> / <e, e>``, e the
            embedding as it enters block 0 and row what the ledger carries of it to the top; None where the
            ledger was refused, or norms on the stream set its size anew.
        final_share: mean likewise of ``<row, h> / <h, h>``, h the final state: the embedding's share of what
            is there at the top, the writes having the rest; None where the ledger was refused.
        carried_share_first, final_share_first: of the first token.
        tokens: tokens looked at.
    """

    nearest_before: float
    majority: float
    carried_share: float | None
    carried_share_first: float | None
    final_share: float | None
    final_share_first: float | None
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradient:
    """Gradient of the loss with respect to the stream, beside the figures by block.

    Attributes:
        norm_before: mean of ``|dL/dh_0|``, before block 0.
        bottom_to_top: ``norm_before`` over the last block's ``gradient_norm``.
        tokens: real tokens of the window.
    """

    norm_before: float
    bottom_to_top: float
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDamage:
    """What skipping one block does; the stream passes it by.

    Attributes:
        block: 0-based number.
        removal_loss: mean loss of the next token without the block minus that with it, nats; None for a model
            that does not predict the next token.
        kl: mean over all tokens of ``KL(p || p')``, nats, p' the prediction without the block; ``top1``:
            share of them whose top word stays. nan without an output head.
        change: mean of ``|h' - h| / |h|`` of each state above, from the one after this block on, over all
            tokens but the first of each window; ``cosine``: of ``cos(h', h)``.
    """

    block: int
    removal_loss: float | None
    kl: float
    top1: float
    change: Sequence[float]
    cosine: Sequence[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemovalPlan:
    """Blocks that a score would remove together, and what that costs.

    Attributes:
        score: ``block_influence`` or ``removal_loss``: those of least; ``angular_distance``: the run of it.
        blocks: which.
        removal_loss, kl, top1: as of `BlockDamage`.
    """

    score: str
    blocks: Sequence[int]
    removal_loss: float
    kl: float
    top1: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """Every block skipped in turn.

    Attributes:
        windows: the first of the text, that it was measured on; ``tokens``: real ones in them.
        passes: forward passes made; ``restarted``: whether they began at the skipped block.
        silenced: whether a block's sublayers were made to write nothing instead of the stream passing it by,
            as a history cannot.
        finished: False where it was stopped; then some blocks are missing, or are of fewer windows.
        blocks: one entry a block.
        influence_correlation, angle_correlation: Spearman's rank correlation of ``removal_loss`` (of ``kl``
            where there is none) with ``block_influence`` and ``angular_distance_next``; None for fewer than 3
            blocks or where a figure is not finite.
        plans: a tenth of the blocks removed together, as each score would choose them; empty for fewer than 6
            blocks or without a loss.
    """

    windows: int
    tokens: int
    passes: int
    restarted: bool
    finished: bool
    blocks: Sequence[BlockDamage]
    influence_correlation: float | None
    angle_correlation: float | None
    plans: Sequence[RemovalPlan]
    silenced: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttributedPart:
    """What one contribution to the final state is of a logit.

    Attributes:
        label: ``embed``, ``pos_embed``, ``3_attn_out``, ..., ``bias``: the head's and the norms' biases.
        block: of a write; None for the rest.
        logit: its part, before any soft-cap or logit scale.
    """

    label: str
    block: int | None
    logit: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attribution:
    """One logit, or the difference of two, at one position of the first window, as a sum over all writes.

    Attributes:
        position: place of the token that it is read at, 0-based, padding not counted.
        token_id, token: whose logit; ``against_id``, ``against``: minus whose, None for one alone.
        before: the model's own figure before any soft-cap or logit scale, the sum of ``parts``.
        after: the model's own figure as it returns it.
        transforms: names of the calls in between.
        error: largest error of a sum beside ``sum |part|``, before or after.
        parts: in the order of writing.
    """

    position: int
    token_id: int
    token: str
    against_id: int | None
    against: str | None
    before: float
    after: float
    transforms: Sequence[str]
    error: float
    parts: Sequence[AttributedPart]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One question of the audit and what was found, in a sentence."""

    number: int
    question: str
    finding: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The whole audit.

    Attributes:
        provenance: model, text, options, stream, versions: what is needed to repeat it.
        loss: None for a model that does not predict the next token.
        books: see `BooksSummary`.
        outliers: one entry a block.
        blocks: one entry a block.
        angular_distance: all block sizes.
        identity: question 4, None where it was not answered; ``gradient``: question 8 likewise.
        damage: question 6, None where no block was skipped.
        effective_depth: the lens's KL over the blocks in a few figures, None without a lens.
        spectra: how many directions some states use and how alike they are (questions 2 and 3), None where
            it was not asked or the stream is too wide.
        probe: linear probes of token identity (question 4), None where none was asked for.
        attribution: a token's logit by write (question 5), None where it was not asked or is not to be had.
        first_nonfinite: where a NaN or infinity came first, None where all is finite.
        streams: each of several streams, what is read of them and how they are mixed; None for one stream.
        findings: by question.
    """

    provenance: Mapping[str, Any]
    loss: Loss | None
    books: BooksSummary
    outliers: Sequence[Outlier]
    blocks: Sequence[BlockFigures]
    angular_distance: AngularDistance
    identity: Identity | None
    gradient: Gradient | None
    effective_depth: EffectiveDepth | None
    first_nonfinite: Mapping[str, Any] | None
    findings: Sequence[Finding]
    damage: Damage | None = None
    attribution: Attribution | None = None
    spectra: Sequence[StateSpectra] | None = None
    probe: ProbeResult | None = None
    streams: StreamsResult | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; a figure that is not finite is None."""
        found: dict[str, Any] = {"schema": SCHEMA}
        for field in dataclasses.fields(self):
            found[field.name] = _plain(getattr(self, field.name))
        return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
