"""The manifest's records of the way back, held against the artifact before anything relies on them.

A manifest may come from a stranger: every number is bounded by what the artifact really holds, every name
must be one that exists, and the whole must come to the tensors that the source had.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from w4pack.convert import formats
from w4pack.convert.core import dtypes
from w4pack.convert.core.order import sorted_rows
from w4pack.convert.errors import Refused, SourceError, name_some
from w4pack.convert.files import manifestform
from w4pack.convert.files.checkpoint import CONFIG, QUANT_CONFIGS, Checkpoint
from w4pack.convert.jobs import manifest
from w4pack.convert.jobs.rebuild import MAX_INLINE, LayerRecord, group_of
from w4pack.convert.planning.record import Misfit, from_plain
from w4pack.convert.source.detect import Source
from w4pack.convert.source.layers import SourceLayer

CONFIGS = (CONFIG, *QUANT_CONFIGS)
T = TypeVar("T")
MAX_DROPPED = 1 << 26  # bytes; a dropped tensor is a bias of zeros


@dataclass(frozen=True, slots=True)
class DenseRecord:
    """A tensor outside the linears: ``name``, ``shape`` in the artifact; ``source``, its shape before."""

    source: str
    name: str
    shape: tuple[int, ...]
    rows_from: str | None
    halves: int
    source_shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class DroppedRecord:
    """A tensor of zeros that the artifact leaves out."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def records_of(value: Mapping[str, Any], source: Source) -> Mapping[str, Any]:
    """Return what an output's manifest says of the way back. Raises Refused where it says nothing."""
    record: Mapping[str, Any] | None = value.get("unpack")
    path = source.checkpoint.store.label
    if record is not None:
        return record
    if "quantization" in value:
        raise Refused(
            "this output was quantized by w4pack: there is no packed checkpoint that it could go back to",
            code="not-invertible",
            where=path,
            expected="an artifact whose codes were taken from a packed checkpoint",
            found=f"codes that {_origin(value)} was rounded to",
            hint=_from_quantized(path, online=bool((source.quant_config or {}).get("online"))),
        )
    if value["target"] in manifest.TARGETS_WITH_RECORDS:
        raise manifestform.damaged(f"{path}/{manifest.NAME}", "unpack", "an object", "nothing")
    raise Refused(
        "only artifacts can be unpacked",
        code="not-an-artifact",
        where=path,
        expected="an output of `--to marlin`",
        found=f"an output of `--to {value['target']}`",
        hint=f"it is a checkpoint already: `w4pack inspect {path}` says which one, "
        f"`w4pack verify {path} --against SRC` compares it with its source",
    )


def _origin(value: Mapping[str, Any]) -> str:
    name = (value["source"].get("origin") or {}).get("id")
    return f"the 16-bit model {name}" if name else "a 16-bit model"


def _from_quantized(path: str, *, online: bool) -> str:
    """Return the way on from an output that was quantized from 16 bit."""
    if online:
        return "the weights in 16 bit are those of the model that it was made from: keep that one"
    return (
        f"`w4pack convert {path} OUT --to dense` makes a 16-bit model of its weights; what rounding took is "
        "in the model that it was made from alone"
    )


