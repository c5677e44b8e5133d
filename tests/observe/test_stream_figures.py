"""Figures of several streams and of histories, against loops written by hand and against the plain stream."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_models import VOCAB
from torch import Tensor
from zoo import CASES

from mainstem.connections import NormConfig
from mainstem.measure import Batch, StreamNorms, StreamsResult, WriteSizes
from mainstem.observe import find_stream, record, streams_of, tower_streams
from mainstem.tower import Tower, TowerConfig, compile_blocks

IDS = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[1, 4:] = 0
REST = [(0, t) for t in range(1, 6)] + [(1, t) for t in range(1, 4)]
"""Real tokens but the first of each window."""


def make(connection: str, *, shake: float = 0.1, kind: str = "rms", **more: Any) -> Tower:
    torch.manual_seed(0)
    config = TowerConfig(
        vocab_size=50,
        width=12,
        num_blocks=3,
        num_heads=2,
        ffn_width=20,
        connection=connection,
        norm=NormConfig(kind=kind),
        **more,
    )
    tower = Tower(config).double().eval()
    for parameter in tower.parameters():
        parameter.data += shake * torch.randn_like(parameter)
    return tower


@dataclasses.dataclass
class Step:
    connection: Any
    stream: Any
    update: Tensor
    after: Any


def steps_of(tower: Tower) -> list[Step]:
    """Every sublayer of one pass, from hooks of the test's own."""
    steps: list[Step] = []
    updates: list[Tensor] = []
    handles = []
    for _, connection, branches in tower.sublayers():
        (branch,) = branches.values()
        handles.append(branch.register_forward_hook(lambda _, __, out: updates.append(out)))
        handles.append(
            connection.register_forward_hook(lambda c, a, out: steps.append(Step(c, a[0], updates[-1], out)))
        )
    with torch.no_grad():
        tower(IDS, MASK)
    for handle in handles:
        handle.remove()
    return steps


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("connection", ["hyper_connections", "mhc", "identity_hc", "independent_hc"])
def test_streams_against_loops_over_tokens(connection: str) -> None:
    tower = make(connection)
    found = tower_streams(tower, IDS, MASK)
    steps = steps_of(tower)
    n = 4
    product = {at: np.eye(n) for at in REST}
    sources = {at: np.ones((n, 1)) for at in REST}
    for number, step in enumerate(steps):
        block, inside = divmod(number, 2)
        if not inside:
            within = {at: np.eye(n) for at in REST}
        got: dict[str, list[Any]] = {key: [] for key in ("read", "embed", "eff", "ratio", "whole", "late")}
        with torch.no_grad():
            read_weight, write_weight, mix = step.connection.coefficients(step.stream)
        for at in REST:
            x, u = step.stream[at].numpy(), step.update[at].numpy()
            r, w = read_weight[at].numpy(), write_weight[at].numpy()
            m = np.eye(n) if mix is None else mix[at].numpy()
            shares = np.abs(r @ sources[at])
            shares /= shares.sum()
            got["embed"].append(shares[0])
            got["eff"].append(1 / (shares**2).sum())
            got["late"].append(shares[1 + 2 * (block - 1) : 1 + 2 * block].sum() if block else 0.0)
            got["read"].append(np.linalg.norm(r @ x))
            carried = m @ x
            norms = np.linalg.norm(carried, axis=1)
            got["ratio"].append([abs(w[i]) * np.linalg.norm(u) / norms[i] for i in range(n)])
            written = np.linalg.norm((w[:, None] * u).mean(0))
            got["whole"].append(written / np.linalg.norm(carried.mean(0)))
            sources[at] = np.concatenate([m @ sources[at], w[:, None]], 1)
            within[at], product[at] = m @ within[at], m @ product[at]
        of_block = found.blocks[block]
        assert of_block.reads[inside].norm == pytest.approx(mean(got["read"]), rel=1e-10)
        assert of_block.reads[inside].embed_share == pytest.approx(mean(got["embed"]), rel=1e-10)
        assert of_block.reads[inside].effective_sources == pytest.approx(mean(got["eff"]), rel=1e-10)
        if block:
            assert of_block.reads[inside].shares[block] == pytest.approx(mean(got["late"]), rel=1e-10)
        assert sum(of_block.reads[inside].shares) == pytest.approx(1.0, rel=1e-12)
        assert of_block.writes[inside].ratio == pytest.approx(np.mean(got["ratio"], 0), rel=1e-10)
        assert of_block.writes[inside].whole_ratio == pytest.approx(mean(got["whole"]), rel=1e-10)
        if inside:
            eye = np.eye(n)
            assert of_block.mix_distance == pytest.approx(
                mean([float(np.sqrt(((within[at] - eye) ** 2).sum() / n)) for at in REST]),
                rel=1e-9,
                abs=1e-12,
            )
            assert of_block.product_distance == pytest.approx(
                mean([float(np.sqrt(((product[at] - eye) ** 2).sum() / n)) for at in REST]),
                rel=1e-9,
                abs=1e-12,
            )
            gains = [math.sqrt(np.linalg.eigvalsh(product[at].T @ product[at])[-1]) for at in REST]
            assert of_block.product_gain == pytest.approx(mean(gains), rel=1e-9)
            weights = [product[at].sum() / n for at in REST]
            assert of_block.embed_weight == pytest.approx(mean(weights), rel=1e-10)
            _check_state(of_block.state, step.after, n)


