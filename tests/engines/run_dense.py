"""The yardstick: the checkpoint decoded by the tests' own slow decoder, as a plain fp32 model.

No product code takes part: `oracle.decode_folder` reads the tensors, every weight is rounded once to the
dtype of its scales, and stock transformers runs the result.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import oracle

torch.set_num_threads(1)

EXPERT = re.compile(r"(.*\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
ROUTER = re.compile(r"(.*\.)(?:mlp|block_sparse_moe)\.gate\.weight")
MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
QWEN = {short: long for long, short in MIXTRAL.items()}


def class_name(name: str, mixtral: bool) -> str:
    """Spell an expert's or router's name as the model class reads it."""
    parent, names = ("block_sparse_moe", MIXTRAL) if mixtral else ("mlp", QWEN)
    if (found := EXPERT.fullmatch(name)) is not None:
        leaf = found[3]
        return f"{found[1]}{parent}.experts.{found[2]}.{names.get(leaf, leaf)}"
    if (found := ROUTER.fullmatch(name)) is not None:
        return f"{found[1]}{parent}.gate.weight"
    return name


def dense_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return every tensor of the model in float32."""
    tensors, linears = oracle.read_folder(folder), oracle.decode_folder(folder)
    mixtral = oracle.read_config(folder)["model_type"] == "mixtral"
    out: dict[str, np.ndarray] = {}
    for name, linear in linears.items():
        weight = oracle.widen(linear.weight(), linear.tag).astype(np.float32)
        out[class_name(name, mixtral) + ".weight"] = weight
    packed = tuple(name + "." for name in linears)
    for name, one in tensors.items():
        if one.tag in ("F16", "BF16", "F32") and (not name.startswith(packed) or name.endswith(".bias")):
            out[class_name(name, mixtral)] = oracle.widen(one.array(), one.tag).astype(np.float32)
    return out


def plain_folder(source: Path, place: Path) -> None:
    """Write the decoded model as an ordinary fp32 checkpoint."""
    config = oracle.read_config(source)
    for key in ("quantization_config", "torch_dtype"):
        config.pop(key, None)
    config["dtype"] = "float32"
    (place / "config.json").write_text(json.dumps(config))
    save_file(dense_tensors(source), place / "model.safetensors", metadata={"format": "pt"})


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Decode and score. Biases that are all zero may be unknown to the class."""
    with tempfile.TemporaryDirectory() as place:
        plain_folder(Path(case["folder"]), Path(place))
        model, info = AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        unknown = [k for k in info["unexpected_keys"] if not k.endswith(".bias")]
        if info["missing_keys"] or unknown:
            raise ValueError(f"the yardstick is incomplete: {sorted(info['missing_keys'])} {sorted(unknown)}")
        result: dict[str, Any] = {
            "logprobs": scores(model, case["tokens"]),
            "ties": ties(model, case["tokens"]),
        }
        for half in ("float16", "bfloat16"):  # what 16-bit arithmetic alone moves
            result[half] = scores(copy.deepcopy(model).to(getattr(torch, half)), case["tokens"])
    return result


TIE = 0.01  # of a router's logits: a few roundings of 16 bit decide which expert a token goes to


def ties(model: torch.nn.Module, tokens: list[int]) -> list[int]:
    """Return the positions at which a router of any layer hardly prefers the last chosen expert to the next:
    16-bit arithmetic may choose the other, and is then far away without being wrong.
    """
    if not hasattr(model.config, "num_experts_per_tok"):
        return []
    with torch.no_grad():
        routers = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    count = model.config.num_experts_per_tok
    best = [r.reshape(len(tokens), -1).topk(count + 1).values for r in routers]
    close = torch.stack([b[:, count - 1] - b[:, count] < TIE for b in best]).any(0)
    return torch.nonzero(close[:-1]).flatten().tolist()


def scores(model: torch.nn.Module, tokens: list[int]) -> list[list[float]]:
    """Return the log-probabilities of the whole vocabulary after each token but the last."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).tolist()
