"""Checkpointing, compiling, caches and saved state: every connection serves them or says why not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from policy_cases import CASES, largest_error, make_tower, tokens, train_step
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mainstem.connections import PreNorm, scheme_names
from mainstem.connections._registry import SCHEMES
from mainstem.errors import ConfigError
from mainstem.tower import KVCache, compile_blocks, shard_tower

each_case = pytest.mark.parametrize("case", CASES)
each_connection = pytest.mark.parametrize("connection", scheme_names())
# fp64, three blocks deep: rounding only.
EXACT = 1e-12
DROPOUT = {"dropout": 0.1, "attn_dropout": 0.1}


# ---- activation checkpointing ----


@each_case
@pytest.mark.parametrize("parallel", [False, True])
def test_checkpointed_gradients_are_the_plain_ones(case: str, parallel: bool) -> None:
    tower = make_tower(**CASES[case], **DROPOUT, parallel=parallel)
    runs: list[int] = []
    tower.blocks[1].attn.out_proj.register_forward_hook(lambda *_: runs.append(1))
    expected = train_step(tower, tokens())
    assert len(runs) == 1
    for mode in ("block", "selective"):
        tower.checkpoint_activations(mode)
        assert largest_error(train_step(tower, tokens()), expected) <= EXACT
    assert len(runs) == 5  # twice a step


class Made(TorchDispatchMode):
    """Remembers, without holding it, all memory that is made for tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes_alive(self) -> int:
        return sum(size for reference, size in self.storages.values() if not reference.expired())


@each_connection
@pytest.mark.parametrize("parallel", [False, True])
def test_selective_keeps_less_than_none_and_more_than_block(connection: str, parallel: bool) -> None:
    """All memory alive after the forward pass, whoever holds it: autograd, or a checkpoint's cache."""
    options = {"connection": connection, "parallel": parallel, "num_blocks": 4, "width": 64}
    tower, text = make_tower(torch.float32, **options).train(), tokens(positions=64)
    kept = {}
    for mode in ("block", "selective", "none"):
        tower.checkpoint_activations(mode)
        with Made() as made:
            out = tower(text)
        kept[mode] = made.bytes_alive()
        del out
    assert 0 < kept["block"] < 0.6 * kept["none"]
    assert kept["block"] < kept["selective"] < 0.9 * kept["none"]


def test_every_second_block_is_checkpointed() -> None:
    tower = make_tower(num_blocks=4)
    assert not tower.gradient_checkpointing
    runs = [0] * 4

    def count(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            runs[index] += 1

        return hook

    for index, block in enumerate(tower.blocks):
        block.attn.out_proj.register_forward_hook(count(index))
    tower.checkpoint_activations("block", every=2)
    assert tower.gradient_checkpointing
    train_step(tower, tokens())
    assert runs == [2, 1, 2, 1]
    tower.eval()(tokens()).sum().backward()
    assert runs == [3, 2, 3, 2]  # only in training


def test_wrong_checkpointing_is_refused() -> None:
    tower = make_tower()
    with pytest.raises(ConfigError, match=r"'full' is not known; choose 'none', 'block' or 'selective'"):
        tower.checkpoint_activations("full")  # pyright: ignore
    with pytest.raises(ConfigError, match=r"every=0 must be at least 1"):
        tower.checkpoint_activations("block", every=0)
    tower.train().checkpoint_activations("selective")
    with pytest.raises(ConfigError, match=r"cannot be filled under gradient checkpointing; pass cache=None"):
        tower(tokens(), cache=KVCache())
    tower.eval()(tokens(), cache=KVCache())


# ---- torch.compile ----


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        yield
    torch._dynamo.reset()


def check_compiled(case: str, mode: str, backend: Any, **options: Any) -> None:
    """Train and eval: the eager numbers, by graphs without a break."""
    tower = make_tower(**CASES[case], **options)
    tower.checkpoint_activations(mode)  # pyright: ignore
    expected = train_step(tower, tokens())
    with torch.no_grad():
        read = tower.eval()(tokens(1))
    compile_blocks(tower, backend=backend)
    assert largest_error(train_step(tower, tokens()), expected) <= EXACT
    graphs = counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= len(tower.blocks)
    assert not counters["graph_break"]
    with torch.no_grad():
        assert largest_error([tower.eval()(tokens(1))], [read]) <= EXACT
    assert counters["stats"]["unique_graphs"] > graphs  # eval was compiled too


# One tensor and random numbers, several streams, a history that grows.
FEW = ["stochastic_depth", "hyper_connections", "attention_residuals-block_size=2"]
# Dynamo asks every input for its .grad and hides the warning itself, which "error" overrides.
dynamo_asks = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@dynamo_asks
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("case", FEW)
def test_compiled_and_checkpointed_is_eager(case: str) -> None:
    check_compiled(case, "selective", "aot_eager", **DROPOUT)


@dynamo_asks
@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_dynamo")
@each_case
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_compiled_is_eager_for_every_case(case: str, mode: str) -> None:
    check_compiled(case, mode, "aot_eager", **DROPOUT)


@dynamo_asks
@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("case", ["pre_norm", "hyper_connections"])
@pytest.mark.parametrize("mode", ["none", "block", "selective"])
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_inductor_is_eager(case: str, mode: str) -> None:
    check_compiled(case, mode, "inductor")


@dynamo_asks
@pytest.mark.usefixtures("_fresh_dynamo")
def test_what_exceeds_the_limit_of_graphs_raises_instead_of_running_eager() -> None:
    tower = make_tower(connection="dense_former", num_blocks=4)
    compile_blocks(tower, backend="eager")
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        pytest.raises(FailOnRecompileLimitHit),
    ):
        tower(tokens())


