"""Tiny random models of every architecture, saved as their own class saves them, and loaded again exactly.

Gains and biases are random: fresh ones (1 and 0) hide most mistakes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers as tf

from w4pack.convert.files.checkpoint import Checkpoint, open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.provider import Provider
from w4pack.convert.rotate.plan import RotationPlan, plan_rotation
from w4pack.convert.rotate.rotated import Rotated

COMMON = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # heads x head_dim is not the hidden size
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **{k: v for k, v in COMMON.items() if k != "head_dim"},
    **MOE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
OPT = {
    "hidden_size": 48,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CONFIGS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: tf.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama-one-kv-head": lambda: tf.LlamaConfig(**{**COMMON, "num_key_value_heads": 1, "hidden_size": 56}),
    "mistral": lambda: tf.MistralConfig(**COMMON, sliding_window=4),
    "qwen2": lambda: tf.Qwen2Config(**COMMON),
    "qwen3": lambda: tf.Qwen3Config(**COMMON),
    "phi3": lambda: tf.Phi3Config(**COMMON),
    "gemma": lambda: tf.GemmaConfig(**COMMON),
    "granite": lambda: tf.GraniteConfig(
        **COMMON,
        residual_multiplier=0.22,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        attention_multiplier=0.1,
    ),
    "opt": lambda: tf.OPTConfig(**OPT),
    "mixtral": lambda: tf.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe": lambda: tf.Qwen2MoeConfig(
        **COMMON, **MOE, num_experts=4, shared_expert_intermediate_size=40, mlp_only_layers=[0]
    ),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(**COMMON, **MOE, num_experts=4, mlp_only_layers=[0]),
    "deepseek-v2": lambda: tf.DeepseekV2Config(
        **LATENT, q_lora_rank=24, topk_method="greedy", attention_bias=True
    ),
    "deepseek-v2-lite": lambda: tf.DeepseekV2Config(**LATENT, q_lora_rank=None, topk_method="greedy"),
    "deepseek-v3": lambda: tf.DeepseekV3Config(**LATENT, q_lora_rank=24),
    "gemma2": lambda: tf.Gemma2Config(**COMMON, query_pre_attn_scalar=16),
    "gemma3": lambda: tf.Gemma3TextConfig(**COMMON, query_pre_attn_scalar=16),
    "olmo2": lambda: tf.Olmo2Config(**COMMON),
}
POST_NORM = ("gemma2", "gemma3", "olmo2")
TOKENS = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(1))


def model(name: str, **changes: Any) -> tf.PreTrainedModel:
    """Return a float64 model with random gains and biases."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(7)
    made = tf.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    made = made.double().eval()
    for tensor_name, parameter in made.named_parameters():
        if "norm" in tensor_name or tensor_name.endswith("bias"):
            parameter.data += 0.3 * torch.randn_like(parameter)
        else:
            parameter.data *= 5
    return made


def save(name: str, folder: Path, dtype: torch.dtype = torch.float64, **changes: Any) -> Path:
    """Write a model in one dtype."""
    model(name, **changes).to(dtype).save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float64) -> tf.PreTrainedModel:
    """Load a folder with the stock class."""
    return tf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def logits(made: tf.PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return made(TOKENS).logits


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@contextmanager
def opened(folder: Path) -> Iterator[Checkpoint]:
    with open_checkpoint(LocalStore(folder)) as checkpoint:
        yield checkpoint


def planned(checkpoint: Checkpoint, mode: str = "offline", **options: Any) -> RotationPlan:
    return plan_rotation(checkpoint.config, checkpoint.tensors, mode, **options)  # type: ignore[arg-type]


def write_rotated(checkpoint: Checkpoint, source: Provider, plan: RotationPlan, folder: Path) -> Path:
    """Write the rotated model without any rounding but float64's, as a stock class would load it."""
    folder.mkdir(parents=True)
    provider = Rotated(source, plan)
    tensors = {name: provider.get(name).contiguous() for name in provider.names()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**checkpoint.config, **plan.config_changes}))
    return folder


def exact_norms(made: tf.PreTrainedModel) -> None:
    """RMSNorm classes compute in float32 whatever they are given; here they do it in float64."""
    for module in made.modules():
        kind = type(module).__name__
        if "RMSNorm" in kind:
            module.forward = _norm(module, plus_one="Gemma" in kind)


def _norm(module: Any, *, plus_one: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))

    def forward(x: torch.Tensor) -> torch.Tensor:
        gain = module.weight + 1 if plus_one else module.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain

    return forward
