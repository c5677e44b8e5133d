"""Small random models of six blocks, whose configurations speak of every block in their own ways."""

from __future__ import annotations

from typing import Any

import transformers
from small_models import base, shake

DEEP = {"num_hidden_layers": 6, "num_key_value_heads": 2}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"] * 2
GPT2 = {"vocab_size": 100, "n_embd": 64, "n_head": 4, "n_layer": 6, "bos_token_id": 1, "eos_token_id": 2}
BLOOM = {k: v for k, v in GPT2.items() if k != "n_embd"} | {"hidden_size": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# Name -> config class, its settings, and the settings a model without blocks 1 and 2 must have.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", base(**DEEP), {}),
    "gemma3_text": (
        "Gemma3TextConfig",
        base(**DEEP, head_dim=16, sliding_window=4, layer_types=WINDOWS),
        {"layer_types": [WINDOWS[i] for i in (0, 3, 4, 5)]},
    ),
    "qwen2": (
        "Qwen2Config",
        base(**DEEP, use_sliding_window=True, sliding_window=4, max_window_layers=3),
        {"layer_types": ["full_attention"] + ["sliding_attention"] * 3, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", base(**DEEP, head_dim=16), {"layer_types": ["full_attention"] * 4}),
    "olmo2": ("Olmo2Config", base(**DEEP), {}),
    "olmo3": (
        "Olmo3Config",
        base(**DEEP, sliding_window=4, layer_types=WINDOWS),
        {"layer_types": [WINDOWS[i] for i in (0, 3, 4, 5)]},
    ),
    "gpt2": ("GPT2Config", GPT2, {"n_layer": 4}),
    "gpt_neo": (
        "GPTNeoConfig",
        {"vocab_size": 100, "hidden_size": 64, "num_layers": 6, "num_heads": 4, "window_size": 4}
        | {"attention_types": [[["global", "local"], 3]], "bos_token_id": 1, "eos_token_id": 2},
        {"attention_layers": ["global", "local", "global", "local"], "num_layers": 4},
    ),
    "gpt_neox": ("GPTNeoXConfig", base(num_hidden_layers=6), {}),
    "mixtral": ("MixtralConfig", base(**DEEP, num_local_experts=4), {}),
    "smollm3": (
        "SmolLM3Config",
        base(**DEEP, no_rope_layers=[1, 0, 1, 1, 0, 1]),
        {"no_rope_layers": [1, 1, 0, 1]},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        base(**DEEP, **EXPERTS, shared_expert_intermediate_size=32, mlp_only_layers=[0, 2, 3]),
        {"mlp_only_layers": [0, 1]},
    ),
    "qwen3_moe_every_other": (
        "Qwen3MoeConfig",
        base(**DEEP, **EXPERTS, head_dim=16, decoder_sparse_step=2),
        {"mlp_only_layers": [0, 2], "decoder_sparse_step": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        base(num_hidden_layers=6, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16)
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4}
        | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"first_k_dense_replace": 3},
        {"first_k_dense_replace": 1},
    ),
    "phi3": ("Phi3Config", base(**DEEP), {}),
    "falcon": ("FalconConfig", base(num_hidden_layers=6), {}),
    "bloom": ("BloomConfig", BLOOM, {"n_layer": 4}),
    "granite": ("GraniteConfig", base(**DEEP, residual_multiplier=0.22), {}),
    "bart_decoder": (
        "BartConfig",
        {"vocab_size": 100, "d_model": 64, "decoder_ffn_dim": 96, "decoder_layers": 6, "encoder_layers": 6}
        | {"decoder_attention_heads": 4, "is_decoder": True, "is_encoder_decoder": False},
        {"decoder_layers": 4, "encoder_layers": 6},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        base(**DEEP, head_dim=16, global_head_dim=16, sliding_window=4, hidden_size_per_layer_input=8)
        | {"vocab_size_per_layer_input": 100, "num_kv_shared_layers": 0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3},
        {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "opt": ("OPTConfig", base(num_hidden_layers=6, ffn_dim=96, word_embed_proj_dim=64), {}),
    "gpt": ("OpenAIGPTConfig", GPT2, {"n_layer": 4}),
    "cohere": ("CohereConfig", base(**DEEP), {}),
}  # fmt: skip


def build(name: str) -> Any:
    config_class, settings, _ = FAMILIES[name]
    return shake(
        transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**settings))
    )
