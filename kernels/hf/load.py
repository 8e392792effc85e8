"""``w4pack.load``: an artifact becomes a transformers model, its bytes read straight to where they stay.

config.json -> the model class on ``meta`` -> packed layers in place -> names compared from headers -> joins
decided -> one placement plan -> one transfer -> views of it become the model's parameters.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from w4pack.convert.errors import Refused, SourceError, UsageError, W4PackError
from w4pack.kernels import devices, launch, linears, placement, transfer
from w4pack.kernels.artifact import Artifact, open_artifact
from w4pack.kernels.hf import asking, dtypes, joins, online, quantizer, skeleton, wiring
from w4pack.kernels.hf.joins import Joins
from w4pack.kernels.hf.skeleton import Skeleton
from w4pack.kernels.modules import FusedLinear
from w4pack.kernels.placement import Target, take
from w4pack.kernels.spec import SUFFIXES

Rows = tuple[tuple[str, ...], ...]
_making = threading.Lock()  # what makes a model without memory replaces functions of the whole process


def load(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype | str | None = None,
    act_bits: int | None = None,
    kv_bits: int | None = None,
    threads: int = 0,
    check_hashes: bool = False,
) -> PreTrainedModel:
    """Load an artifact as a model of transformers, in evaluation mode.

    Args:
        path: the artifact's folder.
        device: one CPU or GPU. Tensors are read to it once; nothing is repacked.
        dtype: of activations, float16 or bfloat16; None: the model's, as config.json says. Scales keep the
            dtype of the file.
        act_bits: 4, 8 or 16, of activations in front of packed layers, where the artifact was made for it;
            None: as it was calibrated.
        kv_bits: the same, of keys and values in the cache.
        threads: that read; 0: one per core, at most 8.
        check_hashes: compare every tensor with the sha256 in ``w4pack.json`` first.

    Raises:
        UsageError: a device that is missing or too old, a dtype that the kernels do not take, bits that the
            artifact does not have.
        Refused: no artifact, or one of an unknown kind; a model class without a place for a packed layer.
        SourceError: files that are broken, or that the model does not fit.
        VerifyError: tensors that were exchanged; hashes that differ.
    """
    target, threads, asked = _device(device), _threads(threads), dtypes.asked(dtype)
    artifact = open_artifact(_folder(path), online=True)
    running = online.plan(artifact, act_bits, kv_bits)
    model, compute = _empty_model(artifact, asked)
    frame = skeleton.build(model, artifact, compute, expert_layers=False)
    found = joins.find(frame)
    wanted = _targets(frame, found)
    tensors = transfer.load_tensors(
        artifact, wanted, target, threads=threads or None, check_hashes=check_hashes
    )
    _fill(frame, found, tensors, compute)
    _tie(frame)
    model.to(target)  # buffers that are computed; everything else is there
    joins.check_orders(model)
    if running is not None:
        wiring.wire(frame, running)
    _finish(model, artifact)
    return model


# ---- before bytes move -----------------------------------------------------------------------------


def _device(device: torch.device | str) -> torch.device:
    """Return the device with its index, ready for kernels."""
    if torch.get_default_device().type == "meta":
        raise UsageError(
            "a model is loaded where new tensors have memory",
            code="no-device",
            where="torch.device or torch.set_default_device",
            expected="a device other than meta; the argument says where the model goes",
            found="meta",
        )
    found = devices.find(device)
    if found.type == "cuda":
        launch.device(found.index)
    return found


def _threads(asked: int) -> int:
    if type(asked) is not int or asked < 0:
        raise UsageError("no such number of threads", code="threads", expected="0 or more", found=repr(asked))
    return asked


def _folder(path: str | os.PathLike[str]) -> str:
    found = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(found, str):
        raise UsageError(
            "an artifact is loaded from its folder",
            code="path",
            expected="a path: str or os.PathLike[str]",
            found=repr(path)[:80],
        )
    return found


def _empty_model(artifact: Artifact, asked: torch.dtype | None) -> tuple[PreTrainedModel, torch.dtype]:
    """Return the model, parameters on ``meta`` and computed buffers real, and the dtype it computes in."""
    try:
        config = AutoConfig.from_pretrained(artifact.folder)
        compute = dtypes.chosen(artifact, asked)
        with _making, _parameters_on_meta(), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=compute)
    except W4PackError:
        raise
    except Exception as err:  # a config is a program's arguments: its errors are of any class
        raise Refused(
            "transformers cannot make a language model of this config.json",
            code="no-model",
            where=str(artifact.folder / "config.json"),
            found=_said(err),
        ) from err
    return model, compute


def _said(err: Exception) -> str:
    """Return the class and the beginning of what another library says, in one line."""
    return f"{type(err).__name__}: {' '.join(str(err).split())}"[:200]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let modules make their parameters without memory, and their buffers as ever.

    Buffers are computed (rotary frequencies), not loaded: on ``meta`` their values would be lost. Modules
    that another thread makes meanwhile are as ever.
    """
    original, thread = nn.Module.register_parameter, threading.get_ident()

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and threading.get_ident() == thread:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


