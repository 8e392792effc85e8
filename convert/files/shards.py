"""Lays out new safetensors files, byte for byte: which tensor lies in which file, and where.

The bytes depend on names, dtypes, shapes and the shard limit only. Tensors are sorted by the largest power of
two, at most 4096, that divides their size, so that each of them starts at a multiple of its own power without
padding between tensors.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from w4pack.convert.files.tensorfile import METADATA, TensorInfo, natural_order, tensor_nbytes

PAGE = 4096

FORMAT_METADATA: dict[str, str] = {"format": "pt"}  # transformers refuses a file without it


class Shard(NamedTuple):
    """One planned file: its name, its tensors with final offsets, the bytes before the data, its size."""

    name: str
    tensors: tuple[TensorInfo, ...]
    header: bytes
    size: int


def new_tensor(name: str, dtype: str, shape: Sequence[int]) -> TensorInfo:
    """Describe a tensor that has no place yet."""
    return TensorInfo(name, dtype, tuple(shape), "", 0, tensor_nbytes(dtype, shape))


def alignment(nbytes: int) -> int:
    """Return the largest power of two, at most 4096, that divides ``nbytes``; 4096 for an empty tensor."""
    return min(nbytes & -nbytes, PAGE) if nbytes else PAGE


def order_tensors(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Sort as in the file: alignment descending, then natural order of the names.

    All sizes before a tensor are multiples of its own alignment, so it starts at such a multiple.
    """
    return sorted(tensors, key=lambda info: (-alignment(info.nbytes), natural_order(info.name)))


def header_bytes(tensors: Sequence[TensorInfo], metadata: Mapping[str, str] = FORMAT_METADATA) -> bytes:
    """Return all bytes before the data of ``tensors`` in file order, padded so that data starts at a page."""
    entries: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for info in tensors:
        end = at + info.nbytes
        entries[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(len(text) + 8) % PAGE)
    return len(text).to_bytes(8, "little") + text


def place(name: str, tensors: Iterable[TensorInfo], metadata: Mapping[str, str] = FORMAT_METADATA) -> Shard:
    """Give ``tensors`` their order and their offsets in the file ``name``."""
    ordered = order_tensors(tensors)
    header = header_bytes(ordered, metadata)
    at = len(header)
    placed = []
    for info in ordered:
        placed.append(info._replace(file=name, offset=at))
        at += info.nbytes
    return Shard(name, tuple(placed), header, at)


def plan_shards(
    tensors: Iterable[TensorInfo],
    max_shard_size: int,
    groups: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] = FORMAT_METADATA,
) -> list[Shard]:
    """Divide ``tensors`` over files of at most ``max_shard_size`` bytes of data, in natural order of names.

    ``groups`` maps a tensor's name to that of its linear: a linear stays in one shard where the limit allows.
    A tensor above the limit gets a shard of its own. One shard is called ``model.safetensors``.
    """
    bins = _fill(_units(tensors, groups or {}), max_shard_size)
    if len(bins) == 1:
        return [place("model.safetensors", bins[0], metadata)]
    names = [f"model-{i:05d}-of-{len(bins):05d}.safetensors" for i in range(1, len(bins) + 1)]
    return [place(name, part, metadata) for name, part in zip(names, bins, strict=True)]


def _units(tensors: Iterable[TensorInfo], groups: Mapping[str, str]) -> list[list[TensorInfo]]:
    """Collect the tensors of each linear; any other tensor stands alone. In order of their first names."""
    units: dict[tuple[bool, str], list[TensorInfo]] = {}
    for info in sorted(tensors, key=_natural):
        grouped = info.name in groups
        units.setdefault((grouped, groups.get(info.name, info.name)), []).append(info)
    return list(units.values())


def _natural(info: TensorInfo) -> tuple[str, str]:
    return natural_order(info.name)


def _fill(units: Iterable[list[TensorInfo]], limit: int) -> list[list[TensorInfo]]:
    """Fill shards one after another; a unit above the limit is divided tensor by tensor."""
    bins: list[list[TensorInfo]] = [[]]
    used = 0
    for unit in units:
        size = sum(info.nbytes for info in unit)
        parts = [unit] if size <= limit else [[info] for info in unit]
        for part in parts:
            size = sum(info.nbytes for info in part)
            if bins[-1] and used + size > limit:
                bins.append([])
                used = 0
            bins[-1].extend(part)
            used += size
    return bins


def index_json(shards: Sequence[Shard]) -> bytes:
    """Return ``model.safetensors.index.json``: the size of all tensors, and the shard of each."""
    where = {info.name: shard.name for shard in shards for info in shard.tensors}
    total = sum(info.nbytes for shard in shards for info in shard.tensors)
    weight_map = {name: where[name] for name in sorted(where, key=natural_order)}
    value = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(value, ensure_ascii=False, indent=2).encode("utf-8") + b"\n"
