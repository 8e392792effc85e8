"""Tiny 16-bit models with a byte tokenizer, as transformers saves them, and text to calibrate with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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
WORDS = [f"{a}{b}" for a in ("fo", "wi", "ja", "que") for b in ("x", "zard", "mes", "ll", "st")]


def llama(**changes: Any) -> tf.PreTrainedModel:
    """Return a random Llama with gains and biases that are not 1 and 0."""
    return randomised(tf.LlamaForCausalLM(tf.LlamaConfig(**{**SIZES, **changes})))


def mixtral(experts: int = 4, **changes: Any) -> tf.PreTrainedModel:
    """Return a random Mixtral."""
    sizes = {**SIZES, "num_local_experts": experts, "num_experts_per_tok": 2, **changes}
    return randomised(tf.MixtralForCausalLM(tf.MixtralConfig(**sizes)))


def randomised(model: tf.PreTrainedModel, seed: int = 0) -> tf.PreTrainedModel:
    """Draw every parameter, so that predictions differ from token to token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def save(model: tf.PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float16) -> Path:
    """Save a model in 16 bit, with the tokenizer."""
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def text(path: Path, words: int = 600, seed: int = 0) -> Path:
    """Write a text of random words."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS), (words,), generator=generator).tolist()
    path.write_text(" ".join(WORDS[i] for i in picks))
    return path
