"""Random 16-bit models of transformers with a byte tokenizer, as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


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
