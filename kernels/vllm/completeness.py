"""What an engine made and took of a checkpoint, beside what the files hold: is something missing, or left?"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from vllm.distributed import get_pp_group

from w4pack.convert.errors import Refused, SourceError, W4PackError, name_some
from w4pack.convert.files.tensorfile import TensorInfo, natural_order
from w4pack.kernels.artifact import Artifact, compare_names, is_computed
from w4pack.kernels.packed import shown, tensor_error
from w4pack.kernels.vllm.lazy import Ledger, address
from w4pack.kernels.vllm.linear import W4PackLinearMethod
from w4pack.kernels.vllm.moe import W4PackMoEMethod
from w4pack.kernels.vllm.unusable import METHOD

Read = tuple[Mapping[str, TensorInfo], Ledger]  # what a folder's files hold, and what became of it
DRAFTS = re.compile(r"(?:.*\.)?mtp(?:_\w+)?\.")  # layers that predict several tokens, in their own place


def check_built(model: nn.Module, config: Any, *, is_online: bool) -> None:
    """Compare the layers that the engine has made with the packed modules of the file.

    is_online  the engine was told to quantize layers by itself: its methods then stand in the place of ours

    Raises:
        Refused: packed modules that are no layer of the engine's: its loader would fail without a name.
    """
    if get_pp_group().world_size > 1:  # most of them are another stage's
        return
    ours = _methods(model)
    built = {name for method in ours for name in method.packed}
    known = ours[0].source.specs if ours else ()
    lost = [name for name in known if name not in built and not _left_aside(f"{name}.weight", config)]
    if lost or not ours:
        raise Refused(
            "the engine's model has no layers for packed modules of the artifact",
            code="no-layer",
            where=name_some(lost) if lost else type(model).__name__,
            expected="the layers under the names of the file",
            found=f"{len(built)} packed layers",
            hint="start the engine without quantizing once more" if is_online else None,
        )


def _methods(model: nn.Module) -> list[W4PackLinearMethod | W4PackMoEMethod]:
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    return [method for method in methods if isinstance(method, (W4PackLinearMethod, W4PackMoEMethod))]


def check_same(model: nn.Module, found: Artifact) -> None:
    """Compare an artifact that goes into a running model with the one that it was started with.

    Raises:
        SourceError: lists all tensors that are missing, too many, or of another shape or dtype.
    """
    held = next((method.source.artifact for method in _methods(model)), None)
    if held is not None:
        compare_names(found, {name: (info.dtype, info.shape) for name, info in held.tensors.items()})


def not_taken(info: TensorInfo, err: Exception, model_config: Any) -> SourceError:
    """Return the error for a tensor at which a model's code has stopped: it does not say which one."""
    return SourceError(
        "the engine's model does not take a tensor of the checkpoint",
        code="tensor-mismatch",
        where=f"{info.file}, {info.name}",
        expected="a tensor as config.json says",
        found=f"{shown(info)}; {type(err).__name__} {' '.join(str(err).split())[:200]}".rstrip(),
        hint=f"w4pack verify {model_config.model}" if model_config.quantization == METHOD else None,
    )


def check_taken(model: nn.Module, read: Sequence[Read], config: Any) -> None:
    """Compare what the engine took with what the files have, and what it filled with what it needs.

    The engine leaves tensors aside without a word where it has no place for them (biases above all).

    Raises:
        SourceError: lists all tensors that are missing or too many.
    """
    problems: list[W4PackError] = []
    written = {address for _, ledger in read for address in ledger.written}
    for name, parameter in model.named_parameters():
        place = address(parameter)
        if place is not None and place not in written and parameter.numel() > 1:
            shape = f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
            what = "a tensor of the model is missing in the artifact"
            problems.append(tensor_error(what, name, shape, None, "missing-tensor"))
    if get_pp_group().world_size == 1:  # else most tensors are another stage's
        for tensors, ledger in read:
            for name in sorted(tensors.keys() - ledger.taken, key=natural_order):
                if not _left_aside(name, config):
                    what = "the artifact has a tensor that the engine has no place for"
                    found = shown(tensors[name])
                    problems.append(tensor_error(what, name, "no such tensor", found, "extra-tensor"))
    if problems:
        raise Refused.together(problems)


def _left_aside(name: str, model_config: Any) -> bool:
    """Tell whether the engine leaves a tensor aside on purpose.

    Such are tables that it computes, the head of a model that ties it or pools, and layers that draft.
    """
    config = model_config.hf_text_config
    if is_computed(name) or DRAFTS.match(name) or _is_part(config):
        return True
    has_no_head = getattr(config, "tie_word_embeddings", False) or model_config.runner_type == "pooling"
    if has_no_head and name.startswith("lm_head."):
        return True
    number = re.match(r"(?:.*\.)?layers\.(\d+)\.", name)
    drafts = getattr(config, "num_nextn_predict_layers", None)
    return bool(drafts) and number is not None and int(number[1]) >= config.num_hidden_layers


def _is_part(config: Any) -> bool:
    """Tell whether a model is only the layers of another's checkpoint that draft for it."""
    return "mtp" in str(getattr(config, "model_type", ""))
