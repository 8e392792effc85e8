"""Mixtral: w1 is the gate, w3 up, w2 down; the router is one more reader."""

from w4pack.convert.rotate.architecture import ATTENTION, Architecture, Block

ARCHITECTURE = Architecture(
    classes=("MixtralForCausalLM",),
    attention=(ATTENTION,),
    mlp=(
        Block(
            "post_attention_layernorm",
            ("block_sparse_moe.gate", "block_sparse_moe.experts.*.w1", "block_sparse_moe.experts.*.w3"),
            ("block_sparse_moe.experts.*.w2",),
        ),
    ),
)
