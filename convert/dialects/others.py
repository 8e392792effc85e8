"""Quantization methods that are recognised and refused: their names, and how a config tells of them."""

from collections.abc import Mapping
from typing import Any

OTHER_METHODS: dict[str, str] = {
    "aqlm": "AQLM",
    "bitblas": "BitBLAS",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "bnb": "bitsandbytes",
    "eetq": "EETQ",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fbgemm_fp8": "FP8",
    "finegrained_fp8": "FP8",
    "fouroversix": "FP4 (four over six)",
    "fp8": "FP8",
    "fp_quant": "FP-Quant",
    "gguf": "GGUF",
    "gptq_marlin_24": "Marlin 2:4 sparse",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "marlin-24": "Marlin 2:4 sparse",
    "modelopt": "ModelOpt",
    "modelopt_fp4": "ModelOpt NVFP4",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
    "paroquant": "ParoQuant",
    "qqq": "QQQ",
    "quanto": "Quanto",
    "quark": "Quark",
    "quip": "QuIP#",
    "sinq": "SINQ",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}


def other_method(config: Mapping[str, Any]) -> str | None:
    """Return the name of the method of a settings block that no dialect reads, or None if it names none.

    An unknown ``quant_method`` comes back as written.
    """
    for key in ("quant_method", "method"):
        value = config.get(key)
        if isinstance(value, str) and value:
            return OTHER_METHODS.get(value.lower().replace("-", "_"), OTHER_METHODS.get(value.lower(), value))
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return OTHER_METHODS["bitsandbytes"]
    inner = config.get("quantization")
    if isinstance(inner, Mapping) and isinstance(inner.get("quant_algo"), str):
        return f"ModelOpt {inner['quant_algo']}"
    return None
