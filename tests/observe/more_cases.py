"""Wirings beyond the list that was asked for: held to their hidden states and to the books alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from small_models import VOCAB, WIDTH, Case, base, from_class, tokens

_GQA = {"num_key_value_heads": 2}


def _case(
    model: str,
    config: str,
    sizes: dict[str, Any],
    *,
    inputs: Callable[[], dict[str, Any]] = tokens,
    **facts: Any,
) -> Case:
    return Case(
        build=from_class(model, lambda: getattr(transformers, config)(**sizes)), inputs=inputs, **facts
    )


def _pair() -> dict[str, Any]:
    ids = tokens()["input_ids"]
    return {"input_ids": ids[:, :9], "decoder_input_ids": ids}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


_HYBRID = {"sublayers": ("mixer", "mlp"), "odd_blocks": {1: ("attn", "mlp"), 3: ("attn", "mlp")}}
_DECODER = {"sublayers": ("attn", "cross_attn", "mlp"), "hidden_states": "decoder_hidden_states"}
_VISION = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}

MORE: dict[str, Case] = {
    "t5_decoder": _case(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCAB, "d_model": WIDTH, "d_ff": 96, "d_kv": 16, "num_layers": 4, "num_heads": 4},
        inputs=_pair,
        source="decoder_input_ids",
        **_DECODER,
        note="relative positions",
    ),
    "bart_decoder": _case(
        "BartForConditionalGeneration",
        "BartConfig",
        {"vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": 4, "decoder_layers": 4, "pad_token_id": 0}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96}
        | {"decoder_ffn_dim": 96, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2},
        inputs=_pair,
        source="decoder_input_ids",
        then="norm",
        **_DECODER,
        note="Post-LN, three sublayers a block",
    ),
    "distilbert": _case(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": VOCAB, "dim": WIDTH, "n_layers": 4, "n_heads": 4, "hidden_dim": 96},
        then="norm",
        note="Post-LN",
    ),
    "electra": _case(
        "ElectraForMaskedLM",
        "ElectraConfig",
        base(embedding_size=32),
        then="norm",
        note="embedding projected",
    ),
    "deberta_v2": _case(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        base(relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"]),
        then="norm",
        note="disentangled attention",
    ),
    "mpnet": _case("MPNetForMaskedLM", "MPNetConfig", base(), then="norm", note="Post-LN"),
    "mamba2": _case(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 4, "state_size": 8, "num_heads": 8}
        | {"head_dim": 16, "n_groups": 1, "chunk_size": 16},
        sublayers=("mixer",),
        hidden_states=None,
        note="one write a block",
    ),
    "rwkv": _case(
        "RwkvForCausalLM",
        "RwkvConfig",
        {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 4, "attention_hidden_size": WIDTH}
        | {"intermediate_size": 96},
        inputs=lambda: tokens() | {"use_cache": False},
        hidden_states=None,
        note="recurrent; without its cache, which is one tensor for all blocks",
    ),
    "jamba": _case(
        "JambaForCausalLM",
        "JambaConfig",
        base(**_GQA, num_experts=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2)
        | {"expert_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4},
        **_HYBRID,
        note="attention in every other block",
    ),
    "lfm2": _case(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        base(**_GQA, layer_types=["conv", "full_attention"] * 2),
        **_HYBRID,
        note="short convolutions in every other block",
    ),
    "recurrent_gemma": _case(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        base(num_key_value_heads=1, lru_width=WIDTH, attention_window_size=8),
        sublayers=("mixer", "mlp"),
        odd_blocks={2: ("attn", "mlp")},
        note="linear recurrence in two blocks of three",
    ),
    "llama4": _case(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        base(**_GQA, intermediate_size_mlp=96, head_dim=16, num_local_experts=2, attention_chunk_size=8),
        note="rotary positions as complex numbers",
    ),
    "gpt_bigcode": _case(
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 4, "n_head": 4},
        note="one key and value head",
    ),
    "ctrl": _case(
        "CTRLLMHeadModel",
        "CTRLConfig",
        {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "dff": 96, "n_positions": 64},
        note="the embedding scaled in place",
    ),
    "dinov2": _case(
        "Dinov2Model", "Dinov2Config", _VISION, inputs=_pixels, note="a learned scale on every write"
    ),
    "clip_vision": _case(
        "CLIPVisionModel", "CLIPVisionConfig", _VISION | {"intermediate_size": 96}, inputs=_pixels
    ),
}
