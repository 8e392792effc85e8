"""The plan: every byte of the output and where it comes from, fixed from headers and small tensors alone.

Dry run, estimate, execution, resume, verification and unpacking read this one value. It is plain data: it
goes to JSON and back, and its digest identifies the job.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from w4pack.convert.files.shards import Shard, place
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.planning.decisions import DensePlan, LayerPlan
from w4pack.convert.planning.record import from_plain, to_plain

DISK_BASE = 1 << 20  # bytes for small files
DISK_PER_TENSOR = 2048  # bytes for a tensor in headers, manifest and journal


@dataclass(frozen=True, slots=True)
class OutTensor:
    """One tensor of the output: dtype tag, shape, shard file, offset in it and size in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Op:
    """One step: ``copy`` a tensor's bytes, rebuild a ``dense`` tensor, write ``zeros``, make a ``layer``, or
    make a tensor of the ``rotated`` model.

    source   name of a tensor (copy, dense), of a module (layer), or of the tensor itself (rotated)
    outputs  names of the tensors it makes
    """

    kind: Literal["copy", "dense", "zeros", "layer", "rotated"]
    source: str
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Identity of one source file.

    header  sha256 of a weight file's first bytes, of every other file's whole content
    sample  sha256 of some of a weight file's values; None for every other file
    sha256  of the whole file, only with ``--strict``
    """

    name: str
    size: int
    header: str
    sample: str | None
    sha256: str | None


@dataclass(frozen=True)
class Plan:
    """Everything that decides the output's bytes.

    options         those that differ from their defaults
    origin          Hub id and revision, or None for a folder (a local path is never recorded)
    quant_config    the block that replaces the source's, or None
    config_changes  other top-level keys of config.json that change
    rotation        the rotations of the weights, with their digests; None: they are not rotated
    quantization    what decides the codes beside the options (calibration, device); None: none are chosen
    """

    version: str
    target: str
    options: Mapping[str, Any]
    origin: Mapping[str, str] | None
    files: tuple[SourceFile, ...]
    layers: tuple[LayerPlan, ...]
    dense: tuple[DensePlan, ...]
    dropped: tuple[str, ...]
    config_changes: Mapping[str, Any]
    quant_config: Mapping[str, Any] | None
    tensors: tuple[OutTensor, ...]
    ops: tuple[Op, ...]
    lossless: bool
    source_bytes: int
    rotation: Mapping[str, Any] | None = None
    quantization: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        value: dict[str, Any] = to_plain(self)
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Plan":
        """Rebuild a plan. Raises ValueError on anything but the result of ``to_json``."""
        return from_plain(cls, value)

    @cached_property
    def digest(self) -> str:
        """sha256 over the plan's JSON, item by item: equal digests mean equal bytes from equal source data.

        Hashes of source files are left out: a run with ``--strict`` is the same job as one without.
        """
        sha = hashlib.sha256()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "files":
                value = tuple(replace(f, sha256=None) for f in value)
            sha.update(f"\n{field.name}".encode())
            for item in value if isinstance(value, tuple) else (value,):
                sha.update(b"\n" + json.dumps(to_plain(item), sort_keys=True, separators=(",", ":")).encode())
        return sha.hexdigest()

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the output needs at most: tensors, headers, and the records of manifest and journal."""
        return self.output_bytes + DISK_BASE + DISK_PER_TENSOR * len(self.tensors)

    def shards(self) -> list[Shard]:
        """Rebuild the shard files with their headers."""
        by_file: dict[str, list[TensorInfo]] = {}
        for t in self.tensors:
            by_file.setdefault(t.shard, []).append(
                TensorInfo(t.name, t.dtype, t.shape, t.shard, t.offset, t.nbytes)
            )
        return [place(name, infos) for name, infos in by_file.items()]
