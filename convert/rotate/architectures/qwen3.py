"""Qwen3: a norm of each head of q and k stands between their projections and RoPE, and stays as it is."""

from w4pack.convert.rotate.architecture import ATTENTION, MLP, Architecture

ARCHITECTURE = Architecture(
    classes=("Qwen3ForCausalLM",),
    attention=(ATTENTION,),
    mlp=(MLP,),
    inner=("self_attn.q_norm", "self_attn.k_norm"),
)