class Records:
    """What a manifest says of the way back, checked against the artifact. Raises SourceError or Refused."""

    def __init__(self, source: Source, value: Mapping[str, Any]) -> None:
        record = records_of(value, source)
        self.made = {layer.name: layer for layer in source.layers}
        self._read(record)
        self._refuse_lossy(value)
        self._check(source.checkpoint, record["source_tensors"])
        _check_configs(self.configs, value)

    def _read(self, record: Mapping[str, Any]) -> None:
        try:
            layers = record["layers"].items()
            self.layers = {n: from_plain(LayerRecord, v, f"unpack.layers.{n}") for n, v in layers}
            self.dense = _rows(DenseRecord, record, "dense")
            self.dropped = _rows(DroppedRecord, record, "dropped")
        except Misfit as err:
            _unfit(err.where, err.expected, err.found)
        self.configs = dict(record["configs"])
        for name, text in self.configs.items():
            if name not in CONFIGS:
                _unfit("unpack.configs", f"{', '.join(CONFIGS)}", name[:80])
            _check_text(text, f"unpack.configs.{name}")
        self.by_source = {rec.name: rec for rec in self.layers.values()}

    def _refuse_lossy(self, value: Mapping[str, Any]) -> None:
        lossy = [rec.name for rec in self.layers.values() if not rec.lossless]
        if lossy:
            entry = value["layers"].get(lossy[0])
            reason = entry.get("reason") if isinstance(entry, dict) else None
            raise Refused(
                "some layers cannot go back: their codes are not in the artifact",
                code="not-invertible",
                where=name_some(lossy),
                expected="layers kept bit for bit",
                found=f"{len(lossy)} layers that are not ({reason or 'not kept bit for bit'})",
                hint="keep the source; the artifact itself stays usable",
            )

    def _check(self, checkpoint: Checkpoint, wanted: object) -> None:
        for name, rec in self.layers.items():
            layer = self.made.get(name)
            if layer is None:
                _unfit(f"unpack.layers.{name}", "a layer of the artifact", "none of this name")
            self._check_layer(name, rec, layer)
        for item in self.dense:
            self._check_dense(item, checkpoint)
        for gone in self.dropped:
            _bounded(gone.name, gone.dtype, gone.shape, MAX_DROPPED)
        tensors = [*self._dense_tensors(checkpoint), *((d.name, d.dtype, d.shape) for d in self.dropped)]
        for rec in self.layers.values():
            tensors += [(f"{rec.name}.{k.suffix}", k.dtype, k.shape) for k in (rec.codes, *rec.small)]
        if len({name for name, _, _ in tensors}) != len(tensors) or manifest.names_digest(tensors) != wanted:
            _unfit("unpack", "the names and shapes of the source's tensors", "others")

    def _dense_tensors(self, checkpoint: Checkpoint) -> list[tuple[str, str, Sequence[int]]]:
        return [(d.source, checkpoint.tensors[d.name].dtype, d.source_shape) for d in self.dense]

    def _check_dense(self, item: DenseRecord, checkpoint: Checkpoint) -> None:
        info = checkpoint.tensors.get(item.name)
        where = f"unpack.dense: {item.name}"
        if info is None or item.shape != info.shape:
            _unfit(where, "a tensor of the artifact", f"{list(item.shape)}")
        shape = item.source_shape
        if len(shape) != len(info.shape) or any(
            not 0 <= a <= b for a, b in zip(shape, info.shape, strict=True)
        ):
            _unfit(where, f"at most {list(info.shape)}", str(list(shape)))
        self._check_fold(where, item.rows_from, item.halves, shape[0] if shape else 0)

    def _check_layer(self, name: str, rec: LayerRecord, layer: SourceLayer) -> None:
        where, scheme = f"unpack.layers.{name}", rec.scheme
        sizes = (
            1 <= scheme.in_features <= layer.scheme.in_features
            and 1 <= scheme.out_features <= layer.scheme.out_features
        )
        if not sizes or scheme.bits not in (4, 8) or (scheme.group_size < 1 and scheme.group_size != -1):
            _unfit(
                where,
                f"a scheme of at most {layer.scheme.in_features} x {layer.scheme.out_features}",
                scheme.label(),
            )
        if rec.layout not in formats.FORMATS or scheme.scale_dtype not in dtypes.FLOAT_TAGS:
            _unfit(
                where, f"one of {', '.join(formats.FORMATS)}", f"{rec.layout}, {scheme.scale_dtype} scales"
            )
        layout = formats.get(rec.layout)
        grid = layout.grid(scheme.bits)
        codes = (grid.suffix, grid.dtype, grid.shape(scheme.in_features, scheme.out_features))
        if (rec.codes.suffix, rec.codes.dtype, rec.codes.shape) != codes:
            _unfit(where, f"codes as {codes}", f"{(rec.codes.suffix, rec.codes.dtype, rec.codes.shape)}")
        for kept in rec.small:
            if kept.suffix not in layout.SUFFIXES:
                _unfit(where, f"tensors {', '.join(layout.SUFFIXES)}", kept.suffix)
            _bounded(f"{name}.{kept.suffix}", kept.dtype, kept.shape, MAX_INLINE)
        group = group_of(rec)
        if group is not None:
            _check_group(group, rec, where)
        elif rec.rows != "natural":
            _unfit(where, "a group map for sorted rows", "none")
        self._check_fold(where, rec.cols_from, rec.halves, scheme.out_features)

    def _check_fold(self, where: str, source: str | None, halves: int, size: int) -> None:
        if halves not in (1, 2):
            _unfit(where, "1 or 2 halves", str(halves)[:40])
        if source is None:
            return
        down = self.by_source.get(source)
        if down is None or down.group is None or down.scheme.in_features * halves != size:
            _unfit(where, f"a folded layer of {size // halves} rows", source)

    def order_of(self, source_name: str | None) -> NDArray[np.int32] | None:
        """Return the sorting of a folded down projection, by its source name."""
        if source_name is None:
            return None
        rec = self.by_source[source_name]
        group = group_of(rec)
        return None if group is None else sorted_rows(group)