@dynamo_asks
@pytest.mark.usefixtures("_fresh_dynamo")
@torch.no_grad()
def test_a_history_of_ten_blocks_exceeds_no_limit() -> None:
    tower = make_tower(connection="dense_former", num_blocks=10)
    expected = tower(tokens())
    compile_blocks(tower, backend="eager")
    assert largest_error([tower(tokens())], [expected]) <= EXACT
    assert counters["stats"]["unique_graphs"] == 10  # Dynamo's own limit is 8


@dynamo_asks
@pytest.mark.usefixtures("_fresh_dynamo")
@torch.no_grad()
def test_a_compiled_tower_reads_with_a_cache_and_copies_uncompiled() -> None:
    tower = make_tower()
    names, whole = list(tower.state_dict()), tower(tokens())
    compile_blocks(tower, backend="eager")
    cache = KVCache()
    steps = [tower(tokens()[:, i : i + 1], cache=cache) for i in range(12)]
    assert largest_error([torch.cat(steps, 1)], [whole]) <= EXACT
    assert counters["stats"]["unique_graphs"] == 0
    assert list(tower.state_dict()) == names
    for twin in (copy.deepcopy(tower), pickle.loads(pickle.dumps(tower))):
        assert torch.equal(twin(tokens()), whole)
    assert counters["stats"]["unique_graphs"] == 0
    tower(tokens())
    assert counters["stats"]["unique_graphs"] == 1


# ---- what a scheme refuses ----


class Refusing(PreNorm):
    """Plain Pre-LN that says it cannot be combined with anything."""

    name: ClassVar[str] = "refusing"
    refuses: ClassVar[dict[str, str]] = {
        feature: f"no {feature} here."
        for feature in ("kv_cache", "activation_checkpointing", "compile", "fsdp", "parallel_block")
    }


def test_a_refused_feature_raises_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "refusing", Refusing)
    with pytest.raises(ConfigError, match=r"'refusing' cannot join parallel blocks: no parallel_block here"):
        make_tower(connection="refusing", parallel=True)
    tower = make_tower(connection="refusing")
    with pytest.raises(ConfigError, match=r"'refusing' cannot read token by token: no kv_cache here. Pass"):
        tower(tokens(), cache=KVCache())
    with pytest.raises(ConfigError, match=r"cannot be checkpointed: no activation_checkpointing here."):
        tower.checkpoint_activations("block")
    tower.checkpoint_activations("none")
    with pytest.raises(ConfigError, match=r"cannot be compiled: no compile here. Leave its blocks"):
        compile_blocks(tower)
    with pytest.raises(ConfigError, match=r"cannot be sharded: no fsdp here. Train it"):
        shard_tower(tower)
    assert tower(tokens()).isfinite().all()


# ---- caches ----


@each_case
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_read_token_by_token_is_read_at_once(case: str, padded: bool) -> None:
    """A stream, a history too, is of the tokens at hand: keys and values are all that a cache must hold."""
    windows = {"sliding_window": 4, "block_types": ("sliding", "full", "sliding")}
    tower = make_tower(**(windows | CASES[case]))
    text = tokens()
    if "kv_cache" in tower.config.scheme().refuses:
        with pytest.raises(ConfigError, match="cannot read token by token: its running means need"):
            tower(text, cache=KVCache())
        return
    mask = torch.ones_like(text)
    if padded:
        mask[0, :3] = 0
    whole, cache = tower(text, mask), KVCache()
    ends = [(0, 5), *((i, i + 1) for i in range(5, 12))]
    steps = torch.cat([tower(text[:, a:b], mask[:, :b], cache=cache) for a, b in ends], 1)
    assert largest_error([steps[mask.bool()]], [whole[mask.bool()]]) <= EXACT
    if padded:  # and padding is seen by no one
        assert largest_error([whole[:1, 3:]], [tower(text[:1, 3:])]) <= EXACT


# ---- state ----


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_state_dict_holds_all_state(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every parameter and buffer, in its own dtype, to the bit; one that is lacking is named."""
    tower = make_tower(dtype, **CASES[case])
    state = tower.state_dict()
    assert all(p.ndim for p in tower.parameters())  # FSDP2 shards no scalars
    assert {name for name, _ in tower.named_buffers()} <= set(state)  # none that is not saved
    save_file({k: v.clone() for k, v in state.items()}, tmp_path / "tower.safetensors")
    saved = load_file(tmp_path / "tower.safetensors")
    other = make_tower(dtype, **CASES[case])
    for value in (*other.parameters(), *other.buffers()):
        value.fill_(7)
    other.load_state_dict(saved)
    for name, value in state.items():
        assert other.state_dict()[name].dtype == value.dtype, name
        assert torch.equal(other.state_dict()[name], value), name
    assert torch.equal(other(tokens()), tower(tokens()))
    for name in [*dict(tower.trunk.named_parameters(prefix="trunk")), *dict(tower.named_buffers())]:
        with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
            other.load_state_dict({k: v for k, v in saved.items() if k != name})
