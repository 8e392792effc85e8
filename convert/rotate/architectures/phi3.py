"""Phi-3 and Phi-4: q, k and v in one linear, gate and up in one linear."""

from w4pack.convert.rotate.architecture import Architecture, Block, Values

ARCHITECTURE = Architecture(
    classes=("Phi3ForCausalLM",),
    attention=(Block("input_layernorm", ("self_attn.qkv_proj",), ("self_attn.o_proj",)),),
    mlp=(Block("post_attention_layernorm", ("mlp.gate_up_proj",), ("mlp.down_proj",)),),
    values=Values("self_attn.qkv_proj", "after_q_and_k"),
)
