"""Artifacts in vLLM with w4pack, started with other options, and our loader on what is no artifact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from artifact_cases import DENSE, EXPERTS, Tensors, artifact
from cases import Case, Shelf, oracle, write_safetensors


def loader_with(**options: Any) -> dict[str, Any]:
    """Return how the engine is started with options of our loader."""
    return {"loader": "w4pack", "options": {"model_loader_extra_config": options}}


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}

ADAPTED = ("q_proj.weight", "v_proj.weight", "gate_proj.weight", "down_proj.weight")
PLAIN = "gptqmodel-w4g128-asym-llama"
# label, fixture, what of the engine's options, what is expected, what an error says
FLAGS: tuple[tuple[str, str, dict[str, Any], str, str], ...] = (
    ("float32", PLAIN, {"options": {"dtype": "float32"}}, "refuses", "float32 is not supported"),
    ("method", PLAIN, {"options": {"quantization": "gptq"}}, "refuses", "does not match"),
    ("loader-option", PLAIN, loader_with(thread=1), "refuses", "does not take this option"),
    ("no-threads", PLAIN, loader_with(threads=0), "refuses", "at least 1"),
    ("hashes", PLAIN, loader_with(threads=2, check_hashes=True), "equal", ""),
    ("prefix-caching", PLAIN, {"options": {"enable_prefix_caching": True}}, "equal", ""),
    ("compiled", EXPERTS, {"options": {"enforce_eager": False}}, "equal", ""),
    ("compiled-parts", DENSE, {"options": {"enforce_eager": False}}, "equal", ""),
    ("lora-experts", EXPERTS, {"options": {"enable_lora": True}}, "refuses", "--lora-target-modules"),
    ("lora", PLAIN, {"options": {"enable_lora": True}}, "equal", ""),
    ("ngram", PLAIN, {"options": {"speculative_config": NGRAM}}, "equal", ""),
    ("reload", DENSE, {"reload": True}, "equal", ""),
    ("reload-experts", EXPERTS, {"reload": True}, "equal", ""),
    ("reload-loader", PLAIN, {"reload": True, "loader": "w4pack"}, "equal", ""),
    ("dummy", EXPERTS, {"loader": "dummy"}, "wrong", ""),
    ("preload", DENSE, {"loader": "ipc_cache"}, "equal", ""),
    (
        "quantized-again",
        PLAIN,
        {"options": {"quantization_config": {"linear": "fp8_per_tensor"}}},
        "refuses",
        "without quantizing once more",
    ),
)


def flags(shelf: Shelf) -> Iterator[Case]:
    """Return artifacts with other options of the engine, and its loader on what is no artifact."""
    for label, name, how, expect, says in FLAGS:
        place = artifact(shelf, name)
        assert place is not None
        yield Case(f"plugin-flag-{label}", "plugin", place, shelf.source(name), expect, says=says, **how)
    place = artifact(shelf, PLAIN)
    assert place is not None
    draft = {"model": str(place), "method": "draft_model", "num_speculative_tokens": 2}
    how = {"options": {"speculative_config": draft}}
    yield Case("plugin-flag-draft", "plugin", place, shelf.source(PLAIN), "equal", **how)
    yield adapted(shelf, place)
    plain = shelf.source("gptqmodel-w4g128-sym-llama")
    yield Case("plugin-flag-loader-on-gptq", "plugin", plain, plain, "equal", loader="w4pack")
    yield pickled(shelf, plain)
    claimed = {"quantization": "w4pack"}
    yield Case("plugin-flag-no-artifact", "plugin", plain, plain, "refuses", says="match", options=claimed)


def pickled(shelf: Shelf, source: Path) -> Case:
    """Return a 16-bit checkpoint in a pickle, given to our loader."""
    import torch
    from safetensors.torch import load_file

    place = shutil.copytree(shelf.decoded(source), shelf.root / "pickled")
    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()
    says = "--load-format auto"
    return Case("plugin-flag-loader-on-bin", "plugin", place, source, "refuses", says=says, loader="w4pack")


def adapted(shelf: Shelf, place: Path) -> Case:
    """Return an artifact with a LoRA adapter on packed layers; the truth is the decoded model, merged."""
    merged = shutil.copytree(shelf.decoded(shelf.source(PLAIN)), shelf.root / "merged")
    adapter = shelf.root / "adapter"
    adapter.mkdir()
    tensors, rng = oracle.read_folder(merged), np.random.default_rng(0)
    parts: Tensors = {}
    for name in [name for name in tensors if name.endswith(ADAPTED)]:
        old = tensors[name]
        down, up = (
            rng.normal(0, 0.05, shape).astype(np.float16) for shape in ((8, old.shape[1]), (old.shape[0], 8))
        )
        weight = old.array().astype(np.float32) + 2 * up.astype(np.float32) @ down.astype(np.float32)
        tensors[name] = half(weight)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        parts |= {f"{module}.lora_A.weight": half(down), f"{module}.lora_B.weight": half(up)}
    write_safetensors(merged / "model.safetensors", tensors)
    write_safetensors(adapter / "adapter_model.safetensors", parts)
    leaves = [name.split(".")[0] for name in ADAPTED]
    settings_of = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none"}
    text = json.dumps(settings_of | {"lora_dropout": 0.0, "target_modules": leaves})
    (adapter / "adapter_config.json").write_text(text, encoding="utf-8")
    options = {"enable_lora": True, "max_lora_rank": 8}
    how: dict[str, Any] = {"options": options, "adapter": str(adapter)}
    return Case("plugin-flag-lora-adapter", "plugin", place, merged, "equal", **how)


def half(values: Any) -> oracle.Tensor:
    """Return a tensor in float16."""
    found = np.ascontiguousarray(values, dtype=np.float16)
    return oracle.Tensor("F16", found.shape, found.tobytes())
