"""Tiny real models and tokenizers, made on the fly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_sources import llama_config, train_tokenizer
from transformers import BertConfig, BertForMaskedLM, LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer(gpl_text: Path) -> PreTrainedTokenizerFast:
    return train_tokenizer(gpl_text.read_text("utf-8")[:8000])


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(llama_config())


@pytest.fixture
def llama_folder(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def bert_folder(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    folder = tmp_path / "bert"
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    BertForMaskedLM(config).save_pretrained(folder)
    return folder
