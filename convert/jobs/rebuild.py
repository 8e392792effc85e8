"""The way back: what `unpack` needs to know of a layer, and how a source's small tensors are made again.

The record is made while converting, when the source is at hand: each small tensor is rebuilt from the
artifact's values and compared with the real one. What does not come out equal (a group map, dummy zeros,
float zeros of gemv_fast) is kept in the record itself, so that `unpack` never has to guess.
"""

import base64
import hashlib
import json
import zlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from w4pack.convert import formats
from w4pack.convert.core import dtypes
from w4pack.convert.core.order import sorted_rows
from w4pack.convert.core.params import Reorder, exact_in, transform
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.errors import SourceError
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.jobs.layerjob import LayerJob, column_map
from w4pack.convert.planning.record import to_plain

MAX_INLINE = 1 << 28  # bytes one kept tensor may unfold to; a hostile manifest cannot ask for more


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """One small tensor of the source. ``data`` (zlib, base64) only where it cannot be rebuilt."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    data: str | None


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """How one layer of the artifact goes back to its source.

    name       in the source
    scheme     of the source; ``layout`` and ``zero_kind`` say how its tensors are written
    rows       natural, or sorted by ``group`` without an ``act_perm`` in the artifact (a folded order)
    cols_from  the source layer whose sorting the columns follow
    group      the source's group map (zlib, base64 of int32), where rows are not in order
    codes      suffix, dtype and shape of the codes' tensor
    lossless   False for layers that left the packed form or were re-quantized
    """

    name: str
    layout: str
    scheme: QuantScheme
    zero_kind: str
    rows: Literal["natural", "sorted"]
    cols_from: str | None
    halves: int
    group: str | None
    codes: KeptTensor
    small: tuple[KeptTensor, ...]
    lossless: bool


def record(job: LayerJob, checkpoint: Checkpoint, strict_hash: str | None) -> LayerRecord:
    """Make a layer's record: rebuild every small tensor and keep the ones that differ."""
    layer, plan = job.layer, job.plan
    codes_info = layer.tensors[layer.module.grid(layer.scheme.bits).suffix]
    codes = KeptTensor(
        codes_info.name.rpartition(".")[2], codes_info.dtype, codes_info.shape, strict_hash or "", None
    )
    folded = plan.rows == "sorted" and not plan.scheme.act_order
    group = pack_array(job.source_params.group) if job.source_params.group is not None else None
    kept = plan.action == "pack" and _scales_kept(job)
    rows: Literal["natural", "sorted"] = "sorted" if folded else "natural"
    made = LayerRecord(
        layer.name,
        layer.layout,
        layer.scheme,
        layer.zeros.kind,
        rows,
        plan.cols_from,
        plan.halves,
        group,
        codes,
        (),
        kept,
    )
    if not kept:
        return made
    order = sorted_rows(job.source_params.group) if folded and job.source_params.group is not None else None
    cols = _columns_of(job)
    rebuilt = rebuild_small(made, job.params, plan.scheme, order, cols)
    return replace(
        made,
        small=tuple(
            _kept(s, t.dtype, checkpoint.read(t.name), rebuilt.get(s))
            for s, t in sorted(layer.small().items())
        ),
    )


def _scales_kept(job: LayerJob) -> bool:
    """Tell whether the scales' stored dtype holds them bit for bit."""
    source, made = job.layer.scheme.scale_dtype, job.plan.scheme.scale_dtype
    return source == made or exact_in(job.source_params.scales, source, made)


def _columns_of(job: LayerJob) -> NDArray[np.int32] | None:
    if job.codes.cols is None:
        return None
    return inverse(job.codes.cols, job.layer.scheme.out_features)


def _kept(suffix: str, tag: str, real: NDArray[Any], made: NDArray[Any] | None) -> KeptTensor:
    raw = np.ascontiguousarray(real).tobytes()
    equal = (
        made is not None
        and made.dtype == real.dtype
        and made.shape == real.shape
        and np.ascontiguousarray(made).tobytes() == raw
    )
    data = None if equal else base64.b64encode(zlib.compress(raw, 6)).decode()
    return KeptTensor(suffix, tag, tuple(real.shape), hashlib.sha256(raw).hexdigest(), data)


