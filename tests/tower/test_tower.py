"""The tower itself: any connection, any depth, one graph, masks, caches, initial values."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree as pytree

from mainstem.connections import Connection, NormConfig, make_scheme, parameter_groups, scheme_names
from mainstem.errors import ConfigError
from mainstem.tower import KVCache, RopeConfig, Tower, TowerConfig, compile_blocks

SMALL: dict[str, Any] = {"vocab_size": 50, "width": 32, "num_blocks": 3, "num_heads": 4, "num_kv_heads": 2}

# Every part at least once, beyond the families that test_pretrained.py compares with transformers.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "parallel": {"parallel": True, "tied": False, "head_bias": True},
    "no_positions": {"positions": "none", "norm": NormConfig(kind="layer", bias=False)},
    "learned": {"positions": "learned", "gated": False, "activation": "gelu", "qkv_bias": True},
    "softcaps": {"attn_softcap": 2.0, "final_softcap": 3.0, "embed_scale": 5.0},
    "sliding": {
        "sliding_window": 4,
        "block_types": ("sliding", "full", "sliding"),
        "local_rope": RopeConfig(theta=9.0),
    },
    "qk_norm": {"qk_norm": "full", "attn_scale": 0.1},
    "gemma_norm": {"norm": NormConfig(unit_offset=True), "qk_norm": "head"},
}
each_connection = pytest.mark.parametrize("connection", scheme_names())
each_variant = pytest.mark.parametrize("variant", VARIANTS)

# fp64 rounds at 1.1e-16 and the towers here are three blocks deep.
FP64 = 1e-12


def make_tower(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Tower:
    torch.manual_seed(seed)
    return Tower(TowerConfig(**(SMALL | options))).to(dtype).eval()


def tokens(seed: int = 0, batch: int = 2, positions: int = 12) -> Tensor:
    return torch.randint(0, 50, (batch, positions), generator=torch.Generator().manual_seed(seed))


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@each_connection
@each_variant
@torch.no_grad()
def test_no_position_sees_a_later_one_and_no_text_another(connection: str, variant: str) -> None:
    tower = make_tower(connection=connection, **VARIANTS[variant])
    text = tokens()
    later = text.clone()
    later[:, -1] = (later[:, -1] + 1) % 50
    other = text.clone()
    other[1] = (other[1] + 1) % 50
    before = tower(text)
    assert torch.equal(before[:, :-1], tower(later)[:, :-1])
    assert not torch.equal(before[:, -1], tower(later)[:, -1])
    assert torch.equal(before[0], tower(other)[0])
    assert not torch.equal(before[1], tower(other)[1])


@each_connection
@each_variant
def test_every_parameter_gets_a_gradient_and_a_group(connection: str, variant: str) -> None:
    tower = make_tower(connection=connection, **VARIANTS[variant])
    text = tokens()
    still = {name for name, _ in tower.named_parameters()}
    for _ in range(2):  # where one factor starts at zero, the other one learns a step later
        tower.zero_grad()
        nn.functional.cross_entropy(tower(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten()).backward()
        for name, parameter in tower.named_parameters():
            assert parameter.grad is not None, name
            if parameter.grad.abs().max() > 0:
                still.discard(name)
            parameter.data -= 1e-2 * parameter.grad
    # A key's bias adds the same to every score of a query without rotation; softmax takes it out.
    assert not {name for name in still if not (variant == "learned" and name.endswith("k_proj.bias"))}
    grouped = [id(p) for group in parameter_groups(tower) for p in group.parameters]
    assert sorted(grouped) == sorted(id(p) for p in tower.parameters())
    norms = {
        id(p) for m in tower.modules() if isinstance(m, Connection) for p in m.parameters() if p.ndim < 2
    }
    decayed = {id(p) for group in parameter_groups(tower) if group.weight_decay for p in group.parameters}
    assert norms
    assert not norms & decayed


def check_cached_equals_uncached(tower: Tower) -> None:
    text = tokens(positions=14)
    mask = torch.ones_like(text)
    mask[0, :5] = 0
    mask[1, 9:] = 0
    whole = tower(text, attention_mask=mask)
    cache = KVCache()
    parts = [
        tower(text[:, start:stop], attention_mask=mask[:, :stop], cache=cache)
        for start, stop in ((0, 7), (7, 8), (8, 14))
    ]
    assert relative_error(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()]) <= FP64
    alone = tower(text[:1, 5:])
    assert relative_error(whole[0, 5:], alone[0]) <= FP64
    alone = tower(text[1:, :9])
    assert relative_error(whole[1, :9], alone[0]) <= FP64


@each_variant
@torch.no_grad()
def test_cached_equals_uncached_with_padding_on_either_side(variant: str) -> None:
    check_cached_equals_uncached(make_tower(**VARIANTS[variant]))


@torch.no_grad()
def test_a_sliding_window_is_that_wide() -> None:
    tower = make_tower(num_blocks=1, sliding_window=4)
    text = tokens(positions=10)
    for changed in range(10):
        other = text.clone()
        other[:, changed] = (other[:, changed] + 1) % 50
        moved = (tower(text) != tower(other)).any(-1).all(0)
        assert moved.tolist() == [changed <= i < changed + 4 for i in range(10)]


@each_connection
@each_variant
@torch.no_grad()
def test_sublayers_are_the_whole_forward(connection: str, variant: str) -> None:
    """What the branches return is all that is written: replaying reads and writes gives the same logits."""
    tower = make_tower(connection=connection, **VARIANTS[variant])
    text, outputs = tokens(), {}
    hooks = [
        module.register_forward_hook(lambda m, _, out: outputs.__setitem__(m, out))
        for _, _, branches in tower.sublayers()
        for module in branches.values()
    ]
    logits = tower(text)
    for hook in hooks:
        hook.remove()
    stream = tower.trunk.expand(tower.embed(text, torch.arange(12)[None]))
    indices = []
    for index, join, branches in tower.sublayers():
        _, context = join.read(stream)
        stream = join.write(stream, sum(outputs[m] for m in branches.values()), context)
        indices.append((index, *branches))
    parallel = tower.config.parallel
    expected = [[(i, "attn", "mlp")] if parallel else [(i, "attn"), (i, "mlp")] for i in range(3)]
    assert indices == [entry for block in expected for entry in block]
    out = tower.head(tower.trunk.final_norm(tower.trunk.collapse(stream)))
    cap = tower.config.final_softcap
    assert torch.equal(out if cap is None else cap * torch.tanh(out / cap), logits)


def shapes_of(tensors: Any) -> tuple[torch.Size, ...]:
    return tuple(t.shape for t in pytree.tree_leaves(tensors))


# Dynamo asks every input for its .grad and hides the warning itself, which "error" overrides.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@each_connection
@pytest.mark.parametrize("parallel", [False, True])
def test_one_graph_serves_24_blocks(connection: str, parallel: bool) -> None:
    torch._dynamo.reset()
    grows = make_scheme(connection).properties.has_history  # a graph for each length: 8 blocks of them
    num_blocks = 8 if grows else 24
    options = {"num_blocks": num_blocks, "connection": connection, "parallel": parallel, "sliding_window": 4}
    types = ("sliding", "full") * (num_blocks // 2)
    tower = make_tower(dtype=torch.float32, block_types=types, **options).train()
    padded = torch.ones_like(tokens())
    padded[0, -3:] = 0
    if "left_padding" not in tower.config.scheme().refuses:
        padded = padded.flip(1)
    shapes: set[tuple[torch.Size, ...]] = set()
    hooks = [
        block.register_forward_pre_hook(lambda m, args: shapes.add(shapes_of((args[0], *m.parameters()))))
        for block in tower.blocks
    ]
    torch.manual_seed(3)
    expected = tower(tokens(), padded)
    for hook in hooks:
        hook.remove()
    counter = CompileCounter()
    torch.manual_seed(3)
    with torch._dynamo.config.patch(recompile_limit=8):  # to have it back afterwards
        compile_blocks(tower, backend=counter)
        assert torch.equal(tower(tokens(), padded), expected)
    # One graph for all; a history that grows has one for each of its shapes, a scheme of two parts two.
    kinds = len({str(block.connections) for block in tower.blocks})
    assert 1 <= counter.frame_count <= len(shapes) * kinds
    assert len(shapes) == 1 or grows


@each_connection
def test_96_blocks_are_finite(connection: str) -> None:
    tower = make_tower(dtype=torch.float32, num_blocks=96, connection=connection)
    logits = tower(tokens())
    logits.square().mean().backward()
    assert logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in tower.parameters())


def std(tower: Tower, name: str) -> float:
    return torch.cat([b.get_submodule(name).weight.flatten() for b in tower.blocks]).std().item()


@pytest.mark.parametrize(
    ("connection", "value", "output"),
    [("pre_norm", 1.0, 16**-0.5), ("post_norm", 1.0, 1.0), ("deep_norm", 64**-0.25, 64**-0.25)],
)
def test_initial_values(connection: str, value: float, output: float) -> None:
    tower = make_tower(num_blocks=8, width=64, connection=connection)
    # 8 * 64 * 32 draws: the standard deviation is known to 1/sqrt(2 * 16384) = 0.6 %; 3 % is five times that.
    for name, scale in (
        ("attn.q_proj", 1.0),
        ("attn.v_proj", value),
        ("attn.out_proj", output),
        ("mlp.up_proj", value),
        ("mlp.down_proj", output),
    ):
        assert std(tower, name) == pytest.approx(0.02 * scale, rel=0.03)


def test_tied_and_untied_heads() -> None:
    tied, untied = make_tower(tied=True), make_tower(tied=False)
    assert tied.head.weight is tied.token_embedding.weight
    assert untied.head.weight is not untied.token_embedding.weight
    difference = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert difference == 50 * 32


@torch.no_grad()
def test_keep_last_and_given_positions() -> None:
    tower = make_tower(positions="learned")
    text = tokens()
    # A matrix product of 3 rows may add in another order than one of 12.
    assert relative_error(tower(text, keep_last=3), tower(text)[:, -3:]) <= FP64
    positions = torch.arange(12)[None]
    assert torch.equal(tower(text, positions=positions), tower(text))
    assert not torch.equal(tower(text, positions=positions + 1), tower(text))


@each_variant
def test_a_config_survives_json(variant: str) -> None:
    config = TowerConfig(**(SMALL | VARIANTS[variant]))
    assert TowerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.width = 1  # pyright: ignore


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, r"width=0 must be at least 1"),
        ({"width": 30}, r"width 30 is not a multiple of num_heads 4; give head_dim"),
        ({"num_kv_heads": 3}, r"num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, r"head_dim 7 is odd"),
        ({"head_dim": -1}, r"head_dim=-1 must be at least 1, or 0"),
        ({"connection": "hyper"}, r"no connection is called 'hyper'"),
        ({"connection_options": {"n": 4}}, r"'pre_norm' has no option n"),
        ({"positions": "alibi"}, r"positions 'alibi' is not known; choose one of rope, learned, none"),
        ({"activation": "swish"}, r"activation 'swish' is not known"),
        ({"qk_norm": "half"}, r"qk_norm 'half' is not known"),
        ({"block_types": ("full",)}, r"block_types has 1 entries for 3 blocks"),
        ({"block_types": ("full", "full", "local")}, r"block type 'local' is not known"),
        ({"block_types": ("sliding",) * 3}, r"need a sliding_window of at least 1; given None"),
        ({"sliding_window": 4, "block_types": ("full",) * 3}, r"no block is sliding"),
        ({"local_rope": RopeConfig()}, r"local_rope is for sliding blocks"),
        ({"attn_softcap": 0.0}, r"attn_softcap=0.0 must be greater than 0, or None"),
        ({"dropout": 1.0}, r"dropout=1.0 must be at least 0 and less than 1"),
        ({"attn_scale": -1.0}, r"attn_scale=-1.0 must be greater than 0"),
    ],
)
def test_what_cannot_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TowerConfig(**(SMALL | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta": 0.0}, r"theta 0.0 must be greater than 0"),
        ({"scaling": "yarn"}, r"'yarn' is not known; choose 'none', 'linear' or 'llama3'"),
        ({"factor": 2.0}, r"no effect with scaling 'none'"),
        ({"scaling": "linear", "factor": 0.0}, r"factor 0.0 must be greater"),
        ({"scaling": "llama3", "low_freq_factor": 4.0}, r"0 < low_freq_factor < high_freq_factor"),
    ],
)
def test_wrong_rope_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeConfig(**options)


def test_wrong_calls_and_fields_are_refused() -> None:
    tower = make_tower(positions="learned", max_positions=8)
    with pytest.raises(ConfigError, match=r"12 tokens, but the learned table has 8 positions"):
        tower(tokens())
    with pytest.raises(ConfigError, match=r"attention_mask has shape \(2, 5\); expected \(2, 12\)"):
        make_tower()(tokens(), attention_mask=torch.ones(2, 5))
    with pytest.raises(ConfigError, match=r"has no field depth; remove it"):
        TowerConfig.from_dict(SMALL | {"depth": 3})
    with pytest.raises(ConfigError, match=r"could not be read: .*missing .*'vocab_size'"):
        TowerConfig.from_dict({"width": 8, "num_blocks": 1, "num_heads": 1})


def test_the_tower_imports_no_extra() -> None:
    code = "import sys, mainstem.tower; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
