"""A model without numbers, and its parts filled one at a time: transformers' own code on the ``meta`` device.

Only what is needed is in memory: the embeddings and the head, and one decoder layer.
"""

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from w4pack.convert.core import families
from w4pack.convert.errors import FROM_16_BIT, Refused, SourceError, W4PackError
from w4pack.convert.files import counts
from w4pack.convert.files.provider import Provider
from w4pack.convert.quantize.experts import UNCALIBRATED, most_experts, split_fused

QWEN = ("Qwen3MoeForCausalLM",)  # spells experts as the modules here are called
FP32_LISTS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
CACHE_NAMES = ("cache", "past_key_values")  # what decoders and layers call it, the newer name first
PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dtypes whose values are the weights
STALE = ("quantization_config", "compression_config", "auto_map")


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """A causal language model of transformers, on ``meta`` but for the parts that are filled.

    path    of the list of decoder layers, e.g. ``model.layers``
    layers  that list
    names   module path of a parameter -> its name in the checkpoint
    dtype   of activations and weights in work
    absent  (module, name) -> the tensor on ``meta`` that stands there while the module has no numbers
    """

    model: Any
    path: str
    layers: nn.ModuleList
    names: Mapping[str, str]
    provider: Provider
    device: torch.device
    dtype: torch.dtype
    absent: dict[tuple[nn.Module, str], Any] = field(default_factory=dict)

    def prefix(self, index: int) -> str:
        """Return the path of a decoder layer, with its dot."""
        return f"{self.path}.{index}."

    def checkpoint_name(self, path: str) -> str:
        """Return the checkpoint's name for a parameter's path. Raises SourceError if it has none."""
        found = self.names.get(path)
        if found is None:
            raise missing_tensor(path)
        return found

    def lacking(self) -> list[str]:
        """Return the paths of tensors that the model has and the checkpoint lacks; tied ones count as one."""
        paths: dict[int, list[str]] = {}
        for path, _, _, tensor in _tensors(self.model, ""):
            paths.setdefault(id(tensor), []).append(path)
        optional = [re.compile(p) for p in getattr(self.model, "_keys_to_ignore_on_load_missing", None) or ()]
        found = [tied[0] for tied in paths.values() if not any(path in self.names for path in tied)]
        return [path for path in found if not any(pattern.search(path) for pattern in optional)]

    def names_below(self, index: int) -> list[str]:
        """Return the checkpoint's names of a decoder layer's tensors."""
        prefix = self.prefix(index)
        return [name for path, name in self.names.items() if path.startswith(prefix)]

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Put a module's tensors in memory, from the checkpoint."""
        self.fill_from(module, prefix, self.read)

    def fill_from(self, module: nn.Module, prefix: str, read: Callable[[str], torch.Tensor]) -> None:
        """Put a module's tensors in memory; ``read(path)`` gives each parameter, in any dtype."""
        self._computed_buffers(module)
        for path, owner, name, tensor in _tensors(module, prefix):
            if tensor.device.type != "meta":
                continue
            values = read(path)
            if values.shape != tensor.shape:
                raise SourceError(
                    "a tensor does not have the shape that the model needs",
                    code="shape-mismatch",
                    where=self.checkpoint_name(path),
                    expected=str(list(tensor.shape)),
                    found=str(list(values.shape)),
                    hint="config.json is of another model, or was changed: fetch that of this checkpoint",
                )
            if name in owner._parameters and values.dtype not in PLAIN:
                raise SourceError(
                    "a weight is not stored as plain numbers",
                    code="dtype",
                    where=self.checkpoint_name(path),
                    expected=", ".join(str(d).removeprefix("torch.") for d in PLAIN),
                    found=str(values.dtype).removeprefix("torch."),
                    hint=FROM_16_BIT,
                )
            dtype = self._dtype_of(path, values)
            placed = values.to(device=self.device, dtype=dtype)
            self.absent[owner, name] = tensor
            if name in owner._parameters:
                owner._parameters[name] = nn.Parameter(placed, requires_grad=False)
            else:
                owner._buffers[name] = placed

    def read(self, path: str) -> torch.Tensor:
        """Return a parameter as the checkpoint has it."""
        return self.provider.get(self.checkpoint_name(path))

    def empty(self, module: nn.Module) -> None:
        """Forget the numbers that a module was filled with, and hand their memory back to the system.

        What stood in their place is put back. New tensors on ``meta`` would do as well, but they would lie
        between this layer's numbers and the next one's: what is freed around them is never one block again,
        and the heap grows with every layer (by 2 MB each for layers of 2 million weights).
        """
        for owner in module.modules():
            for held in (owner._parameters, owner._buffers):
                for name in held:
                    held[name] = self.absent.get((owner, name), held[name])
        give_back()

    def empty_outside(self) -> None:
        """Forget everything but the decoder layers."""
        for _, module in self.outside:
            self.empty(module)

    def _dtype_of(self, path: str, values: torch.Tensor) -> torch.dtype:
        if not values.is_floating_point():
            return values.dtype
        wide = (part for name in FP32_LISTS for part in getattr(self.model, name, None) or ())
        return torch.float32 if any(part in path for part in wide) else self.dtype

    def _computed_buffers(self, module: nn.Module) -> None:
        """Make the buffers that no file holds (rotary frequencies), as transformers does when it loads."""
        for owner in module.modules():
            held = owner._buffers
            known = {n: held[n] for n in owner._non_persistent_buffers_set if n in held}
            lost = {n: b for n, b in known.items() if b is not None and b.device.type == "meta"}
            for name, buffer in lost.items():
                self.absent[owner, name] = buffer
                held[name] = torch.empty_like(buffer, device=self.device)
            if lost:
                with torch.no_grad():
                    self.model._init_weights(owner)

    @property
    def outside(self) -> list[tuple[str, nn.Module]]:
        """Modules with tensors of their own that lie in no decoder layer: (path with its dot, module)."""
        inner = {id(m) for m in self.layers.modules()}
        found = []
        for path, module in self.model.named_modules():
            own = [*module._parameters.values(), *module._buffers.values()]
            if id(module) not in inner and any(t is not None for t in own):
                found.append((f"{path}." if path else "", module))
        return found

    def fill_outside(self, *, head: bool) -> None:
        """Fill everything but the decoder layers; the head only if asked for, or tied."""
        output = self.model.get_output_embeddings()
        tied = output is not None and output.weight is self.model.get_input_embeddings().weight
        for path, module in self.outside:
            if module is output and (tied or not head):
                continue
            self.fill(module, path)
        if tied and head:
            self.absent[output, "weight"] = output.weight
            output.weight = self.model.get_input_embeddings().weight


