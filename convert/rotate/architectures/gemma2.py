"""Gemma 2 and 3: a norm with a gain lies between each block and the stream, which stays as it is."""

from w4pack.convert.rotate.architecture import ATTENTION, MLP, Architecture, Block

ARCHITECTURE = Architecture(
    classes=("Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    attention=(
        Block("input_layernorm", ATTENTION.readers, ATTENTION.writers, post_norm="post_attention_layernorm"),
    ),
    mlp=(
        Block("pre_feedforward_layernorm", MLP.readers, MLP.writers, post_norm="post_feedforward_layernorm"),
    ),
    inner=("self_attn.q_norm", "self_attn.k_norm", "self_attn.rotary_emb.inv_freq"),
    norm="rms_plus_one",
    tied=True,
)
