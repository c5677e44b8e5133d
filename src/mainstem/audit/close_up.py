"""One sentence close up: what every block reads and writes, one token's tower, a break, two sentences.

>>> from mainstem.audit.close_up import Subject, look, see, token_tower
subject = Subject(load_model("tower96"))
seen = see(subject, "The state of the union is")
look(seen).predictions, token_tower(seen).meaning
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainstem.audit._readout import StateReadout, Word, best_words, lens_grids, readouts, token_losses
from mainstem.audit._seen import Film, Seen, Subject, WriteName, see
from mainstem.errors import ConfigError, MainstemError
from mainstem.measure import Result, lens_divergence
from mainstem.observe import Attribution, attribute

__all__ = [
    "GRIDS",
    "LENS_GRIDS",
    "Film",
    "Look",
    "Meaning",
    "Part",
    "Seen",
    "SentenceDamage",
    "Spread",
    "StateReadout",
    "Subject",
    "TokenTower",
    "Word",
    "WordsCompared",
    "WriteName",
    "compare_words",
    "damage",
    "look",
    "see",
    "token_tower",
    "word_position",
]

Grid = NDArray[np.float32] | NDArray[np.int32]
LENS_GRIDS = ("lens_probability", "lens_kl", "lens_top")
GRIDS = (
    "norm",
    "write_norm",
    "write_size",
    "write_cosine",
    "cosine_first",
    "cosine_before",
    "token_cosine",
    *LENS_GRIDS,
)
"""What `look` can make of a pass; see `Look`."""


@dataclasses.dataclass(frozen=True)
class Spread(Result):
    """A figure over the tokens of a sentence, its first token apart.

    Attributes:
        median, low, high: 50th, 5th and 95th percentile over all tokens but the first; nan where there is
            none.
        first: of the first token, which in many models is a thousand times as large.
    """

    median: float
    low: float
    high: float
    first: float


@dataclasses.dataclass(frozen=True)
class Look(Result):
    """One sentence through one model.

    Attributes:
        position: token after which is predicted; ``predictions``: the likeliest words there.
        lens: every state read out at that position; see `StateReadout`. Empty without a head.
        loss: mean over tokens of predicting the next one, nats; ``loss_by_token``: of each token from those
            before, nan for the first. nan and empty where there is none.
        norm: by state; ``write_size`` and ``write_cosine``: by write, ``|write| / |carried|`` and
            ``cos(write, carried)``.
        token_cosine: by state, mean cosine of two different tokens' states.
        cosine_first, cosine_before: by state, ``cos(x_l, x_0)`` and ``cos(x_l, x_(l-1))``, mean over tokens
            but the first.
        vocabulary: text of every token in the grid ``lens_top``.
        grids: ``norm``, ``cosine_first``, ``cosine_before``, ``lens_probability`` (of each token's own final
            best word), ``lens_kl``, ``lens_top`` (int32): ``[state, pos]``; ``write_norm``, ``write_size``,
            ``write_cosine``: ``[write, pos]``; ``token_cosine``: ``[state, pos, pos]``. fp32; nan where
            nothing was carried.
    """

    position: int
    predictions: tuple[Word, ...]
    lens: tuple[StateReadout, ...]
    loss: float
    loss_by_token: tuple[float, ...]
    norm: tuple[Spread, ...]
    write_size: tuple[Spread, ...]
    write_cosine: tuple[Spread, ...]
    token_cosine: tuple[float, ...]
    cosine_first: tuple[float, ...]
    cosine_before: tuple[float, ...]
    vocabulary: dict[int, str]
    grids: dict[str, Grid]


def look(seen: Seen, position: int | None = None, grids: Sequence[str] = GRIDS) -> Look:
    """Say what a pass shows.

    Args:
        seen: the pass.
        position: the token after which is predicted, the last one when not given; negative ones from the end.
        grids: names of `GRIDS` to make. Those of the lens cost a tail a state.

    Raises:
        ConfigError: there is no such position or grid.
    """
    if unknown := [name for name in grids if name not in GRIDS]:
        raise ConfigError(f"there is no grid {unknown[0]!r}; it must be of {', '.join(GRIDS)}.")
    place = seen.place(position)
    made = _figures(seen)
    if any(name in LENS_GRIDS for name in grids):
        made |= lens_grids(seen)
    similar = made["token_cosine"]
    count = len(seen.ids)
    losses = token_losses(seen)
    shown = {name: made[name] for name in grids if name in made}
    tops = np.unique(made["lens_top"]).tolist() if "lens_top" in shown else []
    own = similar[:, range(count), range(count)]
    return Look(
        position=place,
        predictions=() if seen.logits is None else best_words(seen, seen.logits[place]),
        lens=readouts(seen, place),
        loss=float(np.mean(losses[1:])) if losses else math.nan,
        loss_by_token=tuple(losses),
        norm=_spreads(made["norm"]),
        write_size=_spreads(made["write_size"]),
        write_cosine=_spreads(made["write_cosine"]),
        token_cosine=tuple(((similar.sum((1, 2)) - own.sum(1)) / (count * (count - 1))).tolist()),
        cosine_first=tuple(made["cosine_first"][:, 1:].mean(1).tolist()),
        cosine_before=tuple(made["cosine_before"][:, 1:].mean(1).tolist()),
        vocabulary={i: seen.subject.text_of(i) for i in tops},
        grids={name: _narrow(grid) for name, grid in shown.items()},
    )


def _figures(seen: Seen) -> dict[str, NDArray[Any]]:
    """Norms and cosines of states and writes; zero vectors have cosine 0."""
    states, writes, carried = seen.states, seen.writes, seen.carried
    norm, write_norm = _norm(states), _norm(writes)
    carried_norm = _norm(carried)
    unit = states / norm.clamp_min(torch.finfo(norm.dtype).tiny)[..., None]
    before = torch.cat([torch.full_like(norm[:1], torch.nan), _cosine(states[1:], states[:-1])])
    made = {
        "norm": norm,
        "write_norm": write_norm,
        "write_size": write_norm / carried_norm,
        "write_cosine": _cosine(writes, carried),
        "cosine_first": _cosine(states, states[:1].expand_as(states)),
        "cosine_before": before,
        "token_cosine": unit @ unit.mT,
    }
    return {name: value.double().cpu().numpy() for name, value in made.items()}


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    tiny = torch.finfo(x.dtype).tiny
    return (x / _norm(x).clamp_min(tiny)[..., None] * (y / _norm(y).clamp_min(tiny)[..., None])).sum(-1)


def _spreads(grid: NDArray[Any]) -> tuple[Spread, ...]:
    """Summarise ``[row, pos]`` row by row."""
    low, median, high = np.quantile(grid[:, 1:], [0.05, 0.5, 0.95], axis=1)
    rows = zip(median.tolist(), low.tolist(), high.tolist(), grid[:, 0].tolist(), strict=True)
    return tuple(Spread(*row) for row in rows)


def _narrow(grid: NDArray[Any]) -> Grid:
    return grid if grid.dtype == np.int32 else grid.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Part(Result):
    """What one row of the ledger gives to a logit.

    Attributes:
        label: ``embed``, ``pos_embed``, ``3_mlp_out``, ``intervention``, ``bias``.
        write: place among the writes, with ``block`` and ``kind``; None for what no sublayer wrote.
        logit: signed.
        running: the sum of this row and all before it.
    """

    label: str
    write: int | None
    block: int | None
    kind: str | None
    logit: float
    running: float


@dataclasses.dataclass(frozen=True)
class Meaning(Result):
    """A logit, or the difference of two, as an exact sum over everything that was written.

    Attributes:
        parts: in order of writing; their sum is ``logit``.
        logit: before any soft-cap and logit scale; ``shown_logit``: as the model returns it; ``transforms``:
            what lies between.
        error: of the sum, beside the sizes of what was summed.
        top: labels of the eight largest parts.
    """

    parts: tuple[Part, ...]
    logit: float
    shown_logit: float
    transforms: tuple[str, ...]
    error: float
    top: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TokenTower(Result):
    """One token's way up.

    Attributes:
        position: of the token; ``word``: whose logit is explained, ``against``: what it is compared with.
        norm: by state; ``write_norm``, ``write_size``, ``write_cosine``: by write; ``mid_norm``: by write,
            of the sum that it went into.
        meaning: None where the head is not linear or the ledger is not to be had; ``why_no_meaning`` says so.
    """

    position: int
    word: Word | None
    against: Word | None
    norm: tuple[float, ...]
    write_norm: tuple[float, ...]
    write_size: tuple[float, ...]
    write_cosine: tuple[float, ...]
    mid_norm: tuple[float, ...]
    meaning: Meaning | None
    why_no_meaning: str


def token_tower(
    seen: Seen, position: int | None = None, token: int | None = None, against: int | None = None
) -> TokenTower:
    """Say how one token's stream grows, and which write said what of a word.

    The sum is exact with the final norm's scale frozen at its value at that position; see
    `mainstem.observe.attribute`.

    Args:
        seen: the pass.
        position: the token, the last one when not given.
        token: whose logit is explained; the likeliest when not given.
        against: another one, whose logit is taken off.

    Raises:
        ConfigError: there is no such position or token.
    """
    place = seen.place(position)
    figures = {name: grid[:, place] for name, grid in _figures(seen).items() if grid.ndim == 2}
    mid = _norm(seen.after[:, place]).tolist()
    words: list[int] = []
    if seen.logits is not None:
        words = [int(seen.logits[place].argmax()) if token is None else token]
        words += [] if against is None else [against]
        for word in words:
            if not 0 <= word < seen.logits.shape[-1]:
                raise ConfigError(f"token {word} has no logit; the model has {seen.logits.shape[-1]}.")
    named = [_word(seen, place, word) for word in words]
    meaning, why = _meaning(seen, place, words)
    return TokenTower(
        position=place,
        word=named[0] if named else None,
        against=named[1] if len(named) > 1 else None,
        norm=tuple(figures["norm"].tolist()),
        write_norm=tuple(figures["write_norm"].tolist()),
        write_size=tuple(figures["write_size"].tolist()),
        write_cosine=tuple(figures["write_cosine"].tolist()),
        mid_norm=tuple(mid),
        meaning=meaning,
        why_no_meaning=why,
    )


def _word(seen: Seen, place: int, token: int) -> Word:
    assert seen.logits is not None
    logits = seen.logits[place].double()
    return Word(token, seen.subject.text_of(token), float(logits.softmax(-1)[token]), float(logits[token]))


def _meaning(seen: Seen, place: int, words: Sequence[int]) -> tuple[Meaning | None, str]:
    if seen.logits is None or seen.recording.tail is None:
        return None, "the model predicts no words"
    if seen.ledger is None:
        return None, seen.why_no_ledger
    try:
        output = seen.recording.output[seen.subject.stream_map.output]
        found = attribute(seen.ledger, seen.recording.tail, output, words, sequence=0, position=place)
        found.check(seen.subject.tolerance)
    except MainstemError as error:
        return None, str(error)
    return _parts(seen, found), ""


def _parts(seen: Seen, found: Attribution) -> Meaning:
    """Put the rows in the order of writing and sum them up."""
    sign = torch.tensor([1.0, -1.0][: len(found.tokens)], dtype=torch.float64)
    values = (found.parts @ sign).tolist()
    names = {name.label: name for name in seen.film.names}
    parts: list[Part] = []
    running = 0.0
    for label, value in zip(found.labels, values, strict=True):
        running += value
        name = names.get(label)
        block, kind = (name.block, name.kind) if name is not None else (None, None)
        parts.append(Part(label, None if name is None else name.index, block, kind, value, running))
    order = sorted(parts, key=lambda part: -abs(part.logit))
    return Meaning(
        parts=tuple(parts),
        logit=float(found.before @ sign),
        shown_logit=float(found.after @ sign),
        transforms=found.transforms,
        error=found.error,
        top=tuple(part.label for part in order[:8]),
    )


@dataclasses.dataclass(frozen=True)
class ChangedState(Result):
    """One state of a broken pass beside the whole model's.

    Attributes:
        state: ``l``: before block ``l``.
        mean, first, rest: ``|h' - h| / |h|``, mean over all tokens, of the first, and over the others.
        cosine: mean over tokens of ``cos(h', h)``.
    """

    state: int
    mean: float
    first: float
    rest: float
    cosine: float


@dataclasses.dataclass(frozen=True)
class SentenceDamage(Result):
    """What a break does to one sentence.

    Attributes:
        position: token after which is predicted; ``first_changed``: first state that differs, None for none.
        change: by state.
        kl: mean over tokens of ``KL(p || p')``, nats, ``p`` the whole model's; ``kl_by_token``.
        top1: share of tokens whose most likely word stays; ``top1_by_token``.
        loss, loss_broken: mean loss of the next token, nats; nan where there is none.
        predictions, predictions_broken: the likeliest words at ``position``.
        grids: ``change`` and ``cosine``, ``[state, pos]``.
    """

    position: int
    first_changed: int | None
    change: tuple[ChangedState, ...]
    kl: float
    kl_by_token: tuple[float, ...]
    top1: float
    top1_by_token: tuple[bool, ...]
    loss: float
    loss_broken: float
    predictions: tuple[Word, ...]
    predictions_broken: tuple[Word, ...]
    grids: dict[str, Grid]


def damage(whole: Seen, broken: Seen, position: int | None = None) -> SentenceDamage:
    """Compare a broken pass with the whole model's, of the same sentence.

    Raises:
        ConfigError: they are of different models or sentences, or there is no such position.
    """
    if whole.subject is not broken.subject or whole.ids != broken.ids:
        raise ConfigError("the two passes are of different models or sentences; a break is seen on one.")
    place = whole.place(position)
    change = (_norm(broken.states - whole.states) / _norm(whole.states)).double().cpu().numpy()
    cosine = _cosine(broken.states, whole.states).double().cpu().numpy()
    differs = [n for n in range(len(change)) if not np.array_equal(change[n], np.zeros_like(change[n]))]
    states = tuple(
        ChangedState(n, float(c.mean()), float(c[0]), float(c[1:].mean()), float(cosine[n].mean()))
        for n, c in enumerate(change)
    )
    kl, same = list[float](), list[bool]()
    if whole.logits is not None and broken.logits is not None:
        found = lens_divergence(whole.logits, broken.logits)
        kl, same = found.kl.double().tolist(), found.agrees.tolist()
    losses, losses_broken = token_losses(whole), token_losses(broken)
    return SentenceDamage(
        position=place,
        first_changed=differs[0] if differs else None,
        change=states,
        kl=float(np.mean(kl)) if kl else math.nan,
        kl_by_token=tuple(kl),
        top1=float(np.mean(same)) if same else math.nan,
        top1_by_token=tuple(same),
        loss=float(np.mean(losses[1:])) if losses else math.nan,
        loss_broken=float(np.mean(losses_broken[1:])) if losses_broken else math.nan,
        predictions=() if whole.logits is None else best_words(whole, whole.logits[place]),
        predictions_broken=() if broken.logits is None else best_words(broken, broken.logits[place]),
        grids={"change": _narrow(change), "cosine": _narrow(cosine)},
    )


@dataclasses.dataclass(frozen=True)
class WordsCompared(Result):
    """A word of one sentence beside a word of another, by state.

    Attributes:
        positions: of the two words.
        norm: of each side, by state; ``predictions`` and ``lens`` there.
        cosine: ``cos(a, b)``; ``distance``: ``|a - b| / ((|a| + |b|) / 2)``, 0 where both are zero.
        first_apart: first state whose cosine is below 1 - 1e-6, None where there is none.
    """

    positions: tuple[int, int]
    norm: tuple[tuple[float, ...], tuple[float, ...]]
    predictions: tuple[tuple[Word, ...], tuple[Word, ...]]
    lens: tuple[tuple[StateReadout, ...], tuple[StateReadout, ...]]
    cosine: tuple[float, ...]
    distance: tuple[float, ...]
    first_apart: int | None


def compare_words(a: Seen, b: Seen, positions: tuple[int | None, int | None] = (None, None)) -> WordsCompared:
    """Compare a word of one sentence with a word of another, of one model.

    Raises:
        ConfigError: they are of different models, or there is no such position.
    """
    if a.subject is not b.subject:
        raise ConfigError("the two sentences went through different models; compare them in one.")
    i, j = a.place(positions[0]), b.place(positions[1])
    x, y = a.states[:, i], b.states[:, j]
    size = (_norm(x) + _norm(y)) / 2
    distance = _norm(x - y) / size.clamp_min(torch.finfo(size.dtype).tiny)
    cosine = _cosine(x, y).tolist()
    apart = [n for n, value in enumerate(cosine) if not value >= 1 - 1e-6]
    return WordsCompared(
        positions=(i, j),
        norm=(tuple(_norm(x).tolist()), tuple(_norm(y).tolist())),
        predictions=_after_both(a, i, b, j),
        lens=(readouts(a, i), readouts(b, j)),
        cosine=tuple(cosine),
        distance=tuple(distance.tolist()),
        first_apart=apart[0] if apart else None,
    )


def _after_both(a: Seen, i: int, b: Seen, j: int) -> tuple[tuple[Word, ...], tuple[Word, ...]]:
    """Return the likeliest words after a token of each sentence."""
    first, second = (() if s.logits is None else best_words(s, s.logits[p]) for s, p in ((a, i), (b, j)))
    return first, second


def word_position(seen: Seen, word: str) -> int:
    """Return the place of the last token of a word's first occurrence in the sentence.

    Raises:
        ConfigError: the sentence does not hold the word.
    """
    text, wanted = "", word.strip()
    ends: list[int] = []
    for token in range(1, len(seen.ids) + 1):
        text = str(seen.subject.tokenizer.decode(list(seen.ids[:token]), clean_up_tokenization_spaces=False))
        ends.append(len(text))
    start = _find_word(text, wanted)
    if start is None:
        raise ConfigError(f"the word {wanted!r} is not in the sentence {seen.text!r}; choose one that is.")
    return next(i for i, end in enumerate(ends) if end >= start + len(wanted))


def _find_word(text: str, word: str) -> int | None:
    """Return where a word begins: as a whole word if it is there so, else as a part of one."""
    places = [i for i in range(len(text) - len(word) + 1) if text.startswith(word, i)] if word else []
    for i in places:
        around = text[max(0, i - 1) : i] + text[i + len(word) : i + len(word) + 1]
        if not any(letter.isalnum() for letter in around):
            return i
    return places[0] if places else None
