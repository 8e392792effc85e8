"""What vLLM calls when it starts, in every one of its processes: ``register``."""


def register() -> None:
    """Make vLLM run artifacts: the quantization method and the model loader. May be called again."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from w4pack.kernels.vllm.config import METHOD, W4PackConfig
    from w4pack.kernels.vllm.loader import register_loader

    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(W4PackConfig)
    register_loader()
