"""A cut model is the whole one without some blocks: beside one built by hand, and in every config list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from pruned_families import DEEP, FAMILIES, GPT2, WINDOWS, build
from small_models import base, shake, tokens
from torch import Tensor, nn

from mainstem.errors import ConfigError
from mainstem.surgery import Cut, cut
from mainstem.surgery._config import cut_config


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**tokens()).logits


def by_hand(model: Any, removed: tuple[int, ...], **settings: Any) -> Any:
    """A model of the shorter config, written out here, with the state dict's keys moved here."""
    config_class, given, _ = FAMILIES[settings.pop("family")]
    names = {"num_hidden_layers", "n_layer", "num_layers", "decoder_layers"} & set(given)
    merged = {**given, **dict.fromkeys(names, 6 - len(removed)), **settings}
    if config_class == "GPTNeoConfig":
        merged.pop("attention_layers")
        merged["attention_types"] = [[["global", "local"], 2]]
    short = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**merged))
    kept = [block for block in range(6) if block not in removed]
    state: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        parts = key.split(".")
        place = next((n for n, part in enumerate(parts) if part.isdigit()), None)
        if place is not None and parts[place - 1] in ("layers", "h"):
            if int(parts[place]) in removed:
                continue
            parts[place] = str(kept.index(int(parts[place])))
        elif "per_layer" in key and "norm" not in key:  # a share a block, side by side
            dim = value.shape.index(6 * 8)
            value = torch.cat([value.narrow(dim, 8 * block, 8) for block in kept], dim)
        state[".".join(parts)] = value
    short.load_state_dict(state)
    return short.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_model_is_the_one_built_without_the_blocks(name: str) -> None:
    model = build(name)
    before, weights = logits(model), {k: v.clone() for k, v in model.state_dict().items()}
    settings = model.config.to_dict()
    short = cut(model, Cut(blocks=(1, 2)))
    wanted = FAMILIES[name][2]
    said = short.config.to_dict()
    assert {key: said[key] for key in wanted} == wanted
    assert 4 in {getattr(short.config, key, None) for key in ("num_hidden_layers", "decoder_layers")}
    assert type(short) is type(model)
    reference = by_hand(model, (1, 2), family=name, **wanted)
    assert torch.equal(logits(short), logits(reference))
    assert list(short.state_dict()) == list(reference.state_dict())
    assert not torch.equal(logits(short), before)
    # Numbers that blocks keep of themselves are those of the shorter model.
    numbers = [m.layer_idx for m in short.modules() if isinstance(getattr(m, "layer_idx", None), int)]
    assert set(numbers) <= {0, 1, 2, 3}
    # The given model is as it was.
    assert model.config.to_dict() == settings
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert torch.equal(logits(model), before)


def test_the_text_model_of_a_model_that_sees_is_cut() -> None:
    """Its configuration is nested, and its vision tower happens to be as deep."""
    text = base(**DEEP, head_dim=16, sliding_window=4, layer_types=WINDOWS)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        boi_token_index=90,
        eoi_token_index=91,
        image_token_index=92,
    )
    model = shake(transformers.Gemma3ForConditionalGeneration(config))
    short: Any = cut(model, Cut(blocks=(1, 2)))
    assert short.config.text_config.num_hidden_layers == 4
    assert short.config.text_config.layer_types == [WINDOWS[i] for i in (0, 3, 4, 5)]
    assert len(short.model.vision_tower.encoder.layers) == 6
    assert len(model.model.language_model.layers) == 6
    blocks = model.model.language_model.layers
    for place, block in enumerate((0, 3, 4, 5)):
        kept = short.model.language_model.layers[place].state_dict()
        assert all(torch.equal(kept[name], value) for name, value in blocks[block].state_dict().items())


def test_a_table_by_block_numbers_is_renumbered() -> None:
    config = transformers.LlamaConfig(**base(num_hidden_layers=6))
    config.per_layer_table = {0: "a", 2: "b", 5: "c"}
    config.layer_names_by_place = {"1": "x", "3": "y"}
    config.some_layers_idx = [0, 1, 4]
    config.seven_layer_numbers = list(range(7))
    short = cut_config(config, (1, 2))
    assert short.per_layer_table == {0: "a", 3: "c"}
    assert short.layer_names_by_place == {"1": "y"}
    assert short.some_layers_idx == [0, 2]
    assert short.seven_layer_numbers == [0, 3, 4, 5, 6]
    assert (short.num_hidden_layers, config.num_hidden_layers) == (4, 6)


