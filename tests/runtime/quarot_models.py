"""Tiny artifacts with ``online`` records, made without the converter's own way to them.

A random model is folded by the plan of a full rotation, packed with plain rounding, and given the records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers as tf

import random_models
from w4pack.convert import convert
from w4pack.convert.files.checkpoint import open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.provider import CheckpointProvider
from w4pack.convert.planning.quantize_options import QuantizeOptions
from w4pack.convert.rotate.plan import plan_rotation
from w4pack.convert.rotate.rotated import Rotated

SIZES: dict[str, Any] = {
    "hidden_size": 192,  # 12 x 16
    "intermediate_size": 320,  # 20 x 16
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL: dict[str, Any] = {  # what changes SIZES where a model is only run
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_experts": 4}
CONFIGS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "llama-mha": lambda: tf.LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "llama-biased": lambda: tf.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": lambda: tf.MistralConfig(**SIZES, sliding_window=20),
    "qwen2": lambda: tf.Qwen2Config(**SIZES),
    "qwen3": lambda: tf.Qwen3Config(**SIZES),
    "phi3": lambda: tf.Phi3Config(**SIZES),
    # Soft caps so low that every score feels them.
    "gemma2": lambda: tf.Gemma2Config(
        **SIZES,
        query_pre_attn_scalar=64,
        sliding_window=20,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "olmo2": lambda: tf.Olmo2Config(**SIZES),
    "mixtral": lambda: tf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(**SIZES, **MOE, mlp_only_layers=[0]),
    "qwen2-moe": lambda: tf.Qwen2MoeConfig(**SIZES, **MOE, shared_expert_intermediate_size=128),
    "opt": lambda: tf.OPTConfig(
        hidden_size=192,
        ffn_dim=320,
        num_hidden_layers=2,
        vocab_size=256,
        num_attention_heads=3,
        word_embed_proj_dim=192,
        max_position_embeddings=256,
    ),
}
CLIPS = {"attn_in": 0.9, "attn_out": 0.85, "mlp_in": 0.95, "mlp_mid": 0.8}


def source(name: str, folder: Path, dtype: torch.dtype = torch.float16, **changes: Any) -> Path:
    """Write a random 16-bit model with a tokenizer."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = tf.AutoModelForCausalLM.from_config(config)
    return random_models.save(random_models.randomised(model), folder, dtype)


def records(online: list[dict[str, Any]], head: int, bits: int = 4) -> list[dict[str, Any]]:
    """Return transforms with quantizers beside them."""
    acts = [
        {"kind": "act_quant", "site": site, "bits": bits, "clip": {"4": clip, "8": 1.0}, "symmetric": True}
        for site, clip in CLIPS.items()
    ]
    clips = {"4": 0.95, "8": 1.0}
    kv = {
        "kind": "kv_quant",
        "bits": {"k": bits, "v": bits},
        "clip": {"k": clips, "v": {**clips, "4": 0.9}},
        "group": head,
    }
    return [*online, *acts, kv]


def guides(config: Mapping[str, Any], *, offset: float = 1.0) -> dict[str, torch.Tensor]:
    """Return a random guide of keys for each layer."""
    random = torch.Generator().manual_seed(5)
    shape = (2, config["num_key_value_heads"], config["head_dim"])
    sizes = torch.tensor([offset, 0.5])[:, None, None]
    return {
        f"model.layers.{n}.self_attn.k_guide": torch.randn(shape, generator=random) * sizes
        for n in range(config["num_hidden_layers"])
    }


def artifact(
    name: str, place: Path, *, group: int = 64, bits: int = 4, offset: float | None = None, **changes: Any
) -> Path:
    """Write a rotated artifact; return its folder. ``offset``: of its guides, how large; None: no guides."""
    plain = source(name, place / "source", **changes)
    folded, out = place / "folded", place / "out"
    with open_checkpoint(LocalStore(plain)) as checkpoint:
        plan = plan_rotation(checkpoint.config, checkpoint.tensors, "full")
        provider = Rotated(CheckpointProvider(checkpoint), plan)
        tensors = {n: provider.get(n).contiguous() for n in provider.names()}
        config = {**checkpoint.config, **plan.config_changes}
    tensors |= {} if offset is None else guides(config, offset=offset)
    folded.mkdir()
    safetensors.torch.save_file(tensors, folded / "model.safetensors", metadata={"format": "pt"})
    (folded / "config.json").write_text(json.dumps(config))
    random_models.write_tokenizer(folded)
    convert(folded, out, quantize=QuantizeOptions(method="rtn", group_size=group, bits=bits))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    edit_online(out, lambda _: records([dict(r) for r in plan.online], head))
    if offset is not None:
        edit_online(out, lambda found: [*found[:-1], {**found[-1], "guide": True}])
    return out


class Artifacts:
    """Artifacts of models by name, each made when it is first asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.factory = factory
        self.found: dict[str, Path] = {}

    def __call__(self, name: str) -> Path:
        if name not in self.found:
            self.found[name] = artifact(name, self.factory.mktemp(name))
        return self.found[name]


def edit_online(out: Path, change: Callable[[list[Any]], list[Any]]) -> None:
    """Change the records of an artifact."""
    path = out / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["online"] = change(config["quantization_config"]["online"])
    path.write_text(json.dumps(config))
