"""Group parameters of an output layer from those of its source: gather, never recompute.

One rule covers dropping a trivial order, re-ordering block-constant groups, splitting and merging groups,
sorting rows and permuting columns: output group b takes the scale row of the source group that its first row
belongs to.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from w4pack.convert.core import dtypes
from w4pack.convert.core.order import natural_group
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.errors import Refused

PADDING = -1  # in a row or column map: an element that the source does not have


@dataclass(frozen=True, slots=True, eq=False)
class Reorder:
    """How output rows and columns are taken from the source's natural order.

    rows  (K_out,) int32 source row of each output row, PADDING where there is none; None: identity, cut or
          padded
    cols  (N_out,) int32 source column of each output column, likewise
    """

    rows: NDArray[np.int32] | None
    cols: NDArray[np.int32] | None


def index_map(explicit: NDArray[np.int32] | None, size: int, available: int) -> NDArray[np.int32]:
    """Return the map of ``size`` entries: the explicit one, or identity over ``available`` elements."""
    if explicit is not None:
        return explicit
    index = np.arange(size, dtype=np.int32)
    index[available:] = PADDING
    return index


def _source_group_of(
    out: QuantScheme,
    out_group: NDArray[np.int32] | None,
    src_group: NDArray[np.int32],
    rows: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Return for each output group the source group of its first real row, PADDING where it has none."""
    groups = natural_group(out.in_features, out.group_size) if out_group is None else out_group
    result = np.full(out.groups, PADDING, np.int32)
    real = np.flatnonzero(rows != PADDING)[::-1]  # backwards: the first row of a group is written last
    result[groups[real]] = src_group[rows[real]]
    return result


def transform(
    params: GroupParams,
    source: QuantScheme,
    out: QuantScheme,
    reorder: Reorder,
    out_group: NDArray[np.int32] | None = None,
) -> GroupParams:
    """Gather scales and zeros for an output scheme. Bit-exact: nothing is recomputed but to widen to 8 bit.

    params     of the source, natural order; ``group`` may be None
    out_group  (K_out,) group map of the output, for outputs that keep a map; None: natural
    Padded columns and groups get scale +0.0 and the midpoint as zero point. Going from 4 to 8 bit makes the
    layer symmetric: zero points move into the codes.
    """
    src_group = (
        params.group if params.group is not None else natural_group(source.in_features, source.group_size)
    )
    rows = index_map(reorder.rows, out.in_features, source.in_features)
    cols = index_map(reorder.cols, out.out_features, source.out_features)
    group_of = _source_group_of(out, out_group, src_group, rows)
    scales = _gather(params.scales, group_of, cols, fill=0)
    zeros = None
    if not out.sym:
        if params.zeros is None:
            zeros = np.full(scales.shape, out.midpoint, np.uint8)
        else:
            zeros = _gather(params.zeros, group_of, cols, fill=out.midpoint)
    return GroupParams(convert_scales(scales, source.scale_dtype, out.scale_dtype), zeros, out_group)


def _gather(
    values: NDArray[Any], rows: NDArray[np.int32], cols: NDArray[np.int32], fill: int
) -> NDArray[Any]:
    """Return ``values[rows][:, cols]``, ``fill`` where an index is PADDING. No copy for identity maps."""
    if np.array_equal(rows, np.arange(values.shape[0])) and np.array_equal(cols, np.arange(values.shape[1])):
        return values
    out = values[rows][:, cols]
    out[rows == PADDING] = fill
    out[:, cols == PADDING] = fill
    return out


def convert_scales(scales: NDArray[Any], source_tag: str, tag: str) -> NDArray[Any]:
    """Change the dtype of scales with at most one rounding. ``exact_in`` says beforehand if it is none."""
    if source_tag == tag:
        return scales
    return dtypes.from_f32(dtypes.to_f32(scales, source_tag), tag)


def exact_in(scales: NDArray[Any], source_tag: str, tag: str) -> bool:
    """Tell whether every scale survives a change of dtype bit for bit."""
    wide = dtypes.to_f32(scales, source_tag)
    back = dtypes.to_f32(dtypes.from_f32(wide, tag), tag)
    return bool(np.array_equal(wide.view(np.uint32), back.view(np.uint32)))


def first_inexact(scales: NDArray[Any], source_tag: str, tag: str) -> tuple[int, int, float]:
    """Return (group, column, value) of the first scale that ``tag`` cannot hold."""
    wide = dtypes.to_f32(scales, source_tag)
    back = dtypes.to_f32(dtypes.from_f32(wide, tag), tag)
    bad = int(np.flatnonzero((wide.view(np.uint32) != back.view(np.uint32)).reshape(-1))[0])
    row, col = divmod(bad, wide.shape[1])
    return row, col, float(wide[row, col])


def rounding_loses_a_scale(scales: NDArray[Any], source_tag: str, tag: str) -> bool:
    """Tell whether rounding would turn a finite, non-zero scale into zero or infinity."""
    wide = dtypes.to_f32(scales, source_tag)
    back = dtypes.to_f32(dtypes.from_f32(wide, tag), tag)
    return bool((((back == 0) & (wide != 0)) | (np.isinf(back) & np.isfinite(wide))).any())


def check_representable(params: GroupParams, scheme: QuantScheme, where: str) -> None:
    """Raise Refused if a zero point does not fit ``scheme``'s field (16 in 4 bit, from a nibble reading)."""
    if params.zeros is not None and int(params.zeros.max(initial=0)) >= 1 << scheme.bits:
        raise Refused(
            f"a zero point of {int(params.zeros.max())} fits no {scheme.bits} bit field",
            code="zero-overflow",
            where=where,
            expected=f"0..{(1 << scheme.bits) - 1}",
            found=str(int(params.zeros.max())),
            hint="`--to dense` can hold it",
        )
