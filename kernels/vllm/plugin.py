"""What vLLM calls when it starts, in every one of its processes: ``register``."""

import logging

log = logging.getLogger(__name__)
LACKING = (ImportError, AttributeError, KeyError)  # what using a part of the engine raises that is not there


def register() -> None:
    """Make vLLM run artifacts: the quantization method and the model loader. May be called again.

    The engine calls it whatever model it is to run, so it never fails: where this release of the engine has
    not what the plugin needs, artifacts are refused with the reason, and all else runs as without w4pack.
    """
    try:
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

        from w4pack.kernels.vllm.unusable import METHOD, refusing
    except LACKING as err:  # then the engine refuses artifacts by itself: it does not know the method
        log.warning("w4pack: this release of vLLM takes no quantization method of a plugin: %s", err)
        return
    try:
        from w4pack.kernels.vllm.config import W4PackConfig
        from w4pack.kernels.vllm.loader import register_loader

        register_loader()
    except LACKING as err:
        config = refusing(err)
    else:
        config = W4PackConfig
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(config)
