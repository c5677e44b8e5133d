"""The Hugging Face face: what transformers does with a tower equals what the tower does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from families import make_model
from policy_cases import CASES, make_tower
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, Trainer, TrainingArguments

from mainstem.connections import StreamModule, scheme_names
from mainstem.errors import ConfigError, SourceError
from mainstem.tower import Tower, TowerConfig
from mainstem.tower.hf import MainstemConfig, MainstemForCausalLM
from mainstem.tower.pretrained import tower_from_transformers

SMALL: dict[str, Any] = {"vocab_size": 50, "width": 32, "num_blocks": 3, "num_heads": 4, "num_kv_heads": 2}
each_connection = pytest.mark.parametrize("connection", scheme_names())
each_case = pytest.mark.parametrize("case", CASES)


def make_config(**options: Any) -> MainstemConfig:
    return MainstemConfig(TowerConfig(**(SMALL | options)), bos_token_id=None, eos_token_id=None)


def make_face(seed: int = 0, **options: Any) -> MainstemForCausalLM:
    torch.manual_seed(seed)
    return MainstemForCausalLM(make_config(**options)).eval()


def tokens(seed: int = 0, batch: int = 2, positions: int = 12) -> Tensor:
    return torch.randint(1, 50, (batch, positions), generator=torch.Generator().manual_seed(seed))


@each_connection
@torch.no_grad()
def test_a_fresh_face_is_a_fresh_tower(connection: str) -> None:
    face = make_face(connection=connection)
    torch.manual_seed(0)
    tower = Tower(TowerConfig(**SMALL, connection=connection)).eval()
    assert torch.equal(face(tokens()).logits, tower(tokens()))


@each_case
@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
@torch.no_grad()
def test_saved_and_loaded_is_the_same_to_the_bit(
    case: str, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Options, parameters, buffers, each in its dtype: under bf16 the stream's own stay fp32."""
    face = MainstemForCausalLM.from_tower(make_tower(dtype, **CASES[case], tied=tied))
    face.save_pretrained(tmp_path)
    assert ("tower.head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, MainstemConfig)
    assert config.tower_config() == face.tower.config
    assert config.tower_config().scheme() == face.tower.config.scheme()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(loaded, MainstemForCausalLM)
    state = loaded.tower.state_dict()
    assert list(state) == list(face.tower.state_dict())
    for name, value in face.tower.state_dict().items():
        assert state[name].dtype == value.dtype, name
        assert torch.equal(state[name], value), name
    modules = zip(loaded.tower.modules(), face.tower.modules(), strict=True)
    for mine, kept in ((a, b) for a, b in modules if isinstance(b, StreamModule)):
        assert isinstance(mine, StreamModule)
        assert (mine.stream_dtype, mine.branch_dtype) == (torch.float32, dtype)
        assert (kept.stream_dtype, kept.branch_dtype) == (torch.float32, dtype)
    assert torch.equal(loaded(tokens()).logits, face(tokens()).logits)
    assert (loaded.tower.head.weight is loaded.tower.token_embedding.weight) is tied


@torch.no_grad()
def test_what_a_checkpoint_lacks_is_drawn_and_the_rest_is_kept(tmp_path: Path) -> None:
    face = make_face(tied=False, num_blocks=8)
    for parameter in face.parameters():
        parameter.add_(torch.randn_like(parameter))
    face.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    missing = {"tower.blocks.1.mlp.down_proj.weight", "tower.blocks.1.connections.0.norm.weight"}
    kept = {name: weight for name, weight in weights.items() if name not in missing}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = dict(MainstemForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(loaded[name], weight) for name, weight in kept.items())
    assert torch.equal(loaded["tower.blocks.1.connections.0.norm.weight"], torch.ones(32))
    # 32 * 88 draws: their standard deviation is known to 1.3 %.
    drawn = loaded["tower.blocks.1.mlp.down_proj.weight"].std().item()
    assert drawn == pytest.approx(0.02 / 16**0.5, rel=0.07)


@each_connection
def test_a_checkpoint_without_a_buffer_is_refused(connection: str, tmp_path: Path) -> None:
    face = make_face(connection=connection)
    names = [name for name, _ in face.named_buffers() if ".2." in name or "trunk" in name]
    face.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in names:
        rest = {key: value for key, value in weights.items() if key != name}
        save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(SourceError, match=f"lacks '{name}'"):
            MainstemForCausalLM.from_pretrained(tmp_path)


@each_connection
@torch.no_grad()
def test_generate_is_greedy_decoding_with_or_without_cache(connection: str) -> None:
    face = make_face(connection=connection, sliding_window=5)
    expected = tokens()
    for _ in range(8):
        expected = torch.cat((expected, face.tower(expected)[:, -1:].argmax(-1)), dim=1)
    refused = "kv_cache" in face.tower.config.scheme().refuses
    for use_cache in (False,) if refused else (True, False):
        made = face.generate(tokens(), max_new_tokens=8, do_sample=False, use_cache=use_cache, pad_token_id=0)
        assert torch.equal(made, expected)


GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def refused(face: MainstemForCausalLM, feature: str) -> str | None:
    return face.tower.config.scheme().refuses.get(feature)


@each_case
@torch.no_grad()
def test_generate_with_padding_on_the_left(case: str) -> None:
    face = MainstemForCausalLM.from_tower(make_tower(**({"positions": "learned"} | CASES[case])))
    short, long = tokens(batch=1, positions=7), tokens(seed=1, batch=1, positions=12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    batch = torch.cat((nn.functional.pad(short, (5, 0)), long))
    if reason := refused(face, "left_padding"):
        with pytest.raises(ConfigError, match=re.escape(reason)):
            face.generate(batch, attention_mask=mask, use_cache=False, **GREEDY)
        return
    alone = [face.generate(text, use_cache=False, **GREEDY)[0] for text in (short, long)]
    for use_cache in (True, False):
        made = face.generate(batch, attention_mask=mask, use_cache=use_cache, **GREEDY)
        assert torch.equal(made[0, 5:], alone[0])
        assert torch.equal(made[1], alone[1])


@each_case
@torch.no_grad()
def test_beams_are_the_same_with_or_without_cache(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    face = MainstemForCausalLM.from_tower(make_tower(**CASES[case]))
    options = GREEDY | {"num_beams": 2, "output_scores": True, "return_dict_in_generate": True}
    expected = face.generate(tokens(), use_cache=False, **options)
    if reason := refused(face, "kv_cache"):
        with pytest.raises(ConfigError, match=re.escape(reason) + r" Pass .*use_cache=False"):
            face.generate(tokens(), use_cache=True, **options)
        return
    moved: list[bool] = []
    reorder = DynamicCache.reorder_cache

    def watch(self: DynamicCache, beams: Tensor) -> None:
        moved.append(not torch.equal(beams.cpu(), torch.arange(len(beams))))
        reorder(self, beams)

    monkeypatch.setattr(DynamicCache, "reorder_cache", watch)
    made = face.generate(tokens(), use_cache=True, **options)
    assert any(moved)  # beams have changed places, and their keys with them
    assert torch.equal(made.sequences, expected.sequences)
    torch.testing.assert_close(made.sequences_scores, expected.sequences_scores, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_a_dressed_pretrained_tower_generates_what_transformers_does() -> None:
    model = make_model("gemma3", torch.float64)
    face = MainstemForCausalLM.from_tower(tower_from_transformers(model))
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": 96,
    }
    assert torch.equal(face.generate(tokens(), **options), model.generate(tokens(), **options))


def test_from_tower_keeps_the_module() -> None:
    tower = Tower(TowerConfig(**SMALL)).eval()
    face = MainstemForCausalLM.from_tower(tower)
    assert face.tower is tower
    assert not face.training


@torch.no_grad()
def test_the_loss_is_the_mean_over_next_tokens_that_count() -> None:
    face = make_face()
    labels = tokens().clone()
    labels[0, :4] = -100
    logits = face.tower(tokens())[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
    # One fp32 mean over 19 tokens, taken in the same order.
    torch.testing.assert_close(face(tokens(), labels=labels).loss, expected, rtol=1e-6, atol=0)


@torch.no_grad()
def test_a_cache_can_be_carried_by_either_name() -> None:
    face = make_face().double()
    whole = face(tokens()).logits
    for name in ("cache", "past_key_values"):
        cache = DynamicCache()
        face(tokens()[:, :8], **{name: cache})
        rest = face(tokens()[:, 8:], **{name: cache}).logits
        # fp64, three blocks.
        torch.testing.assert_close(rest, whole[:, 8:], rtol=1e-12, atol=1e-12)


def enable_checkpointing(face: MainstemForCausalLM, kwargs: dict[str, Any] | None) -> None:
    # transformers 5.24 renamed the method.
    enable = getattr(face, "activation_checkpointing_enable", face.gradient_checkpointing_enable)
    enable(kwargs)


def is_checkpointing(face: MainstemForCausalLM) -> bool:
    """Ask by the name that this transformers knows; the old one warns."""
    new = "is_activation_checkpointing"
    return getattr(face, new if hasattr(type(face), new) else "is_gradient_checkpointing")


@pytest.mark.parametrize(
    ("kwargs", "mode"),
    [
        (None, "block"),
        ({"use_reentrant": False}, "block"),
        ({"mode": "selective"}, "selective"),
        ({"mode": "selective", "use_reentrant": False}, "selective"),
    ],
)
def test_gradient_checkpointing_is_the_towers_own(kwargs: dict[str, Any] | None, mode: str) -> None:
    face = make_face().train()
    gradients = []
    for enable in (False, True):
        if enable:
            enable_checkpointing(face, kwargs)
            assert is_checkpointing(face)
            assert {block.checkpointing for block in face.tower.blocks} == {mode}
        face.zero_grad()
        face(tokens(), labels=tokens()).loss.backward()
        gradients.append([p.grad.clone() for p in face.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    getattr(face, "activation_checkpointing_disable", face.gradient_checkpointing_disable)()
    assert not is_checkpointing(face)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"use_reentrant": True}, r"checkpoints with use_reentrant=False"),
        ({"mode": "all"}, r"'all' is not known; choose 'none', 'block' or 'selective'"),
        ({"determinism_check": "none"}, r"has no argument determinism_check; it takes mode"),
    ],
)
def test_wrong_gradient_checkpointing_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        enable_checkpointing(make_face(), kwargs)


def test_offloaded_checkpoints_are_refused_and_every_so_many_blocks_served() -> None:
    face = make_face(num_blocks=4)
    enable = getattr(face, "activation_checkpointing_enable", None)
    if enable is None:  # before transformers 5.24 it did neither
        return
    enable(every_n_layers=2)
    assert [block.checkpointing for block in face.tower.blocks] == ["block", "none"] * 2
    with pytest.raises(ConfigError, match=r"does not offload .*; leave out offload=True"):
        enable(offload=True)


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = tokens(seed=index, batch=1)[0]
        return {"input_ids": text, "labels": text}


# The Trainer asks the data loader to pin memory, of which a machine without an accelerator has no use.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
@each_connection
def test_the_trainer_takes_three_steps(connection: str, tmp_path: Path) -> None:
    face = make_face(connection=connection)
    before = [p.detach().clone() for p in face.parameters()]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=face, args=arguments, train_dataset=Texts())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    # A uniform guess over 50 tokens costs log(50) = 3.9; towers start near it.
    assert all(3.0 < loss < 5.0 for loss in losses)
    assert all(not torch.equal(a, b) for a, b in zip(before, face.parameters(), strict=True))


def test_what_a_tower_does_not_serve_is_refused() -> None:
    face = make_face()
    with pytest.raises(ConfigError, match="does not serve the argument inputs_embeds; leave it out"):
        face(tokens(), inputs_embeds=torch.ones(2, 12, 32))
    with pytest.raises(ConfigError, match="output_hidden_states"):
        face(tokens(), output_hidden_states=True)
    with pytest.raises(ConfigError, match="needs input_ids"):
        face()
    with pytest.raises(ConfigError, match="has no field depth"):
        MainstemConfig(tower=SMALL | {"depth": 3})