# ---- what goes where -------------------------------------------------------------------------------


def _targets(frame: Skeleton, found: Joins) -> dict[str, Target]:
    """Return what is loaded: joined layers under the join's key, merged experts under the model's name, all
    else under the file's.
    """
    artifact, targets, joined = frame.artifact, dict[str, Target](), list[str]()
    for key, rows, stack in _joined(found):
        layers = [linears.side_by_side(artifact, row, same_order=True) for row in rows]
        targets |= linears.named(key, linears.stacked(layers) if stack else layers[0])
        joined += [name for row in rows for name in row]
    for path, merged in frame.names.merged(artifact.tensors).items():
        sides = [placement.concat([take(artifact.tensors[name]) for name in row], 0) for row in merged]
        targets[path] = placement.stack(sides)
    rest = linears.others(artifact, joined, targets)
    return targets | {name: target for name, target in rest.items() if frame.wants(name)}


def _joined(found: Joins) -> Iterator[tuple[str, Rows, bool]]:
    """Yield (key, rows, whether they are stacked) of everything that is joined."""
    for number, fusion in enumerate(found.fusions):
        yield f"fusion {number}", (fusion.members,), False
    for layer in found.experts:
        for number, stack in enumerate(layer.stacks):
            yield f"{layer.path} {number}", stack.rows, True


def _fill(frame: Skeleton, found: Joins, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Put tensors into their places; the joined ones first, so that what is left goes by name."""

    def layer(key: str) -> dict[str, torch.Tensor]:
        names = [f"{key}.{suffix}" for suffix in SUFFIXES]
        parts = {name.rpartition(".")[2]: tensors.pop(name) for name in names if name in tensors}
        if "bias" in parts:
            parts["bias"] = parts["bias"].to(dtype)
        return parts

    for number, fusion in enumerate(found.fusions):
        FusedLinear(fusion.spec, [frame.layer(name) for name in fusion.members], layer(f"fusion {number}"))
    for experts in found.experts:
        stacks = [layer(f"{experts.path} {number}") for number in range(len(experts.stacks))]
        joins.place_experts(frame, experts, stacks)
    for name, tensor in tensors.items():
        path = frame.names.tensor(name)[0] if name in frame.artifact.tensors else name
        module, _, leaf = path.rpartition(".")
        place = frame.model.get_submodule(module)
        tensor = tensor.to(frame.dtype_of(path))
        if leaf in place._buffers:
            place._buffers[leaf] = tensor
        else:
            place._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def _tie(frame: Skeleton) -> None:
    """Tie as transformers does: to the tensor that is in the file, if only one is."""
    there = {frame.names.tensor(name)[0] for name in frame.artifact.tensors}
    missing = {name for pair in frame.model.all_tied_weights_keys.items() for name in pair} - there
    frame.model.tie_weights(missing_keys=missing, recompute_mapping=False)


def _finish(model: PreTrainedModel, artifact: Artifact) -> None:
    """Leave the model as transformers would."""
    model.hf_quantizer = quantizer.W4PackQuantizer(quantizer.W4PackConfig(**artifact.quant))
    model.is_quantized, model.quantization_method = True, asking.METHOD
    model.config.name_or_path = str(artifact.folder)
    if (artifact.folder / "generation_config.json").is_file():
        model.generation_config = _generation_config(artifact)
    quantizer.settle(model, artifact)
    model.eval()


def _generation_config(artifact: Artifact) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(artifact.folder)
    except Exception as err:  # transformers does not check what it reads
        raise SourceError(
            "transformers cannot read this generation_config.json",
            code="generation-config",
            where=str(artifact.folder / "generation_config.json"),
            found=_said(err),
            hint="copy it from the source of the artifact, or remove it",
        ) from err
