"""The value residual: every block attends to a mixture of the first block's values and its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from mainstem.connections import NormConfig, parameter_groups, scheme_names
from mainstem.errors import ConfigError, StreamNotFoundError
from mainstem.observe import find_stream, tower_ledger
from mainstem.tower import KVCache, Tower, TowerConfig, ValueMix, compile_blocks

SMALL: dict[str, Any] = {"vocab_size": 50, "width": 32, "num_blocks": 4, "num_heads": 4, "num_kv_heads": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "learned": {"value_residual": "learned"},
    "fixed": {"value_residual": "fixed", "value_residual_weights": (2.0, 1.0)},
    "shared": {"value_residual": "shared"},
    "sparse": {"value_residual": "fixed", "value_residual_weights": (5.0, 1.0), "value_residual_start": 3},
    "shared_late": {"value_residual": "shared", "value_residual_start": 2},
    "parallel": {"value_residual": "learned", "parallel": True, "qkv_bias": True},
    "sliding": {"value_residual": "learned", "sliding_window": 4, "attn_softcap": 2.0},
}
each_connection = pytest.mark.parametrize("connection", scheme_names())
each_variant = pytest.mark.parametrize("variant", VARIANTS)

# fp64 rounds at 1.1e-16 and the towers here are four blocks deep.
FP64 = 1e-12


def make_tower(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Tower:
    torch.manual_seed(seed)
    return Tower(TowerConfig(**(SMALL | options))).to(dtype).eval()


def moved(tower: Tower, seed: int = 1) -> Tower:
    """Every parameter and every mixing buffer away from where it starts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in tower.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.2 * noise.to(parameter.dtype)
    return tower


def tokens(seed: int = 0, batch: int = 2, positions: int = 12) -> Tensor:
    return torch.randint(0, 50, (batch, positions), generator=torch.Generator().manual_seed(seed))


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


# ---- the whole forward again, written out: no mask kernel, no module of the tower is called -------------


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turn(x: Tensor, theta: float = 10_000.0) -> Tensor:
    """Rotary positions of ``[batch, pos, heads, dim]``, as complex numbers."""
    half = x.shape[-1] // 2
    speed = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * speed
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def attend(p: dict[str, Tensor], block: str, x: Tensor, v: Tensor, config: TowerConfig) -> Tensor:
    """Attention of a block to given values ``[batch, pos, kv_width]``."""
    head_dim, pos = config.head_dim, x.shape[1]

    def project(name: str) -> Tensor:
        made = torch.einsum("oc,bpc->bpo", p[f"{block}.attn.{name}.weight"], x)
        return made + p.get(f"{block}.attn.{name}.bias", torch.zeros((), dtype=x.dtype))

    q = turn(project("q_proj").reshape(2, pos, config.num_heads, head_dim))
    k = turn(project("k_proj").reshape(2, pos, config.num_kv_heads, head_dim))
    serves = torch.arange(config.num_heads) // (config.num_heads // config.num_kv_heads)
    v = v.reshape(2, pos, config.num_kv_heads, head_dim)[:, :, serves]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k[:, :, serves]) / head_dim**0.5
    if config.attn_softcap is not None:
        scores = config.attn_softcap * torch.tanh(scores / config.attn_softcap)
    apart = torch.arange(pos)[:, None] - torch.arange(pos)
    seen = (apart >= 0) & (apart < (config.sliding_window or pos))
    powers = scores.exp() * seen
    mixed = torch.einsum("bhqk,bkhd->bqhd", powers / powers.sum(-1, keepdim=True), v)
    return torch.einsum("oc,bpc->bpo", p[f"{block}.attn.out_proj.weight"], mixed.flatten(2))


def feed_forward(p: dict[str, Tensor], block: str, x: Tensor) -> Tensor:
    gate, up = (torch.einsum("oc,bpc->bpo", p[f"{block}.mlp.{n}_proj.weight"], x) for n in ("gate", "up"))
    return torch.einsum("oc,bpc->bpo", p[f"{block}.mlp.down_proj.weight"], gate * gate.sigmoid() * up)


