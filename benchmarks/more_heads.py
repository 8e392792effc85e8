"""Writes a Llama with one more KV head and its query heads, which computes what the source computes.

    python benchmarks/more_heads.py SRC OUT

The first KV head and its group of query heads stand there twice; the columns of ``o_proj`` of both are half
of the source's (exact: a power of two). Attention's output has the same outliers in more heads, so a
model whose number of heads has no Hadamard matrix (SmolLM2-135M: 9 on 3) becomes one whose number has (12 on
4), and both can be compared: only the transform across heads differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROWS = ("q_proj", "k_proj", "v_proj")  # of weights and biases, that belong to heads


def widened(name: str, value: torch.Tensor, first: dict[str, int]) -> torch.Tensor:
    """Return a tensor of the model with more heads; ``first``: rows of the first KV head, by module."""
    module = name.split(".")[-2]
    if module in ROWS:
        return torch.cat([value, value[: first[module]]])
    if module == "o_proj" and name.endswith("weight"):
        half = value[:, : first["q_proj"]] / 2
        return torch.cat([half, value[:, first["q_proj"] :], half], 1)
    return value.clone()


def write(source: Path, out: Path) -> dict[str, int]:
    """Write the model; returns what changed in its configuration."""
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, group = config.get("head_dim") or config["hidden_size"] // heads, heads // kv_heads
    first = {"q_proj": group * size, "k_proj": size, "v_proj": size}
    changed = {"num_attention_heads": heads + group, "num_key_value_heads": kv_heads + 1, "head_dim": size}
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = load_file(source / "model.safetensors")
    made = {name: widened(name, value, first).contiguous() for name, value in tensors.items()}
    save_file(made, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps({**config, **changed}, indent=2))
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("src", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    print(write(given.src, given.out))


if __name__ == "__main__":
    main()
