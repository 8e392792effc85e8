"""Gemma 1: Llama's names, norms that multiply by 1 + weight, tied by default. Its scale √d is a scalar."""

from w4pack.convert.rotate.architecture import ATTENTION, MLP, Architecture

ARCHITECTURE = Architecture(
    classes=("GemmaForCausalLM",),
    attention=(ATTENTION,),
    mlp=(MLP,),
    norm="rms_plus_one",
    tied=True,
)