def reference(tower: Tower, text: Tensor) -> Tensor:
    config = tower.config
    p = dict(tower.named_parameters())
    x = p["token_embedding.weight"][text]
    first = torch.empty(0)
    for i in range(config.num_blocks):
        block = f"blocks.{i}"
        read = rms_norm(x, p[f"{block}.connections.0.norm.weight"])
        mixes = i > 0 and i >= config.value_residual_start
        if config.value_residual == "shared" and mixes:
            v = first
        else:
            v = torch.einsum("oc,bpc->bpo", p[f"{block}.attn.v_proj.weight"], read)
            v = v + p.get(f"{block}.attn.v_proj.bias", torch.zeros((), dtype=x.dtype))
            if mixes:
                of_first, of_own = config.value_residual_weights
                if config.value_residual == "learned":
                    of_first, of_own = (p[f"{block}.attn.value_mix.{n}_weight"] for n in ("first", "own"))
                v = of_first * first + of_own * v
        first = v if i == 0 else first
        attn = attend(p, block, read, v, config)
        if config.parallel:
            x = x + attn + feed_forward(p, block, read)
        else:
            x = x + attn
            x = x + feed_forward(p, block, rms_norm(x, p[f"{block}.connections.1.norm.weight"]))
    return rms_norm(x, p["trunk.final_norm.weight"]) @ p["token_embedding.weight"].T


@each_variant
def test_values_and_gradients_are_those_of_the_forward_written_out(variant: str) -> None:
    tower = moved(make_tower(**VARIANTS[variant]))
    text = tokens()
    found, wanted = tower(text), reference(tower, text)
    assert relative_error(found, wanted) <= FP64
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    parameters = dict(tower.named_parameters())
    mine = torch.autograd.grad((found * direction).sum(), list(parameters.values()))
    theirs = torch.autograd.grad((wanted * direction).sum(), list(parameters.values()))
    for name, a, b in zip(parameters, mine, theirs, strict=True):
        assert b.norm() > 0, name
        # A key's bias adds the same to every score of a query but for the rotation: what is left is small.
        assert (a - b).norm() <= 1e-10 * b.norm(), name


# ---- starts, weights, groups ----------------------------------------------------------------------------


@each_connection
@torch.no_grad()
def test_an_exact_start_is_the_plain_tower_to_the_bit(connection: str) -> None:
    """With any other weights: where a write starts at zero, so would the difference."""
    exact: dict[str, Any] = {"value_residual": "learned", "value_residual_weights": (0.0, 1.0)}
    plain = moved(make_tower(dtype=torch.float32, connection=connection))
    for options, same in ((exact, True), ({"value_residual": "learned"}, False)):
        tower = make_tower(dtype=torch.float32, connection=connection, **options)
        missing, unexpected = tower.load_state_dict(plain.state_dict(), strict=False)
        assert len(missing) == 6
        assert not unexpected
        assert torch.equal(tower(tokens()), plain(tokens())) is same


def test_weights_start_as_published_and_are_parameters_only_where_they_learn() -> None:
    weights = {n: p for n, p in make_tower(value_residual="learned").named_parameters() if "value_mix" in n}
    assert {n: p.item() for n, p in weights.items()} == {
        f"blocks.{i}.attn.value_mix.{name}_weight": 0.5 for i in (1, 2, 3) for name in ("first", "own")
    }
    fixed = make_tower(value_residual="fixed", value_residual_weights=(2.0, 1.0))
    assert not [n for n, _ in fixed.named_parameters() if "value_mix" in n]
    assert fixed.get_buffer("blocks.3.attn.value_mix.first_weight").item() == 2.0
    shared = make_tower(value_residual="shared")
    assert [n for n, _ in shared.named_parameters() if "v_proj" in n] == ["blocks.0.attn.v_proj.weight"]


