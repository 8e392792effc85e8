"""What the model classes of transformers do, as data: how they spell experts, which linears have a bias.

Rows were read from transformers 5.24. A class that has no row is unknown: nothing is concluded about it.
"""

from dataclasses import dataclass
from typing import Literal

ExpertSpelling = Literal["mixtral", "qwen"]
# What each class writes for its experts and therefore maps when it loads (a test saves tiny models and
# compares).
#   mixtral  block_sparse_moe.experts.E.w1|w2|w3, block_sparse_moe.gate
#   qwen     mlp.experts.E.gate_proj|up_proj|down_proj
# ``mlp`` for ``block_sparse_moe`` is understood by 5.24 as well, but neither kind maps the leaves of the
# other: such experts are filled with random numbers, without an error.
EXPERT_SPELLINGS: dict[str, ExpertSpelling] = {
    "MixtralForCausalLM": "mixtral",
    "MiniMaxForCausalLM": "mixtral",
    "MiniMaxM2ForCausalLM": "mixtral",
    "PhimoeForCausalLM": "mixtral",
    "PhiMoEForCausalLM": "mixtral",
    "AfmoeForCausalLM": "qwen",
    "Cohere2MoeForCausalLM": "qwen",
    "DeepseekV2ForCausalLM": "qwen",
    "DeepseekV32ForCausalLM": "qwen",
    "DeepseekV3ForCausalLM": "qwen",
    "Dots1ForCausalLM": "qwen",
    "Ernie4_5_MoeForCausalLM": "qwen",
    "ExaoneMoeForCausalLM": "qwen",
    "FlexOlmoForCausalLM": "qwen",
    "Glm4MoeForCausalLM": "qwen",
    "Glm4MoeLiteForCausalLM": "qwen",
    "GlmMoeDsaForCausalLM": "qwen",
    "HunYuanMoEV1ForCausalLM": "qwen",
    "HYV3ForCausalLM": "qwen",
    "LongcatFlashForCausalLM": "qwen",
    "MiMoV2FlashForCausalLM": "qwen",
    "OlmoeForCausalLM": "qwen",
    "Qwen2MoeForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen",
    "Qwen3NextForCausalLM": "qwen",
    "Qwen3_5MoeForCausalLM": "qwen",
    "SolarOpenForCausalLM": "qwen",
}

Bias = bool | tuple[str, bool]  # always / never, or a config key and its default


@dataclass(frozen=True, slots=True)
class Biases:
    """Which linears of a model class have a bias. ``latent``: the down-projections of low-rank attention."""

    qkv: Bias
    out: Bias
    mlp: Bias
    head: Bias = False
    latent: Bias = False
    up_qkv: Bias = False


_ATTENTION: Bias = ("attention_bias", False)
_MLP: Bias = ("mlp_bias", False)
_NONE = Biases(False, False, False)
_ATTENTION_ONLY = Biases(_ATTENTION, _ATTENTION, False)
_BOTH = Biases(_ATTENTION, _ATTENTION, _MLP)
_QWEN2 = Biases(True, False, False)
_ALL = Biases(True, True, True)
_LATENT = Biases(False, _ATTENTION, False, latent=_ATTENTION)
# Read from the classes of transformers 5.24; a test builds each of them with every key on and off.
BIASES: dict[str, Biases] = {
    "AfmoeForCausalLM": _NONE,
    "ApertusForCausalLM": _ATTENTION_ONLY,
    "ArceeForCausalLM": _BOTH,
    "BloomForCausalLM": _ALL,
    "CodeGenForCausalLM": Biases(False, False, True, head=True),
    "Cohere2ForCausalLM": _ATTENTION_ONLY,
    "CohereForCausalLM": _ATTENTION_ONLY,
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Dots1ForCausalLM": _ATTENTION_ONLY,
    "Exaone4ForCausalLM": _NONE,
    "FlexOlmoForCausalLM": _ATTENTION_ONLY,
    "GPTJForCausalLM": Biases(False, False, True, head=True),
    "GPTNeoXForCausalLM": Biases(("attention_bias", True), ("attention_bias", True), True),
    "Gemma2ForCausalLM": _ATTENTION_ONLY,
    "Gemma3ForCausalLM": _ATTENTION_ONLY,
    "GemmaForCausalLM": _ATTENTION_ONLY,
    "Glm4ForCausalLM": Biases(("attention_bias", True), False, False),
    "Glm4MoeForCausalLM": Biases(_ATTENTION, False, False),
    "GlmForCausalLM": Biases(("attention_bias", True), False, False),
    "GptOssForCausalLM": Biases(("attention_bias", True), ("attention_bias", True), True),
    "GraniteForCausalLM": _BOTH,
    "GraniteMoeForCausalLM": _ATTENTION_ONLY,
    "HunYuanDenseV1ForCausalLM": _ATTENTION_ONLY,
    "LlamaForCausalLM": _BOTH,
    "MiniMaxM2ForCausalLM": _NONE,
    "MistralForCausalLM": _NONE,
    "MixtralForCausalLM": _NONE,
    "NemotronForCausalLM": _BOTH,
    "OPTForCausalLM": Biases(("enable_bias", True), ("enable_bias", True), ("enable_bias", True)),
    "Olmo2ForCausalLM": _ATTENTION_ONLY,
    "OlmoForCausalLM": _ATTENTION_ONLY,
    "OlmoeForCausalLM": _ATTENTION_ONLY,
    "Phi3ForCausalLM": _NONE,
    "PhiForCausalLM": Biases(True, True, True, head=True),
    "PhimoeForCausalLM": Biases(_ATTENTION, _ATTENTION, False, head=("lm_head_bias", False)),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen2MoeForCausalLM": Biases(("qkv_bias", True), False, False),
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "Qwen3ForCausalLM": _ATTENTION_ONLY,
    "Qwen3MoeForCausalLM": _ATTENTION_ONLY,
    "Qwen3NextForCausalLM": _ATTENTION_ONLY,
    "SeedOssForCausalLM": Biases(("attention_bias", True), ("attention_out_bias", False), _MLP),
    "SmolLM3ForCausalLM": _BOTH,
    "StableLmForCausalLM": Biases(("use_qkv_bias", False), False, False),
    "Starcoder2ForCausalLM": Biases(("use_bias", True), ("use_bias", True), ("use_bias", True)),
}
