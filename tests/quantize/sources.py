"""Tiny 16-bit models with a byte tokenizer, as transformers saves them, and text to calibrate with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

from random_models import randomised, save, write_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
__all__ = ["llama", "mixtral", "randomised", "save", "text", "write_tokenizer"]
WORDS = [f"{a}{b}" for a in ("fo", "wi", "ja", "que") for b in ("x", "zard", "mes", "ll", "st")]


def llama(**changes: Any) -> tf.PreTrainedModel:
    """Return a random Llama with gains and biases that are not 1 and 0."""
    return randomised(tf.LlamaForCausalLM(tf.LlamaConfig(**{**SIZES, **changes})))


def mixtral(experts: int = 4, **changes: Any) -> tf.PreTrainedModel:
    """Return a random Mixtral."""
    sizes = {**SIZES, "num_local_experts": experts, "num_experts_per_tok": 2, **changes}
    return randomised(tf.MixtralForCausalLM(tf.MixtralConfig(**sizes)))


def text(path: Path, words: int = 600, seed: int = 0) -> Path:
    """Write a text of random words."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS), (words,), generator=generator).tolist()
    path.write_text(" ".join(WORDS[i] for i in picks))
    return path
