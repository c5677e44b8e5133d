"""SmolLM2-135M-Instruct on 8 windows of 256 tokens: what it loses without its blocks, and what a bf16 stream
would swallow of their writes. All references were measured with plain module hooks.

The fp32 model, first 2,048 tokens of the GPL-3 text, no BOS.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mainstem.intervene import removal_loss, sweep
from mainstem.measure import AbsorptionResult, RoundingAbsorption
from mainstem.observe import StreamMap, find_stream, record
from mainstem.sources import load_model, load_text, make_windows

pytestmark = pytest.mark.slow

# dNLL, nats a token.
REMOVAL = [
    6.9877, 3.1677, 0.6870, 0.1396, 0.0870, 0.1353, 0.2621, 0.2444, 1.2085, 0.6255,
    0.4054, 1.5420, 0.1417, 0.1497, 0.1005, 0.1809, 0.0904, 0.1149, 0.1286, 0.2332,
    0.2926, 0.2754, 0.2312, 0.2158, 0.5236, 0.1497, 0.2279, 0.3418, 1.4113, 2.2439,
]  # fmt: skip
TOGETHER = {(13, 14, 25): 0.3730, (13, 14, 15): 0.4227, (4, 14, 16): 0.2992}
"""By influence, by angular distance, and by removal loss of each block alone: the three blocks of least."""
NLL = 3.344804


@dataclasses.dataclass
class Setting:
    model: Any
    batches: list[dict[str, Any]]
    stream_map: StreamMap


@pytest.fixture(scope="module")
def smollm2() -> Setting:
    loaded = load_model("smollm2")
    text = load_text(Path(__file__).parents[1] / "data" / "gpl-3.0.txt")
    windows = make_windows(loaded.tokenizer, text, num_tokens=2048, window=256, batch_size=2)
    batches = [batch.inputs_for(loaded.model) for batch in windows]
    return Setting(loaded.model, batches, find_stream(loaded.model, batches[0]))


def test_removal_loss_by_block(smollm2: Setting) -> None:
    result = sweep(smollm2.model, smollm2.batches, smollm2.stream_map)
    assert result.restarted
    assert [f.floor for f in result.floors] == list(range(30))
    off = {f.floor: abs(f.nll_delta - REMOVAL[f.floor]) for f in result.floors}
    assert {floor: error for floor, error in off.items() if error > 2e-3} == {}
    assert all(f.num_tokens == 2048 - 8 for f in result.floors)
    assert all(f.nll - f.nll_delta == pytest.approx(NLL, abs=2e-3) for f in result.floors)


def test_removal_loss_of_three_blocks_together(smollm2: Setting) -> None:
    found = removal_loss(smollm2.model, smollm2.batches, smollm2.stream_map, list(TOGETHER))
    assert {r.blocks: r.nll_delta for r in found} == pytest.approx(TOGETHER, abs=2e-3)
    assert min(found, key=lambda r: r.nll_delta).blocks == (4, 14, 16)


@pytest.fixture(scope="module")
def absorbed(smollm2: Setting) -> AbsorptionResult:
    reducer = RoundingAbsorption(every=1, dtypes=(torch.bfloat16,))
    with torch.no_grad():
        for inputs in smollm2.batches:
            record(smollm2.model, inputs, smollm2.stream_map, [reducer])
    return reducer.result()


def shares(absorbed: AbsorptionResult, kind: str, tokens: str) -> list[float]:
    return [getattr(w.figures[0].absorbed, tokens) for w in absorbed.writes if w.kind == kind]


@torch.no_grad()
def test_absorption_is_what_bf16_sums_of_plain_hooks_leave_as_they_were(
    smollm2: Setting, absorbed: AbsorptionResult
) -> None:
    seen: dict[tuple[int, str], Tensor] = {}
    hooks: list[Any] = []
    for i, layer in enumerate(smollm2.model.model.layers):
        hooks.append(layer.register_forward_pre_hook(lambda _, a, i=i: seen.update({(i, "x"): a[0]})))
        for kind, module in (("attn", layer.self_attn), ("mlp", layer.mlp)):

            def keep(_m: Any, _a: Any, out: Any, i: int = i, kind: str = kind) -> None:
                seen[i, kind] = out[0] if isinstance(out, tuple) else out

            hooks.append(module.register_forward_hook(keep))
    counts = torch.zeros(2, 30, 2, 2)  # kind, block, (first token, rest), (absorbed, non-zero)
    for inputs in smollm2.batches:
        smollm2.model(**inputs)
        for i in range(30):
            x, attn, mlp = (seen[i, name] for name in ("x", "attn", "mlp"))
            for kind, (carried, write) in enumerate(((x, attn), (x + attn, mlp))):
                low, w = carried.bfloat16(), write.bfloat16()
                same = (low + w == low) & (w != 0)
                for part, places in enumerate((slice(0, 1), slice(1, None))):
                    counts[kind, i, part, 0] += same[:, places].sum()
                    counts[kind, i, part, 1] += (w[:, places] != 0).sum()
    for hook in hooks:
        hook.remove()
    for kind, name in enumerate(("attn", "mlp")):
        for part, tokens in enumerate(("first", "rest")):
            plain = (counts[kind, :, part, 0] / counts[kind, :, part, 1]).tolist()
            assert shares(absorbed, name, tokens) == pytest.approx(plain, rel=1e-5)


def test_absorption_of_the_published_blocks_and_of_all(absorbed: AbsorptionResult) -> None:
    """Published: over all tokens about 1 % and 0.5-0.9 % (attention, feed-forward), at position 0 of blocks
    12-24 8-21 % and 48-72 %. That is what blocks 12, 18 and 24 have; of all of 12-24 some lie outside."""
    first = {kind: shares(absorbed, kind, "first") for kind in ("attn", "mlp")}
    every = {kind: shares(absorbed, kind, "all") for kind in ("attn", "mlp")}
    sixth = range(12, 25, 6)
    assert all(0.08 <= round(first["attn"][b], 2) <= 0.21 for b in sixth)
    assert all(0.48 <= round(first["mlp"][b], 2) <= 0.72 for b in sixth)
    assert all(round(every["attn"][b], 2) == 0.01 for b in sixth)
    assert all(0.005 <= round(every["mlp"][b], 3) <= 0.009 for b in sixth)
    most = {kind: max(range(12, 25), key=first[kind].__getitem__) for kind in first}
    least = {kind: min(range(12, 25), key=first[kind].__getitem__) for kind in first}
    assert (most, least) == ({"attn": 13, "mlp": 16}, {"attn": 24, "mlp": 23})
    assert first["attn"][13] == pytest.approx(0.2437, abs=0.01)
    assert first["mlp"][16] == pytest.approx(0.7420, abs=0.01)
    assert first["mlp"][23] == pytest.approx(0.4310, abs=0.01)
    assert all(0.003 < share < 0.013 for share in every["attn"])
    assert all(0.002 < share < 0.010 for share in every["mlp"][1:])
    assert every["mlp"][0] < 0.001
