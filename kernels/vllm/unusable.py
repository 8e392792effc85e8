"""Releases of vLLM in which the plugin cannot run, or was never run."""

import logging
from functools import cache
from typing import Any

import torch
import vllm
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from w4pack.convert.engines.plugin import TESTED, releases
from w4pack.convert.errors import Refused

METHOD = "w4pack"


def refusing(reason: Exception) -> type[QuantizationConfig]:
    """Return a quantization config that refuses every artifact and says why."""

    class Refusing(QuantizationConfig):
        """Stands where the method is registered, so that an artifact is refused with the reason."""

        def get_name(self) -> str:
            """Return the name of the method."""
            return METHOD

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            """Return nothing."""
            return []

        @classmethod
        def get_min_capability(cls) -> int:
            """Return no bound."""
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            """Return nothing."""
            return []

        def get_quant_method(self, layer: Any, prefix: str) -> None:
            """Return nothing."""

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> "Refusing":
            """Refuse.

            Raises:
                Refused: always.
            """
            raise Refused(
                "the plugin of w4pack does not run in this release of vLLM",
                code="vllm-release",
                where=f"vllm {vllm.__version__}",
                expected=f"vLLM {releases()}",
                found=str(reason),
                hint=f"pip install vllm=={TESTED[-1]}",
            )

    return Refusing


@cache
def warn_of_release() -> None:
    """Say once in a process that this release was never run with the plugin."""
    if vllm.__version__.split(".")[:2] not in [version.split(".")[:2] for version in TESTED]:
        log = logging.getLogger(__name__)
        log.warning("w4pack: the plugin is tested with vLLM %s, not with %s", releases(), vllm.__version__)