@each_connection
@pytest.mark.parametrize("variant", ["learned", "shared", "parallel"])
def test_every_parameter_gets_a_gradient_and_a_group(connection: str, variant: str) -> None:
    options = VARIANTS[variant] | ({} if variant == "shared" else {"value_residual_weights": (0.0, 1.0)})
    tower = make_tower(connection=connection, **options)
    text = tokens()
    still = {name for name, _ in tower.named_parameters()}
    for _ in range(2):
        tower.zero_grad()
        nn.functional.cross_entropy(tower(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten()).backward()
        for name, parameter in tower.named_parameters():
            assert parameter.grad is not None, name
            if parameter.grad.abs().max() > 0:
                still.discard(name)
            parameter.data -= 1e-2 * parameter.grad
    assert not still
    groups = parameter_groups(tower)
    assert sorted(id(p) for g in groups for p in g.parameters) == sorted(id(p) for p in tower.parameters())
    decayed = {id(p) for g in groups if g.weight_decay for p in g.parameters}
    assert not decayed & {id(p) for n, p in tower.named_parameters() if "value_mix" in n}


def test_reset_gives_back_the_initial_values() -> None:
    tower = make_tower(value_residual="fixed", value_residual_weights=(2.0, 1.0))
    for block in tower.blocks[1:]:
        block.get_submodule("attn.value_mix").first_weight.zero_()  # type: ignore[operator]
    tower.reset_module("blocks.1.attn.value_mix")
    assert tower.get_buffer("blocks.1.attn.value_mix.first_weight").item() == 2.0
    assert tower.get_buffer("blocks.2.attn.value_mix.first_weight").item() == 0.0
    tower.reset_parameters()
    assert tower.get_buffer("blocks.2.attn.value_mix.first_weight").item() == 2.0


# ---- caches, checkpoints, graphs, faces -----------------------------------------------------------------


@each_variant
@torch.no_grad()
def test_cached_equals_uncached_with_padding_on_either_side(variant: str) -> None:
    tower = moved(make_tower(**VARIANTS[variant]))
    text = tokens(positions=14)
    mask = torch.ones_like(text)
    mask[0, :5] = 0
    mask[1, 9:] = 0
    whole, cache = tower(text, attention_mask=mask), KVCache()
    parts = [
        tower(text[:, start:stop], attention_mask=mask[:, :stop], cache=cache)
        for start, stop in ((0, 7), (7, 8), (8, 14))
    ]
    assert relative_error(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()]) <= FP64
    assert relative_error(whole[0, 5:], tower(text[:1, 5:])[0]) <= FP64


@torch.no_grad()
def test_the_cache_holds_the_mixed_values() -> None:
    tower, text, cache = moved(make_tower(value_residual="learned")), tokens(), KVCache()
    seen: dict[str, Tensor] = {}
    for i in (0, 2):
        module = tower.get_submodule(f"blocks.{i}.attn.v_proj")
        module.register_forward_hook(lambda m, a, out, i=i: seen.__setitem__(str(i), out))
    tower(text, cache=cache)
    mix = tower.get_submodule("blocks.2.attn.value_mix")
    assert isinstance(mix, ValueMix)
    expected = mix.first_weight * seen["0"] + mix.own_weight * seen["2"]
    empty = torch.zeros(2, 2, 0, 8, dtype=torch.float64)
    _, values = cache.update(empty, empty, 2)
    torch.testing.assert_close(values.transpose(1, 2).flatten(2), expected, rtol=FP64, atol=0)


@each_connection
@pytest.mark.parametrize("variant", ["learned", "shared"])
def test_checkpointed_equals_plain_to_the_bit(connection: str, variant: str) -> None:
    options = VARIANTS[variant] | {"dropout": 0.1, "attn_dropout": 0.1}
    tower = make_tower(dtype=torch.float32, connection=connection, **options).train()
    results = []
    for mode in ("none", "block", "selective"):
        tower.checkpoint_activations(mode)
        tower.zero_grad()
        torch.manual_seed(3)
        logits = tower(tokens())
        logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in tower.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# Dynamo asks every input for its .grad and hides the warning itself, which "error" overrides.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize(
    ("variant", "graphs"), [("learned", 2), ("shared", 2), ("sparse", 3), ("parallel", 2)]
)
def test_a_graph_for_the_first_block_and_one_for_the_others(
    variant: str, graphs: int, checkpointing: Any
) -> None:
    torch._dynamo.reset()
    tower = make_tower(dtype=torch.float32, num_blocks=24, **VARIANTS[variant]).train()
    tower.checkpoint_activations(checkpointing)
    expected = tower(tokens())
    expected.square().mean().backward()
    gradients = [p.grad.clone() for p in tower.parameters() if p.grad is not None]
    tower.zero_grad()
    counter = CompileCounter()
    compile_blocks(tower, backend=counter)
    found = tower(tokens())
    assert torch.equal(found, expected)
    found.square().mean().backward()
    assert counter.frame_count == graphs
    compiled = [p.grad for p in tower.parameters() if p.grad is not None]
    for a, b in zip(compiled, gradients, strict=True):
        assert relative_error(a, b) <= 1e-5  # fp32 sums over 24 blocks, in another order


