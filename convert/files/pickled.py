"""Weights in pickles (``pytorch_model.bin`` and old ``.pt`` files), read without running anything in them.

torch loads them with ``weights_only=True``: only tensors and plain containers come out, anything else stops
the load. The files are mapped, not read, so memory stays flat; the old format from before torch 1.6 cannot be
mapped and is read whole, which a notice says. Names that share memory come out as tensors of their own; only
the alias of a tie that the config names is left away, because a loader makes it again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, cast

from w4pack.convert.core.facts import Warning_
from w4pack.convert.errors import SourceError, require_extra
from w4pack.convert.files.store import Store
from w4pack.convert.files.tensorfile import TensorInfo, natural_order

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

OUTPUT_NAMES = ("lm_head.", "embed_out.", "output.")  # the half of a tie that loaders make themselves

KEPT_COPIES = 2  # bands of one tensor are read one after another; more would hold the model in memory

# torch dtype -> safetensors tag
TAGS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
    "complex64": "C64",
}


class _PathStore(Protocol):
    def path(self, name: str) -> Path: ...


@dataclass(slots=True, eq=False)
class PickledFile:
    """One loaded pickle as a ``TensorFile``.

    tied_names  names that were left away because the config ties them to another tensor
    """

    tensors: tuple[TensorInfo, ...]
    values: Mapping[str, "torch.Tensor"] = field(repr=False)
    tied_names: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    _copies: "dict[str, NDArray[np.uint8]]" = field(default_factory=dict, repr=False)
    _lock: Any = field(default_factory=Lock, repr=False)

    def read_into(self, info: TensorInfo, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a tensor from ``byte_offset`` of the tensor on."""
        import numpy as np

        target = np.frombuffer(buffer, dtype=np.uint8)
        target[:] = self._bytes(info.name)[byte_offset : byte_offset + target.size]

    def _bytes(self, name: str) -> "NDArray[np.uint8]":
        """Return the bytes of a tensor; a strided view is copied, and the last few copies are kept."""
        import torch

        tensor = self.values[name].detach()
        if tensor.is_contiguous():
            return cast("NDArray[np.uint8]", tensor.reshape(-1).view(torch.uint8).numpy())
        with self._lock:
            flat = self._copies.get(name)
            if flat is None:
                while len(self._copies) >= KEPT_COPIES:
                    del self._copies[next(iter(self._copies))]
                flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                self._copies[name] = flat
        return flat


def open_pickles(
    store: Store,
    names: Sequence[str],
    *,
    tied: bool,
    notices: list[Warning_],
) -> dict[str, PickledFile]:
    """Load the pickles ``names`` of ``store``. ``tied``: the config ties the output head to the embedding.

    Raises SourceError for a file that is no pickle of tensors, and UsageError if torch cannot be imported.
    """
    require_extra(f"reading the pickle {names[0]}", ("torch",), "quantize")
    opened = {}
    for name in names:
        opened[name] = _open(name, _load(store, name, notices), tied, notices)
    return opened


def _load(store: Store, name: str, notices: list[Warning_]) -> Any:
    """Load one file with ``weights_only``; the zip format is mapped, the old one read."""
    import pickle
    import warnings
    import zipfile

    import torch

    if not hasattr(store, "path"):
        raise SourceError(
            "weights in pickles cannot be read from a distance",
            code="pickle-remote",
            where=f"{store.label}, {name}",
            hint="download the model and give its folder",
        )
    path = cast(_PathStore, store).path(name)
    store.blob(name)  # opens it: a file that cannot be read is reported as such, not as a bad pickle
    mapped = zipfile.is_zipfile(path)
    if not mapped:
        size = store.files()[name]
        found = f"the old format, which takes {size:,} bytes of memory"
        notices.append(Warning_("pickle-in-memory", name, "a pickle in the zip format", found))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as err:
        raise SourceError(
            f"`{name}` holds other objects than tensors",
            code="pickle-code",
            where=name,
            expected="tensors by name",
            found=_reason(str(err)),
        ) from None
    except Exception as err:  # torch raises RuntimeError, EOFError, ValueError, KeyError ... on damaged files
        raise SourceError(
            f"`{name}` is not a readable pickle",
            code="bad-pickle",
            where=name,
            expected="a file written by torch.save",
            found=f"{store.files()[name]:,} bytes; {type(err).__name__}",
        ) from err


def _reason(text: str) -> str:
    """Pick the sentence of torch's long message that names the object."""
    for mark in ("Unsupported global:", "Unsupported class", "Unsupported operand", "Trying to", "Can only"):
        at = text.find(mark)
        if at >= 0:
            return text[at:].partition("\n")[0].partition(". ")[0][:200]
    return text.partition("\n")[0][:200] or "something else"


def _open(name: str, loaded: Any, tied: bool, notices: list[Warning_]) -> PickledFile:
    values = _named_tensors(name, loaded)
    dropped = _tied_aliases(values) if tied else ()
    if dropped:
        found = f"{', '.join(dropped)}: tied by the config, written once"
        notices.append(Warning_("tied-alias", name, "tensors that share no memory", found))
    infos = [_info(name, key, value) for key, value in values.items() if key not in dropped]
    return PickledFile(tuple(sorted(infos, key=lambda info: natural_order(info.name))), values, dropped)


def _named_tensors(name: str, loaded: Any) -> "dict[str, torch.Tensor]":
    import torch

    if not isinstance(loaded, dict):
        raise _wrong(name, name, type(loaded).__name__)
    for key, value in loaded.items():
        if type(key) is not str:
            raise _wrong(name, name, f"a key of type {type(key).__name__}")
        if not isinstance(value, torch.Tensor):
            raise _wrong(name, f"{name}, {key}", type(value).__name__)
    return loaded


def _wrong(name: str, where: str, found: str) -> SourceError:
    what = f"`{name}` holds other objects than tensors"
    return SourceError(what, code="pickle-object", where=where, expected="tensors by name", found=found)


def _info(file: str, key: str, value: "torch.Tensor") -> TensorInfo:
    import torch

    tag = TAGS.get(str(value.dtype).removeprefix("torch."))
    if tag is None or value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
        found = f"{value.dtype}, {value.layout}, {value.device.type}"
        what = f"`{key}` is a kind of tensor that safetensors cannot hold"
        raise SourceError(
            what, code="pickle-tensor", where=f"{file}, {key}", expected="a plain tensor", found=found
        )
    return TensorInfo(key, tag, tuple(value.shape), file, 0, value.numel() * value.element_size())


def _tied_aliases(values: "Mapping[str, torch.Tensor]") -> tuple[str, ...]:
    """Return the names of output heads that are the very same memory as another tensor."""
    same: dict[tuple[Any, ...], list[str]] = {}
    for key, value in values.items():
        if value.numel():
            place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
            same.setdefault((*place, value.dtype), []).append(key)
    heads = []
    for names in same.values():
        own = [name for name in names if name.startswith(OUTPUT_NAMES)]
        if own and len(own) < len(names):
            heads += own
    return tuple(heads)
