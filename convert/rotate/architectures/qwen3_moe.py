"""Qwen3-MoE: some layers have one MLP in place of experts (``mlp_only_layers``)."""

from w4pack.convert.rotate.architecture import ATTENTION, MLP, Architecture, Block

ARCHITECTURE = Architecture(
    classes=("Qwen3MoeForCausalLM",),
    attention=(ATTENTION,),
    mlp=(
        Block(
            "post_attention_layernorm",
            ("mlp.gate", "mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
            ("mlp.experts.*.down_proj",),
        ),
        MLP,
    ),
    inner=("self_attn.q_norm", "self_attn.k_norm"),
)
