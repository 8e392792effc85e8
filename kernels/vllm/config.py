"""The quantization method ``w4pack`` of vLLM: which of its layers are packed, and whether they can run."""

from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from w4pack.convert.core.families import FUSED_LEAVES
from w4pack.convert.dialects import w4pack as dialect
from w4pack.convert.errors import Refused, W4PackError
from w4pack.kernels import launch
from w4pack.kernels.vllm import moe, source
from w4pack.kernels.vllm.linear import W4PackLinearMethod
from w4pack.kernels.vllm.source import Source
from w4pack.kernels.vllm.unusable import METHOD, warn_of_release

DRAFT = "draft_model."  # the engine's name for all of a model that drafts for another
CAPABILITY = 80  # sm_80: what the kernels are built for at least


class W4PackConfig(QuantizationConfig):
    """The artifact's ``quantization_config``, and once the model's name is known, its headers."""

    def __init__(self, block: dict[str, Any]) -> None:
        super().__init__()
        self.block = block
        self._found: Source | None = None  # under the names of the file
        self._source: Source | None = None  # under the engine's
        self._checked: set[int] = set()

    # ---- what the engine asks ------------------------------------------------------------------

    def get_name(self) -> str:
        """Return the name of the method."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return what the kernels compute in."""
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the oldest GPU, times ten."""
        return CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return other files with settings: there are none, config.json has them."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "W4PackConfig":
        """Make it of the block in config.json.

        Raises:
            Refused: a version, layout, key or ``online`` record that this version of w4pack does not know; a
                platform without kernels.
            UsageError: cuda-core is missing.
        """
        problems = [_unknown(key, found) for key, found in dialect.claims(config).refusals]
        problems = problems or [_at_run_time(key, found) for key, found in dialect.run_time(config)]
        if problems:
            raise Refused.together(problems)
        _check_platform()
        warn_of_release()
        return cls(config)

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read the headers of the model, of a folder or of the Hub.

        Raises:
            SourceError: tensors that are missing, too many, or not as the config says.
        """
        if source.is_folder(model_name):
            self.attach(source.of_folder(model_name))
            return
        from vllm.transformers_utils.config import get_safetensors_params_metadata

        headers = get_safetensors_params_metadata(model_name, revision=revision)
        config = {**(hf_config.to_dict() if hf_config is not None else {}), "quantization_config": self.block}
        self.attach(source.of_headers(headers, config, model_name))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take over the names that the engine's model class gives to modules."""
        if self._found is not None:
            self._source = self._found.renamed(hf_to_vllm_mapper._map_name)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return how a layer computes; None: as the engine does it.

        Raises:
            Refused: what the rules of ``w4pack check --engine vllm`` have against this artifact.
        """
        prefix = prefix.removeprefix(DRAFT)
        settings = get_current_vllm_config()
        is_read = settings.load_config.load_format != "dummy"
        if isinstance(layer, LinearBase):
            members = self._members(prefix)
            if any(name in self.source.specs for name in members):
                self._check(get_tensor_model_parallel_world_size())
                return W4PackLinearMethod(self.source, members, is_read=is_read)
            return UnquantizedLinearMethod()
        if isinstance(layer, ParallelLMHead) and prefix in self.source.specs:
            is_read = is_read and settings.model_config.runner_type != "pooling"  # such a model has no head
            return W4PackLinearMethod(self.source, (prefix,), is_head=True, is_read=is_read)
        if moe.is_experts(layer):
            lora = settings.lora_config
            method = moe.method(self.source, layer, prefix, is_read=is_read, adapters=lora)
            if method is not None:
                self._check(get_tensor_model_parallel_world_size())
            return method
        return None

    # ---- ours ------------------------------------------------------------------------------------

    @property
    def source(self) -> Source:
        """What the artifact holds."""
        if self._source is None:
            raise Refused(
                "the engine made layers before it named the model",
                code="no-artifact",
                where="vllm",
                hint="vllm serve OUT --quantization w4pack",
            )
        return self._source

    def attach(self, found: Source) -> None:
        """Take what a folder or a repository holds, in place of what was known before."""
        self._found = self._source = found

    def _members(self, prefix: str) -> tuple[str, ...]:
        """Return the modules of the file that the engine builds as one."""
        if prefix in self.source.specs:
            return (prefix,)
        parent, dot, leaf = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(leaf) or FUSED_LEAVES.get(leaf, (leaf,))
        return tuple(parent + dot + part for part in parts)

    def _check(self, ranks: int) -> None:
        """Ask the rules, which know the names of the file."""
        parallel = get_current_vllm_config().parallel_config
        if self._found is not None and ranks not in self._checked:
            self._found.refuse(ranks, split_experts=not parallel.enable_expert_parallel)
            self._checked.add(ranks)


def _check_platform() -> None:
    if current_platform.is_cuda():
        launch.check_installed()
    elif not current_platform.is_cpu():
        raise Refused(
            "there are no kernels for this platform",
            code="platform",
            where="vllm",
            expected="an NVIDIA GPU, or a CPU",
            found=str(current_platform.device_type),
            hint="w4pack convert ARTIFACT OUT --to gptq, awq or compressed-tensors",
        )


def _unknown(key: str, found: str) -> W4PackError:
    return Refused(
        "the artifact is of a kind that this version of w4pack does not know",
        code="artifact-unknown",
        where=f"config.json: quantization_config.{key}",
        expected="what the same version wrote",
        found=found,
        hint="install the w4pack that wrote it, or convert again: w4pack convert SOURCE OUT",
    )


def _at_run_time(key: str, found: str) -> W4PackError:
    return Refused(
        "the artifact asks for work between the layers that the plugin does not do",
        code="artifact-online",
        where=f"config.json: quantization_config.{key}",
        expected="no `online` records",
        found=found,
        hint="w4pack generate ARTIFACT runs it, in transformers",
    )