def _check_state(state: Any, after: Tensor, n: int) -> None:
    similarity, effective, norms = [], [], []
    for at in REST:
        x = after[at].numpy()
        size = [math.sqrt(float(row @ row)) for row in x]
        norms.append(size)
        pairs = [(i, j) for i in range(n) for j in range(i)]
        similarity.append(mean([float(x[i] @ x[j]) / (size[i] * size[j]) for i, j in pairs]))
        spectrum = (
            np.linalg.svd(x, compute_uv=False) ** 2
        )  # participation ratio of the singular values' squares
        effective.append(float(spectrum.sum() ** 2 / (spectrum**2).sum()))
    assert state.norm == pytest.approx(np.mean(norms, 0), rel=1e-10)
    assert state.similarity == pytest.approx(mean(similarity), rel=1e-10)
    assert state.effective_streams == pytest.approx(mean(effective), rel=1e-10)


def _weights_of_attention_residuals(steps: list[Step], number: int, at: tuple[int, int]) -> np.ndarray:
    """``softmax_i(query . gain RMS(v_i))`` over the embedding and all earlier updates."""
    if not number:
        return np.ones(1)
    query = steps[number].connection.depth_query
    key = (query.query * query.key_gain).detach().numpy()
    sources = [steps[0].stream[0], *(s.update for s in steps[:number])]
    scores = [float(key @ v[at].numpy()) / math.sqrt(float((v[at] ** 2).mean()) + query.eps) for v in sources]
    sized = np.exp(np.array(scores) - max(scores))
    return sized / sized.sum()


def _weights_of_dense_former(steps: list[Step], number: int, at: tuple[int, int]) -> np.ndarray:
    """What the recursion ``x_b = sum_j a_bj y_j`` makes of the embedding and the updates."""
    total = 1 + number
    x, outputs = np.eye(1, total, 0)[0], [np.eye(1, total, 0)[0]]
    for earlier in range(number):
        x = x + np.eye(1, total, 1 + earlier)[0]
        if earlier % 2:
            outputs.append(x)
            weights = steps[earlier].connection.depth_weights.detach().numpy()
            x = sum(w * y for w, y in zip(weights, outputs, strict=True))
    return x


