"""OPT: LayerNorm, biases everywhere, learned positions, ReLU between fc1 and fc2.

The stock class subtracts the mean of the rotated stream, so its rotation fixes the all-ones vector.
"""

from w4pack.convert.rotate.architecture import Architecture, Block, Condition, Values

ARCHITECTURE = Architecture(
    classes=("OPTForCausalLM",),
    attention=(
        Block(
            "self_attn_layer_norm",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("self_attn.out_proj",),
        ),
    ),
    mlp=(Block("final_layer_norm", ("fc1",), ("fc2",)),),
    values=Values("self_attn.v_proj"),
    layers="model.decoder.layers",
    embeddings=("model.decoder.embed_tokens", "model.decoder.embed_positions"),
    final_norm="model.decoder.final_layer_norm",
    inner=(),
    outer=(),
    norm="layer",
    tied=True,
    conditions=(
        Condition("do_layer_norm_before", True, "the norms stand after the addition: they make the stream"),
    ),
)
