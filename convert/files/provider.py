"""Tensors by name as torch tensors: what rotation and quantization read a model through.

A provider hands out one tensor at a time and keeps none, so memory is that of what the caller holds. The
plain provider reads a checkpoint; others stand before it and change tensors on the way (``rotate.Rotated``).
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from w4pack.convert.core.families import natural_key
from w4pack.convert.errors import Refused
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.files.twobuffers import TwoBuffers

if TYPE_CHECKING:
    import torch

# safetensors tag -> name of the torch dtype that has the same bytes
TORCH_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


class Provider(Protocol):
    """Tensors of a model by their checkpoint names. Safe to call from several threads."""

    def names(self) -> Iterable[str]:
        """Return every name, in natural order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Return dtype tag and shape. Raises KeyError for a name that is not there."""
        ...

    def get(self, name: str, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
        """Return a tensor, the caller's own, in ``dtype`` or else in its own dtype.

        It lies on the CPU, or on the device of the provider if that has one.
        """
        ...


def torch_dtype(tag: str) -> "torch.dtype":
    """Return the torch dtype of a safetensors tag. Raises KeyError for a tag without one."""
    import torch

    dtype: torch.dtype = getattr(torch, TORCH_DTYPES[tag])
    return dtype


class CheckpointProvider:
    """The tensors of an open checkpoint, as they lie in its files.

    device  where they are brought; None: they stay on the CPU
    """

    def __init__(self, checkpoint: Checkpoint, device: "torch.device | None" = None) -> None:
        self.checkpoint = checkpoint
        self._buffers = None if device is None or device.type == "cpu" else TwoBuffers(device)

    def names(self) -> Iterable[str]:
        """See ``Provider``."""
        return self.checkpoint.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """See ``Provider``."""
        return self.checkpoint.tensors[name]

    def get(self, name: str, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
        """See ``Provider``. Raises Refused for a dtype that torch does not have."""
        info = self.info(name)
        return self._read(info, 0, info.nbytes, info.shape, dtype)

    def rows(self, name: str, start: int, stop: int, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
        """Return ``get(name)[start:stop]`` and read no more than that. Raises IndexError out of range."""
        info = self.info(name)
        if not 0 <= start <= stop <= info.shape[0]:
            raise IndexError(f"rows {start} to {stop} of {name}: it has {info.shape[0]}")
        row = info.nbytes // info.shape[0] if info.shape[0] else 0
        return self._read(info, start * row, (stop - start) * row, (stop - start, *info.shape[1:]), dtype)

    def _read(
        self, info: TensorInfo, offset: int, nbytes: int, shape: tuple[int, ...], dtype: "torch.dtype | None"
    ) -> "torch.Tensor":

        if info.dtype not in TORCH_DTYPES:
            raise Refused(
                "no torch dtype has these values",
                code="dtype",
                where=f"{info.file}, {info.name}",
                expected=", ".join(TORCH_DTYPES),
                found=info.dtype,
                hint="save this tensor in one of these dtypes",
            )
        own = torch_dtype(info.dtype)
        values = self._bytes(info, offset, nbytes).view(own).reshape(shape)
        return values if dtype is None else values.to(dtype)

    def _bytes(self, info: TensorInfo, offset: int, nbytes: int) -> "torch.Tensor":
        """Return bytes of a tensor, flat uint8. On the CPU into memory that nobody has cleared before."""
        import torch

        if self._buffers is not None:
            return self._buffers.read(
                lambda at, part: self.checkpoint.read_into(info, offset + at, part), nbytes
            )
        made = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            self.checkpoint.read_into(info, offset, memoryview(made.numpy().data))
        return made


class Added:
    """A provider of a source's tensors and of some more. See ``Provider``.

    tensors  by name; the caller's, not changed
    """

    def __init__(
        self, source: Provider, infos: Mapping[str, TensorInfo], tensors: "Mapping[str, torch.Tensor]"
    ) -> None:
        self.source, self.infos, self.tensors = source, infos, tensors

    def names(self) -> Iterable[str]:
        """See ``Provider``."""
        return sorted({*self.source.names(), *self.infos}, key=natural_key)

    def info(self, name: str) -> TensorInfo:
        """See ``Provider``. Of an added tensor: no file, no offset."""
        return self.infos[name] if name in self.infos else self.source.info(name)

    def get(self, name: str, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
        """See ``Provider``."""
        if name not in self.infos:
            return self.source.get(name, dtype)
        return self.tensors[name].to(dtype, copy=True)


def is_finite(values: "torch.Tensor") -> bool:
    """Whether no value is NaN or infinite: by the least and the largest, without a mask of them all."""
    import torch

    return not values.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())
