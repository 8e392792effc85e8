"""Tables that every model computes for itself and that old files hold: left aside, and compared first.

They are rotary frequencies and their cosines and sines, at whatever precision a tool kept them. Other values
say that the weights were made for other positions than the model computes: a config that lost its
``rope_theta`` or scaling. transformers drops them without a word.
"""

import os
import warnings
from collections.abc import Iterator
from math import prod

import torch
from torch import nn

from w4pack.convert.core.facts import Warning_
from w4pack.convert.errors import SHOWN
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.kernels import transfer
from w4pack.kernels.artifact import Artifact, is_computed

FREQUENCIES = "inv_freq"
POSITIONS = 256  # of a table of cosines that are compared: other frequencies differ in the first of them
ROUNDINGS = 4  # of the file's dtype, by which a table that was computed in it may be off
FP32 = 1e-5  # relative: what other orders of the same operations in float32 leave of a frequency


def tell(model: nn.Module, artifact: Artifact) -> None:
    """Warn of tables that are not what the model computes."""
    own = [tensor.float().cpu() for name, tensor in model.named_buffers() if name.endswith(FREQUENCIES)]
    scales = {float(getattr(module, "attention_scaling", 1.0)) for module in model.modules()}
    names = [name for name in artifact.dense if is_computed(name) and not _known(artifact, name, own, scales)]
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        warning = Warning_(
            "computed-table",
            f"{artifact.folder}: {', '.join(names[:SHOWN])}{more}",
            "what the model computes by config.json",
            "another table, which is left aside",
            "compare rope_theta and the scaling with the config of the source",
        )
        warnings.warn(warning.text(), stacklevel=4)


def _known(artifact: Artifact, name: str, own: list[torch.Tensor], scales: set[float]) -> bool:
    """Whether a table is, but for rounding, one that the model computes."""
    info = artifact.tensors[name]
    dtype = transfer.torch_dtype(info.dtype, name)
    if not dtype.is_floating_point or not info.shape:
        return False
    table, off = _first(artifact, info, dtype), ROUNDINGS * torch.finfo(dtype).eps
    if name.endswith(FREQUENCIES):
        least = torch.finfo(dtype).smallest_normal
        return any(_close(table, wanted, max(off, FP32) * wanted.abs().clamp(min=least)) for wanted in own)
    turned = _cosines if name.endswith("cos_cached") else _sines
    wanted = (scale * part for each in own for part in turned(each, table) for scale in scales)
    return any(_close(table, one, torch.full((), off + FP32 * POSITIONS)) for one in wanted)


def _first(artifact: Artifact, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
    """Return a list of frequencies, or the first positions of a table, (positions, width)."""
    shape = info.shape if info.name.endswith(FREQUENCIES) else (prod(info.shape[:-1]), info.shape[-1])
    rows = min(shape[0], POSITIONS) if len(shape) == 2 else shape[0]
    nbytes = info.nbytes // shape[0] * rows if shape[0] else 0
    with artifact.files[info.file][0].open("rb") as file:
        raw = bytearray(os.pread(file.fileno(), nbytes, info.offset))
    found = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return found.float().reshape(rows, *shape[1:])


def _cosines(frequencies: torch.Tensor, table: torch.Tensor) -> Iterator[torch.Tensor]:
    return (angles.cos() for angles in _angles(frequencies, table))


def _sines(frequencies: torch.Tensor, table: torch.Tensor) -> Iterator[torch.Tensor]:
    return (angles.sin() for angles in _angles(frequencies, table))


def _angles(frequencies: torch.Tensor, table: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield position times frequency, each frequency once, and twice as models of the transformers kind."""
    angles = torch.outer(torch.arange(table.shape[0], dtype=torch.float32), frequencies)
    yield angles
    yield torch.cat([angles, angles], -1)


def _close(table: torch.Tensor, wanted: torch.Tensor, off: torch.Tensor) -> bool:
    return table.shape == wanted.shape and bool(((table - wanted).abs() <= off).all())
