"""DeepSeek-V2 and V3: attention through latent vectors, which are rotated too, and experts with shared ones.

In every head of ``q_b_proj`` (``q_proj`` of the Lite models) come rows without RoPE, then rows with it; in
``kv_b_proj`` rows of keys without RoPE, then the values. The rows of ``kv_a_proj_with_mqa`` past the latent
are the keys with RoPE: no rotation touches them.
"""

from w4pack.convert.rotate.architecture import MLP, Architecture, Block, Latent, Values

KV_DOWN = "self_attn.kv_a_proj_with_mqa"
OUT = ("self_attn.o_proj",)
ROUTED = ("mlp.gate", "mlp.experts.*.gate_proj", "mlp.experts.*.up_proj")
SHARED = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")

ARCHITECTURE = Architecture(
    classes=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    attention=(
        Block("input_layernorm", ("self_attn.q_a_proj", KV_DOWN), OUT),
        Block("input_layernorm", ("self_attn.q_proj", KV_DOWN), OUT),
    ),
    mlp=(
        Block(
            "post_attention_layernorm",
            (*ROUTED, *SHARED),
            ("mlp.experts.*.down_proj", "mlp.shared_experts.down_proj"),
        ),
        Block("post_attention_layernorm", ROUTED, ("mlp.experts.*.down_proj",)),
        MLP,
    ),
    values=Values("self_attn.kv_b_proj", "latent"),
    inner=("mlp.gate.e_score_correction_bias", "self_attn.rotary_emb.inv_freq"),
    latents=(
        Latent(
            "q_latent", "q_lora_rank", "self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj"
        ),
        Latent("kv_latent", "kv_lora_rank", KV_DOWN, "self_attn.kv_a_layernorm", "self_attn.kv_b_proj"),
    ),
    nope=("self_attn.q_b_proj", "self_attn.q_proj", "self_attn.kv_b_proj"),
)
