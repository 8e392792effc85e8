"""What vLLM calls when it starts, in every one of its processes: ``register``."""


def register() -> None:
    """Make vLLM run artifacts: the quantization method and the model loader. May be called again.

    The engine calls it whatever model it is to run, so it never fails: where this release of the engine has
    not what the plugin needs, artifacts are refused with the reason, and all else runs as without w4pack.
    """
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from w4pack.kernels.vllm.unusable import METHOD, refusing

    try:
        from w4pack.kernels.vllm.config import W4PackConfig
        from w4pack.kernels.vllm.loader import register_loader
    except (ImportError, AttributeError) as err:
        if METHOD not in QUANTIZATION_METHODS:
            register_quantization_config(METHOD)(refusing(err))
        return
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(W4PackConfig)
    register_loader()
