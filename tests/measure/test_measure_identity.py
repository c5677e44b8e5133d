"""The nearest embedding, counted by plain fp64 loops."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from fake_pass import make_pass

from mainstem.errors import ConfigError
from mainstem.measure import NearestEmbedding, nearest_embedding


def by_hand(state: np.ndarray, embedding: np.ndarray) -> int:
    cosines = [float(state @ e / (np.linalg.norm(state) * np.linalg.norm(e) or 1.0)) for e in embedding]
    return int(np.argmax(cosines))


def embedding_for(seed: int = 3) -> torch.Tensor:
    embedding = torch.randn(100, 16, generator=torch.Generator().manual_seed(seed))
    embedding[7] = 0
    embedding[9] *= 1e4  # a long row is near nothing for being long
    return embedding


@pytest.mark.parametrize("streams", [None, 4])
@pytest.mark.parametrize("every", [1, 3])
def test_shares_are_those_of_a_loop(streams: int | None, every: int) -> None:
    embedding = embedding_for()
    fake = make_pass(streams=streams, pad="left")
    ids = fake.batch.token_ids
    assert ids is not None
    shape = (*ids.shape, *(1 for _ in range(streams is not None)), 16)
    held = embedding[ids.clamp_min(0)].reshape(shape)
    for state in fake.states[:2]:
        state += 4.0 * held  # the word is there, under noise
    reducer = NearestEmbedding(embedding, every=every)
    fake.feed(reducer)
    found = reducer.result()
    for figures in found.states:
        hits: dict[str, list[bool]] = {"rest": [], "first": []}
        for row, mask in enumerate(fake.batch.mask):
            real = mask.nonzero().flatten().tolist()
            for position, column in enumerate(real):
                if position % every:
                    continue
                h = fake.states[figures.state][row, column].double()
                h = h.mean(0) if streams else h
                guess = by_hand(h.numpy(), embedding.double().numpy())
                hits["rest" if position else "first"].append(guess == int(ids[row, column]))
        assert figures.nearest.rest == np.mean(hits["rest"])
        assert figures.nearest.first == np.mean(hits["first"])
        assert figures.nearest.all == np.mean(hits["rest"] + hits["first"])
        assert found.num_tokens == len(hits["rest"] + hits["first"])
    assert found.states[0].nearest.rest > found.states[-1].nearest.rest


def test_majority_is_the_commonest_token() -> None:
    fake = make_pass()
    ids = fake.batch.token_ids
    assert ids is not None
    ids[:, :4] = 11
    reducer = NearestEmbedding(embedding_for())
    fake.feed(reducer)
    _, counts = np.unique(ids[fake.batch.mask].numpy(), return_counts=True)
    assert reducer.result().majority.all == counts.max() / counts.sum()
    assert reducer.result().majority.first == 1.0


def test_merged_and_pickled_halves_are_the_whole() -> None:
    embedding = embedding_for()
    whole, parts = NearestEmbedding(embedding), [NearestEmbedding(embedding), NearestEmbedding(embedding)]
    for seed, part in enumerate(parts):
        make_pass(seed=seed).feed(whole, part)
    parts[0].merge(pickle.loads(pickle.dumps(parts[1])))
    assert parts[0].result() == whole.result()


def test_each_embedding_is_nearest_to_itself_at_any_length() -> None:
    embedding = embedding_for()
    known = [i for i in range(100) if i != 7]
    states = embedding[known] * torch.linspace(0.1, 50, 99).unsqueeze(-1)
    assert nearest_embedding(states, embedding, chunk_tokens=10).tolist() == known


def test_another_width_is_refused() -> None:
    with pytest.raises(ConfigError, match="embeddings of width 8 was asked for"):
        make_pass().feed(NearestEmbedding(torch.ones(100, 8)))
    with pytest.raises(ConfigError, match=r"\[vocab, width\]; got \[3\]"):
        NearestEmbedding(torch.ones(3))
