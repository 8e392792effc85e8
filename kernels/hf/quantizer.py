"""``AutoModelForCausalLM.from_pretrained`` on an artifact, through transformers' hooks for quantizers.

transformers reads the files and fills the layers; ours is what it fills: packed layers on the ``meta``
device, names and shapes compared from the headers before, layers joined after. It would only warn of a
missing tensor and go on with what lies in memory, so nothing is left to its report.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from w4pack.convert.core.scheme import WIDE
from w4pack.convert.dialects import w4pack as dialect
from w4pack.convert.errors import Refused, UsageError
from w4pack.kernels import devices, hashes, launch
from w4pack.kernels.artifact import Artifact, open_artifact
from w4pack.kernels.hf import asking, dtypes, joins, kv_attention, online, skeleton, tables, wiring
from w4pack.kernels.hf.asking import METHOD, SETTINGS
from w4pack.kernels.modules import FusedLinear


class W4PackConfig(QuantizationConfigMixin):
    """The artifact's ``quantization_config``, key for key.

    Beside it are settings (``act_bits``, ``kv_bits``, ``check_hashes``) that ``from_pretrained`` was given,
    or that somebody put into the config, with the meaning that they have for ``w4pack.load``.
    """

    def __init__(self, **block: Any) -> None:
        self.__dict__.update(dict.fromkeys(SETTINGS), **block)
        self.quant_method = METHOD

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value, as of the block in config.json: the config of a model loads another one."""
        return getattr(self, key, default)

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of the artifact."""
        found: dict[str, Any] = super().to_dict()
        return {key: value for key, value in found.items() if key not in SETTINGS}


class W4PackQuantizer(HfQuantizer):
    """Puts packed layers into a model that transformers loads."""

    requires_calibration = True  # only artifacts are loaded, nothing is quantized on the way
    attention: str | None = None  # what was asked for

    def __init__(self, quantization_config: W4PackConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        quantization_config.update(**asking.take())  # of the ``from_pretrained`` that makes it

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse what cannot run before anything is read: unknown versions, cards that are too old."""
        block = self.quantization_config.to_dict()
        refusals = dialect.claims(block).refusals
        if refusals:
            key, found = refusals[0]
            raise Refused(
                "the artifact is of a kind that this version of w4pack does not run",
                code="artifact-unknown",
                where=f"quantization_config.{key}",
                found=found,
                hint="install the w4pack that wrote it, or convert again: w4pack convert SOURCE OUT",
            )
        if isinstance(device_map, dict):  # else a way to spread it, over GPUs that are there
            places(device_map.values())

    def update_attn_implementation(self, config: Any) -> Any:
        """Take note of the attention that was asked for: a model has one in any case."""
        self.attention = config._attn_implementation
        if folder := asking.folder():
            open_artifact(folder, online=True)  # a config of too many layers is refused before they are built
        return config

    update_tp_plan = update_attn_implementation  # where older versions of transformers hand over the config

    def update_device_map(self, device_map: Any) -> Any:
        """Return a map of one device, however its places spell it, as such."""
        found = places(device_map.values()) if isinstance(device_map, dict) else ()
        return {"": found[0]} if len(found) == 1 else device_map

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of activations: the model's, which the kernels take in 16 bit only."""
        self.asked = dtype
        return dtypes.narrowed(dtype)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Any = None, dtype: Any = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise UsageError(
                "an artifact is loaded from its folder, not from a state dictionary",
                code="no-files",
                hint="from_pretrained(PATH) without `state_dict`",
            )
        artifact = open_artifact(Path(checkpoint_files[0]).parent, online=True)
        settings = self.quantization_config
        if settings.check_hashes:
            hashes.check(artifact, artifact.tensors)
        told = hashes.check_samples(artifact)
        dtypes.chosen(artifact, self.asked)
        self.running = online.plan(artifact, settings.act_bits, settings.kv_bits)
        if self.running is not None and self.running.settings.kv_bits != WIDE:
            own = artifact.config.get("attn_implementation")
            kv_attention.refuse_other(
                None if self.attention == own else self.attention, "attn_implementation"
            )
        self.skeleton = skeleton.build(model, artifact, model.dtype)
        hashes.tell(told)  # a model that does not fit is an error, with nothing else beside it
        self.joins = joins.find(self.skeleton)
        self.dtypes = {name: self.skeleton.dtype_of(name) for name, _ in model.named_parameters()}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for name, tensor in model.named_parameters():
            tensor.requires_grad_(False)
            tensor.data = tensor.data.to(self.dtypes[name])  # 5.16 does not cast what it renamed
        joins.check_orders(model)
        joins.join(self.skeleton, self.joins)
        if self.running is not None:
            wiring.wire(self.skeleton, self.running)
        settle(model, self.skeleton.artifact)
        del self.skeleton, self.joins, self.running, self.dtypes, self.asked
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
        """Take out transformers' merging of experts where ours are packed."""
        return self.skeleton.names.conversions(weight_conversions)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Refuse ``save_pretrained``: the artifact's folder is the saved form, with its manifest.

        Raises:
            UsageError: always.
        """
        raise _not_saved()

    def dequantize(self, *args: Any, **kwargs: Any) -> PreTrainedModel:
        """Refuse ``model.dequantize()``: a model with 16-bit weights is made from the files.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a packed model is not dequantized in memory",
            code="not-dequantized",
            hint="w4pack convert PATH OUT --to dense, then load OUT",
        )

    @property
    def is_trainable(self) -> bool:
        """Packed weights have no gradient."""
        return False

    @property
    def is_compileable(self) -> bool:
        """The operators have fake versions; what runs online between them is not traced."""
        return not getattr(self.quantization_config, "online", None)


