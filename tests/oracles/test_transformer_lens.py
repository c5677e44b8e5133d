"""TransformerLens as a second opinion: it finds the stream by adapters for each architecture, we without.

Both run eager attention on the same random weights. Left out: Mamba, whose blocks have no attention, which
its ``decompose_resid`` asks for; BERT, whose writes it lists as they were before the norms of the stream.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import pytest
import torch
from more_cases import MORE
from torch import Tensor, nn
from zoo import CASES

from mainstem.observe import Ledger, Recording, attribute, find_stream, ledger, record
from mainstem.observe.keep import KeepStream

bridges = pytest.importorskip(
    "transformer_lens.model_bridge.sources._bridge_builder",
    reason="needs transformer-lens; `make test-oracle` installs it",
    exc_type=ImportError,
)

pytestmark = [
    pytest.mark.oracle,
    # Its own imports and ours of transformers warn; neither is what is judged here.
    pytest.mark.filterwarnings("ignore"),
]

# Two fp32 runs of the same formula in another order of sums.
AGREE = 1e-5

LEFT_OUT = {"mamba", "bert", "albert", "modernbert", "vit", "deepseek_v4", "glm5_next", "hy_v4", "beam"}
OTHERS = ("hand", "tower", "torch", "whisper", "qwen4")
NAMES = [n for n in CASES if n not in LEFT_OUT and n not in MORE and not n.startswith(OTHERS)]


ADDS_ONE = {"gemma", "gemma2", "gemma3_text", "nemotron"}
"""Whose norms keep their gain as a difference to 1."""

each_name = pytest.mark.parametrize("name", NAMES)


class Both(NamedTuple):
    """One model, seen by TransformerLens and by us."""

    bridge: Any
    cache: Any
    logits: Tensor
    model: nn.Module
    recording: Recording
    kept: KeepStream
    ledger: Ledger


@functools.cache
def look(name: str) -> Both:
    case = CASES[name]
    model: Any = case.build()
    model.set_attn_implementation("eager")
    theirs, inputs = copy.deepcopy(model), case.inputs()
    bridge = bridges.build_bridge_from_module(theirs, type(theirs).__name__, hf_config=theirs.config)
    stream_map, kept = find_stream(model, inputs), KeepStream()
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(inputs["input_ids"])
        recording = record(model, inputs, stream_map, [kept], keep_tail=True)
    return Both(bridge, cache, logits, model, recording, kept, ledger(model, inputs, stream_map))


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference at a token, relative to its size there."""
    assert ours.shape == theirs.shape
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


def head(model: Any, bridge: Any, state: Tensor) -> Tensor:
    """Final norm, unembedding, and what the configuration says happens to logits."""
    logits, config = bridge.unembed(bridge.ln_final(state)), model.config
    logits = logits * (getattr(config, "logit_scale", None) or 1.0)
    logits = logits / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@each_name
def test_logits(name: str) -> None:
    both = look(name)
    assert difference(both.recording.output.logits, both.logits) <= AGREE


@each_name
def test_decomposition(name: str) -> None:
    both = look(name)
    rows, labels = both.cache.decompose_resid(return_labels=True)
    ours = dict(zip(both.ledger.labels, both.ledger.rows, strict=True))
    if name == "bloom":  # a norm follows its embedding; we give that norm's bias a row of its own
        ours["embed"] = ours["embed"] + ours.pop("bias")
    assert sorted(ours) == sorted(labels)
    for label, row in zip(labels, rows, strict=True):
        assert difference(ours[label], row.expand_as(ours[label])) <= AGREE, label


@each_name
def test_attribution(name: str) -> None:
    """Its rows over its final norm's scale, times that norm's gain and its unembedding's columns."""
    both, tokens, place = look(name), [3, 41], (0, 7)
    assert both.recording.tail is not None
    found = attribute(
        both.ledger, both.recording.tail, both.recording.output.logits, tokens, sequence=0, position=7
    ).check(1e-5)
    ours = dict(zip(found.labels, found.parts.float(), strict=True))
    rows, labels = both.cache.decompose_resid(return_labels=True)
    rows = both.cache.apply_ln_to_stack(rows.expand(len(rows), *both.ledger.final.shape), layer=-1)
    norm, columns = both.bridge.ln_final, both.bridge.W_U[:, tokens]
    gain = getattr(norm, "weight", None)
    gain = torch.ones(rows.shape[-1]) if gain is None else gain + (name in ADDS_ONE)
    theirs = dict(zip(labels, (rows[:, *place] * gain) @ columns, strict=True))
    bias = getattr(norm, "bias", None)
    theirs["bias"] = (torch.zeros_like(gain) if bias is None else bias) @ columns + both.bridge.b_U[tokens]
    if name == "bloom":  # as in the decomposition
        for parts in (ours, theirs):
            parts["embed"] = parts["embed"] + parts.pop("bias")
    assert ours.keys() == theirs.keys()
    size = torch.stack(list(theirs.values())).norm()
    for label, part in theirs.items():
        assert float((ours[label] - part).norm() / size) <= AGREE, label


@each_name
def test_states(name: str) -> None:
    both = look(name)
    for block in range(4):
        for point in ("resid_pre", "resid_post"):
            assert difference(both.kept[point, block], both.cache[point, block]) <= AGREE
    parallel = CASES[name].sublayers == ("attn+mlp",)
    assert ("blocks.1.hook_resid_mid" in both.kept.points) == (not parallel)
    if not parallel:
        assert difference(both.kept["resid_mid", 1], both.cache["resid_mid", 1]) <= AGREE


@each_name
def test_logit_lens(name: str) -> None:
    both = look(name)
    stack, labels = both.cache.accumulated_resid(return_labels=True)
    assert labels[-1] == "final_post"
    assert both.recording.tail is not None
    with torch.no_grad():
        for block, state in enumerate(stack):
            ours = both.kept["resid_pre", block] if block < 4 else both.kept["resid_post", -1]
            theirs = head(both.model, both.bridge, state)
            assert difference(both.recording.tail(ours), theirs) <= AGREE, labels[block]
        assert difference(both.recording.tail(both.kept["resid_post", -1]), both.logits) <= AGREE
