"""OLMo 2: the blocks read the stream without a norm and write through one with a gain."""

from w4pack.convert.rotate.architecture import ATTENTION, MLP, Architecture, Block

ARCHITECTURE = Architecture(
    classes=("Olmo2ForCausalLM",),
    attention=(Block(None, ATTENTION.readers, ATTENTION.writers, post_norm="post_attention_layernorm"),),
    mlp=(Block(None, MLP.readers, MLP.writers, post_norm="post_feedforward_layernorm"),),
    inner=("self_attn.q_norm", "self_attn.k_norm"),
)