def _rows(kind: type[T], record: Mapping[str, Any], name: str) -> list[T]:
    return [from_plain(kind, row, f"unpack.{name}.{n}") for n, row in enumerate(record[name])]


def _check_group(group: NDArray[np.int32], rec: LayerRecord, where: str) -> None:
    if group.min(initial=0) < 0 or group.max(initial=0) >= rec.scheme.groups:
        _unfit(
            where, f"groups 0 to {rec.scheme.groups - 1}", f"{group.min(initial=0)} to {group.max(initial=0)}"
        )


def _bounded(where: str, tag: str, shape: tuple[int, ...], limit: int) -> None:
    if tag not in dtypes.DTYPES or any(not 0 <= size < 1 << 40 for size in shape) or len(shape) > 8:
        _unfit(where, "a dtype and a shape", f"{tag[:20]} {str(list(shape))[:80]}")
    if math.prod(shape) * dtypes.DTYPES[tag][0] // 8 > limit:
        _unfit(where, f"at most {limit} bytes", str(list(shape)))


def _check_text(text: str, where: str) -> None:
    """Refuse text that cannot be written."""
    try:
        text.encode("utf-8", "surrogateescape")  # bytes of a file that was no UTF-8 come back as they were
    except UnicodeEncodeError:
        _unfit(where, "text that can be written", "half of a surrogate pair")


def _check_configs(configs: Mapping[str, str], value: Mapping[str, Any]) -> None:
    """Hold the settings that go back against the files that the manifest says the source had.

    Of an artifact that was copied the way back is that of its own source: ``original``.
    """
    sources = [value["source"], value.get("original") or {}]
    for name in CONFIGS:
        told = [_content_of(name, source["files"]) for source in sources if "files" in source]
        own = None
        if name in configs:
            own = hashlib.sha256(configs[name].encode("utf-8", "surrogateescape")).hexdigest()
        if told and own not in told:
            _unfit(f"unpack.configs.{name}", _file(told[0]), _file(own))


def _file(sha: str | None) -> str:
    return "no such file" if sha is None else f"a file with the sha256 {sha}"


def _content_of(name: str, files: Sequence[Mapping[str, Any]]) -> str | None:
    return next((file.get("header") for file in files if file["name"] == name), None)


def _unfit(where: str, expected: str, found: str) -> NoReturn:
    raise SourceError(
        "the manifest does not fit the artifact",
        code="manifest",
        where=f"{manifest.NAME}: {where}",
        expected=expected,
        found=found[:200].encode("ascii", "backslashreplace").decode(),
        hint="the manifest was changed, or belongs to another artifact",
    )