@each_variant
def test_a_config_survives_json(variant: str) -> None:
    config = TowerConfig(**(SMALL | VARIANTS[variant]))
    assert TowerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@each_variant
@torch.no_grad()
def test_the_hugging_face_face_saves_loads_and_generates(variant: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from mainstem.tower.hf import MainstemConfig, MainstemForCausalLM

    torch.manual_seed(0)
    config = TowerConfig(**(SMALL | VARIANTS[variant]))
    face = MainstemForCausalLM(MainstemConfig(config, bos_token_id=None, eos_token_id=None)).eval()
    moved(face.tower)
    face.save_pretrained(tmp_path)
    loaded = MainstemForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.tower_config() == config
    assert torch.equal(loaded(tokens()).logits, face(tokens()).logits)
    expected = tokens()
    for _ in range(6):
        expected = torch.cat((expected, face.tower(expected)[:, -1:].argmax(-1)), dim=1)
    for use_cache in (True, False):
        made = loaded.generate(
            tokens(), max_new_tokens=6, do_sample=False, use_cache=use_cache, pad_token_id=0
        )
        assert torch.equal(made, expected)


@torch.no_grad()
def test_what_a_checkpoint_lacks_of_the_mixture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    from mainstem.tower.hf import MainstemConfig, MainstemForCausalLM

    options: dict[str, Any] = {"value_residual": "learned", "value_residual_weights": (0.25, 0.75)}
    face = MainstemForCausalLM(MainstemConfig(TowerConfig(**SMALL, **options)))
    moved(face.tower)
    face.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = weights.pop("tower.blocks.1.attn.value_mix.own_weight")
    own = weights.pop("tower.blocks.2.attn.value_mix.first_weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = dict(MainstemForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert loaded["tower.blocks.1.attn.value_mix.own_weight"].item() == 0.75 != kept.item()
    assert loaded["tower.blocks.2.attn.value_mix.first_weight"].item() == 0.25 != own.item()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())


@torch.no_grad()
def test_bf16_branches_under_an_fp32_stream() -> None:
    tower = moved(make_tower(dtype=torch.float32, value_residual="learned"))
    wide = tower(tokens())
    narrow = tower.bfloat16()(tokens())
    assert narrow.dtype == torch.bfloat16
    # bf16 has 8 bits: 4e-3 a rounding, some ten of them in a row.
    assert 1e-4 < relative_error(narrow.float(), wide) < 0.1


# ---- the books ------------------------------------------------------------------------------------------


@each_connection
@pytest.mark.parametrize("variant", ["learned", "shared"])
def test_the_ledger_balances(connection: str, variant: str) -> None:
    tower = moved(make_tower(connection=connection, norm=NormConfig(kind="layer"), **VARIANTS[variant]))
    found = tower_ledger(tower, tokens(positions=7))
    assert len([label for label in found.labels if label.endswith("_out")]) == 8
    assert found.error <= FP64


@pytest.mark.parametrize("variant", ["learned", "shared", "parallel"])
def test_data_flow_refuses_a_tower_without_a_state_between_blocks(variant: str) -> None:
    tower = make_tower(**VARIANTS[variant])
    with pytest.raises(StreamNotFoundError, match="no residual stream was found in Tower"):
        find_stream(tower, {"token_ids": tokens()})


# ---- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_residual": "mean"}, r"value_residual 'mean' is not known; choose one of none, fixed"),
        ({"value_residual_weights": (0.0, 1.0)}, r"have no effect with value_residual 'none'"),
        ({"value_residual": "shared", "value_residual_weights": (0.0, 1.0)}, r"no effect with .* 'shared'"),
        ({"value_residual": "fixed", "value_residual_weights": (1.0,)}, r"must be two numbers"),
        (
            {"value_residual": "fixed", "value_residual_start": 0},
            r"value_residual_start=0 must be at least 1",
        ),
        ({"value_residual_start": 2}, r"value_residual_start=2 has no effect"),
    ],
)
def test_what_cannot_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TowerConfig(**(SMALL | options))
