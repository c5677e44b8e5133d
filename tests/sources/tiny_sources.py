"""Makers of tiny real tokenizers, configurations and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>"]


def train_tokenizer(text: str, vocab_size: int = 384) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on ``text``."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def llama_config(**changes: Any) -> LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": 384,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**settings, **changes})


def write_gguf(path: Path, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> Path:
    """A two-block Llama GGUF with quantised (Q4_1) matrices, as the package's own writer makes it."""
    random = np.random.default_rng(seed)
    vocab, width, hidden, blocks = len(tokenizer), 64, 96, 2
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(blocks)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(width // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("gpt2")
    ids = tokenizer.get_vocab()
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types([3 if token in SPECIAL else 1 for token in sorted(ids, key=ids.__getitem__)])

    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = random.standard_normal((rows, columns)).astype(np.float32)
        packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)

    def vector(name: str) -> None:
        writer.add_tensor(name, random.standard_normal(width).astype(np.float32))

    matrix("token_embd.weight", vocab, width)
    for block in range(blocks):
        vector(f"blk.{block}.attn_norm.weight")
        vector(f"blk.{block}.ffn_norm.weight")
        matrix(f"blk.{block}.attn_q.weight", width, width)
        matrix(f"blk.{block}.attn_k.weight", width // 2, width)
        matrix(f"blk.{block}.attn_v.weight", width // 2, width)
        matrix(f"blk.{block}.attn_output.weight", width, width)
        matrix(f"blk.{block}.ffn_gate.weight", hidden, width)
        matrix(f"blk.{block}.ffn_up.weight", hidden, width)
        matrix(f"blk.{block}.ffn_down.weight", width, hidden)
    vector("output_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