def test_weights_are_shared_and_tied_ones_stay_tied() -> None:
    model = shake(transformers.LlamaForCausalLM(transformers.LlamaConfig(**base(tie_word_embeddings=True))))
    short: Any = cut(model, Cut(blocks=(0,)))
    assert short.lm_head.weight is short.model.embed_tokens.weight
    mine, given = short.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight
    assert mine.data_ptr() == given.data_ptr()


def test_ranges_are_half_open_and_count_from_zero() -> None:
    assert Cut(blocks=(1, 2)).ranges(6) == ((0, 1), (3, 6))
    assert Cut(blocks=(0, 5)).ranges(6) == ((1, 5),)
    assert Cut().ranges(3) == ((0, 3),)
    assert Cut(blocks=(2, 1, 2)).kept(4) == (0, 3)


@pytest.mark.parametrize(
    "name",
    ["llama", "gpt2", "gpt_neox", "olmo2", "gemma3_text", "bloom", "falcon", "mixtral", "qwen2_moe", "opt"],
)
@pytest.mark.parametrize("kind", ["attention", "feed_forward"])
def test_a_removed_sublayer_writes_exactly_zero(name: str, kind: str) -> None:
    """Beside a model of whose sublayer's output every number is made zero on its way."""
    model = build(name)
    silent: Any = cut(model, Cut(**{kind: (1,)}))
    block = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 6)[1]
    parts = {
        "attention": ("self_attn", "attn", "attention", "self_attention"),
        "feed_forward": ("mlp", "fc2"),
    }[kind]
    part = next(child for label, child in block.named_children() if label in parts)

    def zeroed(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if name == "bloom":  # the residual is added inside
            residual = args[1]
            return (residual, *output[1:]) if isinstance(output, tuple) else residual
        if isinstance(output, tuple):
            return (torch.zeros_like(output[0]), *output[1:])
        return torch.zeros_like(output)

    with_block = part.register_forward_hook(zeroed)
    expected = logits(model)
    with_block.remove()
    assert torch.equal(logits(silent), expected)
    assert sum(p.numel() for p in silent.parameters()) == sum(p.numel() for p in model.parameters())
    assert not torch.equal(logits(model), expected)


def whole(model_class: str, config_class: str, **settings: Any) -> Any:
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).eval()


T5 = {"vocab_size": 50, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2}
INVERSE = {**GPT2, "scale_attn_by_inverse_layer_idx": True}
REFUSED: dict[str, tuple[Any, Cut, str]] = {
    "shared": (
        lambda: whole("AlbertForMaskedLM", "AlbertConfig", **base(embedding_size=32)),
        Cut((1,)),
        "shared over depth",
    ),
    "not there": (lambda: build("llama"), Cut((6,)), "no block 6: the model has 6, 0 to 5"),
    "all": (lambda: build("llama"), Cut(tuple(range(6))), "leave at least one"),
    "other": (lambda: nn.Linear(2, 2), Cut((0,)), "no model of transformers"),
    "converted": (
        lambda: build("llama").to(torch.bfloat16),
        Cut((1,)),
        r"rotary_emb\.inv_freq \(torch\.bfloat16\).*instead of converting it",
    ),
    "norm after": (
        lambda: whole("BertForMaskedLM", "BertConfig", **base()),
        Cut((), (1,)),
        "something after it writes too",
    ),
    "number matters": (
        lambda: whole("GPT2LMHeadModel", "GPT2Config", **INVERSE),
        Cut((1,)),
        "work depends on its number|would change in",
    ),
    "two stacks": (
        lambda: whole("T5ForConditionalGeneration", "T5Config", **T5),
        Cut((0,)),
        "an encoder and a decoder",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_with_the_reason(name: str) -> None:
    make, what, says = REFUSED[name]
    with pytest.raises(ConfigError, match=says):
        cut(make(), what)


def test_a_cut_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="block 1 is removed whole"):
        Cut(blocks=(1,), attention=(1,))
    with pytest.raises(ConfigError, match="0-based"):
        Cut(blocks=(-1,))
