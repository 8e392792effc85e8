"""Qwen2-MoE: experts, one shared expert, and a gate of one output that scales the shared one."""

from w4pack.convert.rotate.architecture import ATTENTION, MLP, Architecture, Block

ARCHITECTURE = Architecture(
    classes=("Qwen2MoeForCausalLM",),
    attention=(ATTENTION,),
    mlp=(
        Block(
            "post_attention_layernorm",
            (
                "mlp.gate",
                "mlp.experts.*.gate_proj",
                "mlp.experts.*.up_proj",
                "mlp.shared_expert.gate_proj",
                "mlp.shared_expert.up_proj",
                "mlp.shared_expert_gate",
            ),
            ("mlp.experts.*.down_proj", "mlp.shared_expert.down_proj"),
        ),
        MLP,
    ),
)