def settle(model: PreTrainedModel, artifact: Artifact) -> None:
    """Do to a model that is loaded what both ways into transformers owe it."""
    tables.tell(model, artifact)
    skeleton.mark_filled(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):  # the decoder inside too, which transformers would save
            module.save_pretrained = _refuse_saving
            module.push_to_hub = _refuse_saving  # makes a repository before it asks what is saved
            module.get_memory_footprint = partial(_memory_footprint, module)


def _memory_footprint(model: PreTrainedModel, return_buffers: bool = True) -> int:
    """Return the bytes of a model's tensors: joined ones, buffers and in parts parameters, once."""
    whole: int = type(model).get_memory_footprint(model, return_buffers)
    fused = (module for module in model.modules() if isinstance(module, FusedLinear))
    joined = (tensor.nbytes for module in fused for tensor in module.buffers(recurse=False))
    return whole - (sum(joined) if return_buffers else 0)


def _refuse_saving(*args: Any, **kwargs: Any) -> None:
    raise _not_saved()


def _not_saved() -> UsageError:
    return UsageError(
        "a packed model is not saved from memory",
        code="not-serializable",
        hint="copy the artifact's folder, or: w4pack push OUT ORG/NAME",
    )


def places(given: Iterable[Any]) -> tuple[torch.device, ...]:
    """Return the devices of a device map, each once.

    Raises:
        UsageError: a disk, or a CPU beside GPUs; no such device; a card that is too old.
    """
    names = sorted(set(map(str, given)))
    kinds = {"cuda" if name.isdecimal() else name.partition(":")[0] for name in names}
    if "disk" in kinds or len(kinds) > 1:
        raise UsageError(
            "packed layers stay on one device each; they are not offloaded",
            code="offload",
            where="device_map",
            expected="one CPU, or GPUs",
            found=", ".join(names),
        )
    found = tuple(dict.fromkeys(map(devices.find, names)))
    for device in found:
        if device.type == "cuda":
            launch.device(device.index)
    return found


def register() -> None:
    """Make transformers load artifacts: ``AutoModelForCausalLM.from_pretrained(PATH)``. May be called again.

    Raises:
        UsageError: another package has taken the name ``w4pack``.
    """
    asking.install()  # each time: somebody may have put the original back
    taken = [AUTO_QUANTIZER_MAPPING.get(METHOD), AUTO_QUANTIZATION_CONFIG_MAPPING.get(METHOD)]
    if taken == [W4PackQuantizer, W4PackConfig]:
        return
    if any(taken):
        raise UsageError("another quantizer is registered as `w4pack`", code="taken", found=str(taken))
    register_quantization_config(METHOD)(W4PackConfig)
    register_quantizer(METHOD)(W4PackQuantizer)