@pytest.mark.parametrize(
    ("connection", "weights"),
    [
        ("attention_residuals", _weights_of_attention_residuals),
        ("dense_former", _weights_of_dense_former),
    ],
)
def test_depth_weights_of_histories(
    connection: str, weights: Callable[[list[Step], int, tuple[int, int]], np.ndarray]
) -> None:
    tower = make(connection, shake=0.3)
    found = tower_streams(tower, IDS, MASK)
    steps = steps_of(tower)
    assert found.num_streams == 1
    for number in range(len(steps)):
        by_block: list[list[float]] = []
        for at in REST:
            shares = np.abs(weights(steps, number, at))
            shares /= shares.sum()
            last = (number - 1) // 2 if number else -1
            by_block.append([shares[0], *(shares[1 + 2 * b : 3 + 2 * b].sum() for b in range(last + 1))])
        read = found.blocks[number // 2].reads[number % 2]
        assert read.shares == pytest.approx(np.mean(by_block, 0), rel=1e-9)
        assert found.blocks[number // 2].mix_distance is None


@pytest.mark.parametrize("connection", ["mudd", "dense_former", "delta_attention_residuals"])
def test_history_starts_with_the_weights_of_its_formula(connection: str) -> None:
    """MUDD and DenseFormer start as the plain residual: every earlier update weighs the same. Delta attention
    adds a mean of the sources to their sum."""
    found = tower_streams(make(connection, shake=0.0), IDS, MASK)
    for number in range(1, 6):
        read = found.blocks[number // 2].reads[number % 2]
        assert read.effective_sources == pytest.approx(number + 1, rel=1e-12)
        assert read.embed_share == pytest.approx(1 / (number + 1), rel=1e-12)


def figures_of_plain(tower: Tower) -> tuple[list[float], list[list[float]]]:
    """Norms by state and write ratios by block, through the data flow and the usual reducers."""
    norms, sizes = StreamNorms(), WriteSizes()
    inputs = {"token_ids": IDS, "attention_mask": MASK}
    with torch.no_grad():
        record(
            tower,
            inputs,
            find_stream(tower, inputs),
            [norms, sizes],
            batch=Batch(mask=MASK.bool(), token_ids=IDS),
        )
    return (
        [s.mean.rest for s in norms.result().states],
        [[w.ratio.rest for w in b.writes] for b in sizes.result().blocks],
    )


@pytest.mark.parametrize("connection", ["hyper_connections", "frac_connections", "mudd", "dense_former"])
def test_at_the_start_the_whole_is_the_plain_stream(connection: str) -> None:
    plain, other = make("pre_norm", shake=0.0), make(connection, shake=0.0)
    weights = other.state_dict() | {k: v for k, v in plain.state_dict().items() if k in other.state_dict()}
    other.load_state_dict(weights)
    norms, ratios = figures_of_plain(plain)
    found = tower_streams(other, IDS, MASK)
    assert [found.before.whole_norm, *(b.state.whole_norm for b in found.blocks)] == pytest.approx(
        norms, rel=1e-9
    )
    for block, expected in zip(found.blocks, ratios, strict=True):
        assert [w.whole_ratio for w in block.writes] == pytest.approx(expected, rel=1e-9)
    if connection == "hyper_connections":
        assert found.blocks[-1].product_distance == 0
        assert found.blocks[-1].state.similarity == pytest.approx(1.0, rel=1e-12)
        assert [b.state.norm for b in found.blocks] == [
            pytest.approx((norm,) * 4, rel=1e-9) for norm in norms[1:]
        ]


@pytest.mark.parametrize("connection", ["siamese_norm", "resi_dual"])
def test_a_norm_on_the_stream_is_no_matrix_and_gets_no_figure(connection: str) -> None:
    found = tower_streams(make(connection), IDS, MASK)
    assert all(r.embed_share is None and r.shares == () for b in found.blocks for r in b.reads)
    assert all(b.product_gain is None and b.mix_distance is None for b in found.blocks)


def test_compiled_blocks_are_looked_into_and_hooks_are_taken_off() -> None:
    tower = make("hyper_connections")
    expected = tower_streams(tower, IDS, MASK)
    compile_blocks(tower)
    assert tower_streams(tower, IDS, MASK) == expected
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tower.modules())


def _no_reads(found: StreamsResult) -> dict[str, Any]:
    return {
        **found.to_dict(),
        "blocks": [{k: v for k, v in b.to_dict().items() if k != "reads"} for b in found.blocks],
    }


def _flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [x for v in value.values() for x in _flat(v)]
    if isinstance(value, list):
        return [x for v in value for x in _flat(v)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.parametrize("connection", ["hyper_connections", "mhc", "identity_hc"])
def test_data_flow_says_the_same_as_the_connections(connection: str) -> None:
    tower = make(connection)
    inputs = {"token_ids": IDS, "attention_mask": MASK}
    by_flow = streams_of(tower, inputs, find_stream(tower, inputs))
    by_connection = tower_streams(tower, IDS, MASK)
    assert _flat(_no_reads(by_flow)) == pytest.approx(_flat(_no_reads(by_connection)), rel=1e-9, abs=1e-9)
    assert all(r.norm is None and r.embed_share is None for b in by_flow.blocks for r in b.reads)


def test_deepseek_v4_mixes_with_its_own_matrices() -> None:
    model = CASES["deepseek_v4"].build()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    ids = torch.randint(0, VOCAB, (2, 7))
    inputs = {"input_ids": ids}
    made: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(("attn_hc", "ffn_hc")):
            module.register_forward_hook(lambda _, __, out: made.append(out[1].detach()))
    found = streams_of(model, inputs, find_stream(model, inputs))
    mixes = made[-2 * len(found.blocks) :]
    product = torch.eye(4, dtype=torch.float64).expand(2, 7, 4, 4)
    for block in found.blocks:
        for mix in mixes[2 * block.block : 2 * block.block + 2]:
            product = mix.double().mT @ product
        rest = product[:, 1:].reshape(-1, 4, 4)
        assert block.product_distance == pytest.approx(
            float((rest - torch.eye(4)).pow(2).sum((-2, -1)).sqrt().mean() / 2), abs=1e-6
        )
        assert block.embed_weight == pytest.approx(float(rest.sum((-2, -1)).mean() / 4), abs=1e-6)