def rebuild_small(
    rec: LayerRecord,
    params: GroupParams,
    scheme: QuantScheme,
    order: NDArray[np.int32] | None,
    cols: NDArray[np.int32] | None,
) -> dict[str, NDArray[Any]]:
    """Make the source's small tensors from the artifact's parameters (natural order).

    order  sorting that a fold applied to the rows, or None
    cols   artifact column of each source column, or None: in order, padding at the end
    """
    group = group_of(rec)
    rows = inverse(order, rec.scheme.in_features) if order is not None else None
    back = transform(params, scheme, replace(rec.scheme, act_order=False), Reorder(rows, cols), group)
    layout = formats.get(rec.layout)
    natural = GroupParams(back.scales, back.zeros, group)
    if rec.layout == "gptq":
        kind = rec.zero_kind if rec.zero_kind in ("v1", "v1-nibble", "v2") else None
        made: dict[str, NDArray[Any]] = layout.encode_params(
            natural, replace(rec.scheme, act_order=group is not None), kind
        )
        return made
    plain: dict[str, NDArray[Any]] = layout.encode_params(
        natural, replace(rec.scheme, act_order=group is not None and rec.layout == "marlin")
    )
    return plain


def inverse(index: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    """Return for each of ``size`` source elements where ``index`` (PADDING allowed) put it."""
    back = np.zeros(size, np.int32)
    real = np.flatnonzero(index >= 0)
    back[index[real]] = real
    return back


def pack_array(values: NDArray[Any]) -> str:
    """Return an int32 array as text."""
    return base64.b64encode(zlib.compress(values.astype("<i4").tobytes(), 6)).decode()


def unpack_bytes(text: str, size: int, where: str) -> bytes:
    """Unfold text made by this module to exactly ``size`` bytes. Raises SourceError on anything else."""
    if not 0 <= size <= MAX_INLINE:
        raise SourceError(
            "the manifest holds too much data",
            code="manifest",
            where=where,
            expected=f"at most {MAX_INLINE} bytes",
        )
    try:
        raw = base64.b64decode(text, validate=True)
        unfold = zlib.decompressobj()
        data = unfold.decompress(raw, size + 1)
    except (ValueError, zlib.error) as err:
        raise SourceError(
            "the manifest holds data that does not unfold", code="manifest", where=where
        ) from err
    if len(data) != size:
        raise SourceError(
            "the manifest holds data of the wrong size",
            code="manifest",
            where=where,
            expected=f"{size} bytes",
            found=f"{len(data)} bytes",
        )
    return data


def group_of(rec: LayerRecord) -> NDArray[np.int32] | None:
    """Return a record's group map; None where rows are in order."""
    if rec.group is None:
        return None
    raw = unpack_bytes(rec.group, 4 * rec.scheme.in_features, f"w4pack.json: the group map of {rec.name}")
    return np.frombuffer(raw, "<i4").astype(np.int32)


def kept_array(kept: KeptTensor, where: str) -> NDArray[Any]:
    """Return a tensor that the manifest holds whole."""
    dtype = dtypes.numpy_dtype(kept.dtype)
    size = int(np.prod(kept.shape, dtype=np.int64)) * dtype.itemsize
    return np.frombuffer(unpack_bytes(kept.data or "", size, where), dtype).reshape(kept.shape)


def record_json(rec: LayerRecord) -> str:
    """Return the record as JSON text: there are many, and text is what memory holds best."""
    return json.dumps(to_plain(rec))


def source_columns(
    rec: LayerRecord, order: NDArray[np.int32] | None, stored: int
) -> NDArray[np.int32] | None:
    """Return the artifact column of each source column, or None: in order."""
    cols = column_map(order, rec.halves, rec.scheme.out_features, stored)
    return None if cols is None else inverse(cols, rec.scheme.out_features)
