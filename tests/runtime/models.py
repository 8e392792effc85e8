"""Artifacts of the real checkpoints, and the plain fp32 model that each must equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import checkpoints
from engines.run_dense import plain_folder
from w4pack.convert import convert
from w4pack.convert.errors import Refused

TOKENS = torch.tensor([list(b"She was a woman of mean understanding")])
# Roundings of one residual stream that reach a logit: about 16 a layer (norms, products, rotary, softmax,
# activation, sums) over two layers, each off by at most half a unit in the last place of a value that is no
# larger than the logits; random in sign, 32 of them add up to sqrt(32) < 6. Two more for the head.
ROUNDINGS = 8
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def source(name: str, place: Path) -> Path:
    """Lay out a checkpoint as its tool wrote it."""
    return checkpoints.lay_out(name, place / "source")


def artifact(name: str, place: Path) -> Path:
    """Convert a checkpoint, or skip where it cannot become an artifact."""
    out = place / "out"
    try:
        convert(source(name, place), out)
    except Refused as err:
        pytest.skip(f"cannot become an artifact: {err.what}")
    return out


def dense(folder: Path, place: Path) -> PreTrainedModel:
    """Return the fp32 model of a checkpoint, decoded by the tests' own reader."""
    plain = place / "plain"
    plain.mkdir()
    plain_folder(folder, plain)
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")


def logits(model: PreTrainedModel, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """Return (positions, vocabulary) logits."""
    with torch.no_grad():
        return model(tokens.to(model.device)).logits[0].cpu()


def tolerance(exact: torch.Tensor, dtype: torch.dtype) -> float:
    """Return what 16-bit arithmetic may move a logit by."""
    return ROUNDINGS * UNIT[dtype] * float(exact.abs().max())
