"""Llama and the classes that share its names: Mistral, Qwen2, Granite. Biases are found where they are."""

from w4pack.convert.rotate.architecture import ATTENTION, MLP, Architecture

ARCHITECTURE = Architecture(
    classes=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "GraniteForCausalLM"),
    attention=(ATTENTION,),
    mlp=(MLP,),
)