def give_back() -> None:
    """Hand freed memory back to the system, or what lies between two layers' tensors adds up (glibc)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library: it has its own ways


class Between(Protocol):
    """What a runtime does between the linears of a layer, as hooks that stand while the layer runs."""

    def around(
        self, skeleton: Skeleton, layer: nn.Module, index: int, *, quantized: bool = True
    ) -> AbstractContextManager[None]:
        """Let a layer run so. ``quantized=False``: without what rounds."""
        ...


class Nothing:
    """A runtime that multiplies, and no more."""

    def around(
        self, skeleton: Skeleton, layer: nn.Module, index: int, *, quantized: bool = True
    ) -> AbstractContextManager[None]:
        """See ``Between``."""
        return nullcontext()


def _tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield (path, owner, local name, tensor) of all parameters and stored buffers."""
    for path, owner in module.named_modules():
        start = f"{prefix}{path}." if path else prefix
        for name, tensor in owner._parameters.items():
            if tensor is not None:
                yield start + name, owner, name, tensor
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield start + name, owner, name, buffer


def build(
    config: Mapping[str, Any], provider: Provider, device: torch.device, dtype: torch.dtype
) -> Skeleton:
    """Build the model that a config.json names, on ``meta``.

    Raises:
        Refused: a class that transformers does not have, settings that it does not take, or layers that are
            not found.
        SourceError: more layers or experts than the tensors have.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    counts.check_layers(config, list(provider.names()))
    values = {key: value for key, value in config.items() if key not in STALE}
    kind = values.pop("model_type", None)
    try:
        settings = AutoConfig.for_model(kind, **values)
        model = _on_meta(AutoModelForCausalLM, settings, dtype)
    except W4PackError:
        raise
    except Exception as err:  # of settings that are not as they should be, classes raise every kind
        raise _unknown(kind, f"{type(err).__name__}: {err}") from err
    model.eval()
    split_fused(model, most_experts(provider))
    path, layers = _decoder_layers(model, kind)
    return Skeleton(model, path, layers, _names(provider), provider, device, dtype)


def _on_meta(factory: Any, settings: Any, dtype: torch.dtype) -> Any:
    """Build a model without numbers. Some classes (Gemma 2) have eager attention alone."""
    with torch.device("meta"):
        try:
            return factory.from_config(settings, dtype=dtype, attn_implementation="sdpa")
        except ValueError as err:
            if "attention" not in str(err):
                raise
            return factory.from_config(settings, dtype=dtype, attn_implementation="eager")


def missing_tensor(path: str) -> SourceError:
    """Return the error of a tensor that a checkpoint lacks."""
    return SourceError(
        "a tensor that the model needs is not in the checkpoint",
        code="tensor-missing",
        where=path,
        hint="a download that was cut short leaves tensors out: fetch the checkpoint again",
    )


def _decoder_layers(model: nn.Module, kind: object) -> tuple[str, nn.ModuleList]:
    """Return the longest list of modules: the decoder layers."""
    lists = [
        (path, m)
        for path, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and "experts" not in path
    ]
    if not lists:
        raise _unknown(kind, "no list of decoder layers")
    return max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))


def _names(provider: Provider) -> dict[str, str]:
    """Return module path -> checkpoint name, where they differ in how experts are spelled."""
    return {families.rename_experts(QWEN, name): name for name in provider.names()}


def _unknown(kind: object, reason: str) -> W4PackError:
    return Refused(
        "transformers cannot build this model",
        code="model-unknown",
        where="config.json: model_type",
        expected="a causal language model of the installed transformers",
        found=f"{kind}: {reason.splitlines()[0][:160] if reason else 'no reason given'}",
        hint=f"another release of transformers may have the class; {UNCALIBRATED}",
    )


@contextmanager
def replaced(layers: nn.ModuleList, stand_ins: list[nn.Module]) -> Iterator[None]:
    """Put other modules in the place of the decoder layers for a while."""
    own = list(layers)
    try:
        for index, module in enumerate(stand_ins):
            layers[index] = module
        yield
    finally:
        for index, module in enumerate(own):
            layers[index] = module
