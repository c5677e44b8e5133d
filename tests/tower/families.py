"""Random tiny models of transformers, every family a tower can hold, nothing left at its initial value."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}

# name: (model class, config class, options beyond SIZES)
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "llama_biases_tied": (
        LlamaForCausalLM,
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 20},
    ),
    "llama_llama3_rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama_linear_rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR, "hidden_act": "gelu"}),
    "mistral_sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": 6}),
    "mistral_full": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2_sliding": (Qwen2ForCausalLM, Qwen2Config, SLIDING | {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "attention_bias": True}),
    "qwen3_sliding": (Qwen3ForCausalLM, Qwen3Config, SLIDING | {"head_dim": 16}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {}),
    "gpt2_inner": (GPT2LMHeadModel, GPT2Config, {"n_inner": 70, "activation_function": "relu"}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        # caps of the size of the scores and logits, so that they bend them
        {
            "head_dim": 16,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "head_dim": 16,
            "sliding_window": 5,
            "layer_types": MIXED,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
            },
        },
    ),
}


class AllInFloat64(TorchFunctionMode):
    """Turns every cast to fp32 into one to fp64.

    transformers computes norms, rotary angles and softmax in fp32 whatever the model's dtype, which is no
    reference for fp64: under this mode its fp64 models are fp64 throughout.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*(torch.float64 if a is torch.float32 else a for a in args), **kwargs)


def make_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model in eval mode whose every parameter, norms and biases included, is random."""
    model_class, config_class, options = FAMILIES[name]
    sizes = SIZES
    if config_class is GPT2Config:
        drop = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        sizes = {
            k: v for k, v in SIZES.items() if k not in (*drop, "num_key_value_heads", "intermediate_size")
        }
        sizes |= {"n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 256}
    config = config_class(**(sizes | options))
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if dtype == torch.float64:
            with AllInFloat64():
                model = model_class(config)
        else:
            model = model_class(config)
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, dtype=torch.float64)
            scale = 0.3 if parameter.ndim < 2 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.add_((scale * noise).to(dtype))
    return model.eval()
