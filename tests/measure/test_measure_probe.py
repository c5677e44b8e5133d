"""The linear probe against ridge regression on the whole design matrix, and what it cannot know."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_pass import Pass, make_pass

from mainstem.errors import ConfigError
from mainstem.measure import LinearProbe, state_from_bytes, state_to_bytes
from mainstem.measure.probe import OFFSETS, held_out_types

VOCAB, WIDTH = 100, 16


def embedding_for() -> torch.Tensor:
    return torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(3))


def text(seed: int, streams: int | None = None) -> Pass:
    """Eight windows; the word is in the stream, and the one before it more faintly."""
    fake = make_pass((30, 22, 30, 30, 30, 17, 30, 30), streams=streams, pad="left", seed=seed)
    ids = fake.batch.token_ids
    assert ids is not None
    words = embedding_for()[ids.clamp_min(0)]
    there = 6.0 * words + 3.0 * words.roll(1, 1).flip(-1)
    for state in fake.states[:2]:
        state += there if streams is None else there.unsqueeze(2)
    return fake


def tokens_of(passes: list[Pass], state: int) -> dict[bool, list[tuple[np.ndarray, list[int]]]]:
    """By plain loops: for training and held-out windows, every state and its four tokens."""
    found: dict[bool, list[tuple[np.ndarray, list[int]]]] = {True: [], False: []}
    for fake in passes:
        for row, mask in enumerate(fake.batch.mask):
            real = mask.nonzero().flatten().tolist()
            for place in range(3, len(real)):
                h = fake.states[state][row, real[place]].double().numpy()
                h = h.mean(0) if h.ndim == 2 else h
                assert fake.batch.token_ids is not None
                ids = [int(fake.batch.token_ids[row, real[place - o]]) for o in OFFSETS]
                is_held = (fake.batch.first_sequence + row) % 4 == 3
                found[is_held].append((h / np.sqrt((h**2).mean()), ids))
    new = {token for token in range(VOCAB) if held_out_types(np.array([token]))[0]}
    found[False] = [(h, ids) for h, ids in found[False] if not new & set(ids)]
    return found


def ridge_by_hand(x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Centred ridge, its penalty by generalised cross-validation with the hat matrix written out."""
    mean_x, mean_y = x.mean(0), y.mean(0)
    a, b = x - mean_x, y - mean_y
    scale = np.trace(a.T @ a) / x.shape[1]
    best = (np.inf, 0.0, np.zeros(0))
    for factor in 10.0 ** np.arange(-6, 3):
        inverse = np.linalg.inv(a.T @ a + scale * factor * np.eye(x.shape[1]))
        freedom = 1 + np.trace(a @ inverse @ a.T)
        weight = inverse @ a.T @ b
        score = ((b - a @ weight) ** 2).sum() / len(x) / (1 - freedom / len(x)) ** 2
        best = min(best, (score, factor, weight), key=lambda entry: entry[0])
    return best[1], best[2], mean_x, mean_y


@pytest.mark.parametrize("streams", [None, 2])
def test_it_is_ridge_regression_on_all_training_tokens(streams: int | None) -> None:
    passes = [text(seed, streams) for seed in (1, 2)]
    probe = LinearProbe(embedding_for(), num_states=2)
    for fake in passes:
        fake.feed(probe)
    result = probe.result()
    unit = embedding_for().double().numpy()
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    assert [(f.state, f.offset) for f in result.figures] == [(s, o) for s in (0, 3) for o in OFFSETS]
    for figure in result.figures:
        tokens = tokens_of(passes, figure.state)
        x, y, held = (
            np.array([h for h, _ in tokens[False]]),
            unit[[ids[figure.offset] for _, ids in tokens[False]]],
            np.array([h for h, _ in tokens[True]]),
        )
        factor, weight, mean_x, mean_y = ridge_by_hand(x, y)
        named = ((held - mean_x) @ weight + mean_y) @ unit.T
        wanted = np.array([ids[figure.offset] for _, ids in tokens[True]])
        new = held_out_types(wanted)
        hit = named.argmax(1) == wanted
        assert figure.ridge == pytest.approx(factor)
        assert figure.text == pytest.approx(hit[~new].mean(), abs=1e-12)
        assert figure.types == pytest.approx(hit[new].mean(), abs=1e-12)
        assert result.num_train == len(x)
        if figure.offset == 0:
            assert (result.num_text, result.num_types) == ((~new).sum(), new.sum())
    best = {(f.state, f.offset): f for f in result.figures}
    assert min(best[0, 0].text, best[0, 0].types) > 0.8  # a word that it was not trained on, too


def test_baselines_by_loops() -> None:
    passes = [text(seed) for seed in (1, 2)]
    for fake in passes:
        assert fake.batch.token_ids is not None
        ids = fake.batch.token_ids
        ids[:, 16:] = torch.where(ids[:, 16:] < 60, torch.arange(17) % 5 + 40, ids[:, 16:])
    probe = LinearProbe(embedding_for(), num_states=2)
    for fake in passes:
        fake.feed(probe)
    tokens = tokens_of(passes, 0)
    for baseline in probe.result().baselines:
        column = baseline.offset
        held = [ids for _, ids in tokens[True]]
        known = [ids for ids in held if not held_out_types(np.array([ids[column]]))[0]]
        wanted = [ids[column] for ids in known]
        assert baseline.text == pytest.approx(max(map(wanted.count, wanted)) / len(wanted))
        other = [ids[column] for ids in held if ids not in known]
        assert baseline.types == pytest.approx(max(map(other.count, other)) / len(other))
        if column == 0:
            assert np.isnan(baseline.bigram)
            continue
        trained = [(ids[0], ids[column]) for _, ids in tokens[False]]
        hits = 0
        for ids in known:
            after = [b for a, b in trained if a == ids[0]] or [b for _, b in trained]
            most = max(map(after.count, after))
            likeliest = [b for b in after if after.count(b) == most]
            hits += ids[column] == min(likeliest)
        assert baseline.bigram == pytest.approx(hits / len(known))
        assert baseline.bigram > 0.1


@pytest.mark.parametrize("most", [1024, 50])
def test_merged_and_stored_parts_are_the_whole(most: int) -> None:
    def probe() -> LinearProbe:
        return LinearProbe(embedding_for(), num_states=2, max_held_out=most, max_counted=most)

    whole, one, other = probe(), probe(), probe()
    for seed, part in ((1, one), (2, other), (3, one)):
        text(seed).feed(whole, part)
    stored = probe()
    stored.load_state_dict(state_from_bytes(state_to_bytes(other.state_dict())))
    stored.merge(one)
    ours, theirs = stored.result(), whole.result()
    assert (ours.figures, ours.num_train) == (theirs.figures, theirs.num_train)
    assert ours.baselines[0].text == theirs.baselines[0].text
    assert ours.num_text + ours.num_types == min(most, 3 * 54)


def test_a_pass_that_broke_off_is_not_judged() -> None:
    probe, clean = (LinearProbe(embedding_for(), num_states=4) for _ in range(2))
    for event in list(text(1).events())[:2]:
        probe.update(event)
    text(2).feed(probe, clean)
    assert probe.result().num_text == clean.result().num_text


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="embeddings of width 8 was asked for"):
        text(1).feed(LinearProbe(torch.ones(100, 8)))
    with pytest.raises(ConfigError, match=r"\[vocab, width\]; got \[3\]"):
        LinearProbe(torch.ones(3))
    with pytest.raises(ConfigError, match="num_states is 1"):
        LinearProbe(torch.ones(3, 3), num_states=1)
